"""Batches are a function of seed, epoch and step: not of workers, processes, caches or where a run began."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pictures import COLOURS, Pictures

from msvit_lab.data import IGNORE, Augmentation, BadImage, DenseImages, batches, dense_batches
from msvit_lab.data.transforms import CROP, Key, shuffled, uniform

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
forking = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning", "ignore:This DataLoader will")
kinds = pytest.mark.parametrize("dense", [False, True], ids=["classes", "label maps"])
both = pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
DEIT = Augmentation(rand_augment="rand-m9-mstd0.5-inc1", erasing=0.5, mixup=0.8, cutmix=1.0, smoothing=0.1, repeats=3)
VIEWS = replace(DEIT, erasing=1.0, mixup=0.0, cutmix=0.0)  # what does not depend on the number of processes
NAMES = ["classes", "augmented", "label maps"]
each = pytest.mark.parametrize(("dense", "extra"), [(False, None), (False, DEIT), (True, None)], ids=NAMES)
either = pytest.mark.parametrize("train", [True, False], ids=["train", "val"])


def loader(source: Any, **options: Any) -> Any:
    settings = {"img_size": 32 if source.dense else 16, "batch_size": 4, "train": True, "workers": 0, **HALF}
    extra = options.get("augmentation")
    if extra is not None and options.get("cache"):
        options["augmentation"] = replace(extra, rand_augment=None)  # needs images that are decoded
    if source.dense:
        return dense_batches(source, **{**settings, **options})
    return batches(source, **{**settings, "crops": "inception", **options})


def images(batch: Any) -> list[tuple[Any, ...]]:
    """What a batch has of each image."""
    if isinstance(batch, DenseImages):
        return list(zip(batch.images, batch.labels, strict=True))
    masks = [None] * len(batch.label) if batch.object_mask is None else batch.object_mask
    return list(zip(batch.image.cpu(), batch.label.cpu(), masks, strict=True))


def assert_same(got: Any, want: Any, atol: float = 0.0) -> None:
    got, want = list(got), list(want)
    assert [len(images(batch)) for batch in got] == [len(images(batch)) for batch in want] != []
    for ours, theirs in zip((i for b in got for i in images(b)), (i for b in want for i in images(b)), strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=atol)
        assert torch.equal(ours[1], theirs[1])
        for mine, other in zip(ours[2:], theirs[2:], strict=True):
            assert type(mine) is type(other)
            if isinstance(mine, torch.Tensor):
                torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=atol)
            else:
                assert mine == other


@forking
@pytest.mark.parametrize(
    ("dense", "train", "extra"),
    [(False, True, None), (False, True, DEIT), (True, True, None), (True, False, None)],
    ids=["classes", "augmented", "label maps", "evaluation"],
)
@both
def test_workers_change_nothing(cache, dense, train, extra):
    options = {"cache": cache, "skip_bad": True, "train": train, "augmentation": extra}
    one, two = (loader(Pictures(14, bad=(12,), dense=dense), workers=workers, **options) for workers in (0, 2))
    assert_same(two.iterate(3), one.iterate(3))
    assert one.skipped == two.skipped == ["picture 12"]


def test_a_seed_means_the_same_batches_for_ever():
    assert shuffled(8, 3, 2).tolist() == [7, 5, 6, 1, 2, 3, 4, 0]
    draw = uniform(Key(3, 2, np.array([5])), 3, CROP)
    assert draw.tolist() == [[0.8037966444426622, 0.17712134755480036, 0.11138538524996189]]


@each
@both
def test_the_same_epoch_is_the_same_and_the_next_is_another(cache, dense, extra):
    state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    options = {"cache": cache, "augmentation": extra}
    ours, other = (loader(Pictures(12, dense=dense), seed=seed, **options) for seed in (7, 8))
    first = list(ours.iterate(2))
    assert_same(ours.iterate(2), first)
    for different in (ours.iterate(3), other.iterate(2)):
        assert not torch.equal(next(different).label, first[0].label)
    assert torch.equal(torch.get_rng_state(), state[0])  # global generators are neither used nor changed
    assert np.array_equal(np.random.get_state()[1], state[1])
    assert random.getstate() == state[2]


def test_an_epoch_shows_every_image_once_without_the_last_short_batch():
    labels = torch.cat([batch.label for batch in loader(Pictures(12)).iterate(4)])
    assert sorted(labels.tolist()) == list(range(12))
    assert [len(batch.label) for batch in loader(Pictures(11)).iterate(0)] == [4, 4]
    assert [len(batch.label) for batch in loader(Pictures(11), train=False).iterate(0)] == [4, 4, 3]
    assert len(loader(Pictures(11))) == 2


@pytest.mark.parametrize(("dense", "extra"), [(False, None), (False, VIEWS), (True, None)], ids=NAMES)
@either
@both
def test_two_processes_see_the_halves_of_what_one_sees(cache, train, dense, extra):
    options = {"cache": cache, "train": train, "augmentation": extra}
    whole = [images(batch) for batch in loader(Pictures(11, dense=dense), **options).iterate(0)]
    halves = [loader(Pictures(11, dense=dense), rank=rank, world_size=2, **options) for rank in (0, 1)]
    joined = [images(a) + images(b) for a, b in zip(*(half.iterate(0) for half in halves), strict=True)]
    assert [len(images(batch)) for batch in halves[0].iterate(0)] == ([2, 2] if train else [2, 2, 1])
    for ours, theirs in zip(joined, whole, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine[0], other[0], rtol=0, atol=1e-5)
            assert torch.equal(mine[1], other[1])


@each
@either
@both
def test_a_resumed_epoch_is_the_rest_of_it_and_decodes_no_more(cache, train, dense, extra):
    source = Pictures(20, dense=dense)
    ours = loader(source, cache=cache, train=train, augmentation=extra)
    whole = list(ours.iterate(1))
    source.num_read = 0
    assert_same(ours.iterate(1, start_step=3), whole[3:])
    assert source.num_read == (0 if cache else 8)
    assert list(ours.iterate(1, start_step=5)) == []
    with pytest.raises(ValueError, match="start_step is 6, but an epoch has 5 steps"):
        ours.iterate(1, start_step=6)


@pytest.mark.parametrize("scales", [(0.5, 2.0), (0.2, 0.4), (3.0, 4.0)], ids=["usual", "small", "large"])
@pytest.mark.parametrize("photometric", [False, True], ids=["plain", "photometric"])
def test_cached_and_decoded_windows_agree(scales, photometric):
    options = {"scales": scales, "batch_size": 16, "photometric": photometric}
    limit = 5 if photometric else 2  # grey levels; bytes are rounded twice on one side, and contrast enlarges that
    cached, decoded = (loader(Pictures(16, dense=True), cache=cache, **options) for cache in (True, False))
    for epoch in range(3):
        assert_same(cached.iterate(epoch), decoded.iterate(epoch), atol=limit / 127.5)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"crops": "inception"}, {"crops": "light"}, {"crops": "none"}, {"dense": True}])
def test_the_gpu_gives_what_the_cpu_gives(options):
    dense = options.pop("dense", False)
    source = Pictures(8, shape=(40, 40), dense=dense)
    for more, atol in (({"cache": True}, (5 if dense else 2) / 127.5), ({}, 1e-3)):
        want = loader(source, **more, **options).iterate(3)
        assert_same(loader(source, device="cuda", **more, **options).iterate(3), want, atol=atol)


@pytest.mark.parametrize("option", [1.0, 0.875, None, 17])
def test_evaluation_is_the_same_to_the_bit_with_and_without_a_cache(option):
    dense = option in (None, 17)
    options = {"short_side": option} if dense else {"eval_crop": option, "interpolation": "bicubic", "img_size": 24}
    cached, decoded = (loader(Pictures(9, dense=dense), cache=c, train=False, **options) for c in (True, False))
    assert len(cached) == 3
    assert_same(cached.iterate(0), decoded.iterate(0))
    if not dense:
        assert torch.cat([batch.label for batch in cached.iterate(0)]).tolist() == list(range(9))  # in order


def test_images_are_normalised():
    source = Pictures(4, shape=(16, 16))
    batch = next(loader(source, train=False, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0)).iterate(0))
    image = torch.from_numpy(np.stack([np.asarray(source[i].image) for i in range(4)])).permute(0, 3, 1, 2) / 255
    want = (image - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    torch.testing.assert_close(batch.image, want)


@both
def test_the_object_mask_goes_where_the_image_goes(cache):
    for batch in loader(Pictures(12), cache=cache, img_size=32).iterate(0):
        red = batch.image[:, 0] * 127.5 + 127.5
        sure = (red - 127.5).abs() > 25  # away from the border, where both are mixed
        assert sure.float().mean() > 0.3
        wrong = ((batch.object_mask > 0.5) != (red > 127.5)) & sure
        assert wrong.float().mean() < 0.01, wrong.float().mean((1, 2))
        assert batch.object_mask.min() >= 0
        assert batch.object_mask.max() <= 1


@both
@pytest.mark.parametrize("short_side", [None, 45])
def test_the_label_map_goes_where_the_image_goes(cache, short_side):
    colours = torch.from_numpy(COLOURS.astype(np.float32))
    options = {"photometric": False, "batch_size": 16, "short_side": short_side}
    ours = loader(Pictures(16, dense=True), cache=cache, **options)
    for epoch in range(2):
        batch = next(ours.iterate(epoch))
        grey = batch.image.permute(0, 2, 3, 1) * 127.5 + 127.5
        nearest = (grey[..., None, :] - colours).abs().sum(-1).argmin(-1)  # (b, s, s)
        label, labelled = batch.label.float()[:, None], batch.label != IGNORE
        inside = (F.max_pool2d(label, 7, 1, 3) == -F.max_pool2d(-label, 7, 1, 3))[:, 0] & labelled  # away from borders
        assert inside.float().mean() > 0.1
        assert (nearest == batch.label)[inside].float().mean() > 0.99  # a border may lie just outside of the window
        assert (nearest == batch.label)[labelled].float().mean() > 0.85


@both
def test_a_window_larger_than_the_image_is_padded_with_0_and_ignore(cache):
    options = {"scales": (1.0, 1.0), "img_size": 48, "mean": (0.1, 0.2, 0.3), "batch_size": 8}
    batch = next(loader(Pictures(8, shape=(21, 33), dense=True), cache=cache, **options).iterate(0))
    assert (batch.image.shape, batch.label.dtype) == ((8, 3, 48, 48), torch.int64)
    shown = torch.zeros(48, 48, dtype=torch.bool)
    shown[:21, :33] = True
    assert (batch.image[:, :, ~shown] == 0).all()
    assert (batch.image[:, :, shown] != 0).float().mean() > 0.99
    assert (batch.label[:, ~shown] == IGNORE).all()
    assert (batch.label[:, shown] < 5).all()


@both
@pytest.mark.parametrize("short_side", [None, 17])
def test_evaluation_scales_images_and_leaves_label_maps_as_they_are(cache, short_side):
    source = Pictures(7, dense=True)
    seen = list(loader(source, train=False, cache=cache, short_side=short_side).iterate(0))
    assert [len(batch.images) for batch in seen] == [4, 3]
    for index, (image, label) in enumerate(one for batch in seen for one in images(batch)):
        item = source[index]
        np.testing.assert_array_equal(label, item.label_map)
        assert (image.dtype, label.dtype) == (torch.float32, torch.int64)
        height, width = label.shape
        if short_side is None:
            np.testing.assert_allclose(image.permute(1, 2, 0) * 127.5 + 127.5, item.image, atol=1e-3)
        else:
            assert min(image.shape[1:]) == 17
            assert abs(image.shape[2] / image.shape[1] - width / height) < 0.1 * width / height


@forking
@kinds
@pytest.mark.parametrize("options", [{}, {"cache": True}, {"workers": 2}], ids=["decoded", "cached", "in a worker"])
def test_a_bad_image_stops_the_run_with_its_name(options, dense):
    with pytest.raises(BadImage, match=r"picture 5 cannot be read as an image \(torn\); .*--skip-bad"):
        list(loader(Pictures(12, bad=(5, 6), dense=dense), train=False, **options).iterate(0))


@pytest.mark.parametrize(("dense", "repeats"), [(False, 1), (False, 3), (True, 1)])
@both
def test_skipped_in_training_means_the_next_good_image_stands_in(cache, dense, repeats):
    options = {"cache": cache, "augmentation": Augmentation(repeats=repeats)}
    bad = loader(Pictures(12, bad=(5, 6, 11), dense=dense), skip_bad=True, **options)
    good = loader(Pictures(12, dense=dense), **options)
    good_one = {5: 7, 6: 7, 11: 0}
    rows = [np.array([n // 12 * 12 + good_one.get(n % 12, n % 12) for n in r.tolist()]) for r in good.plan.rows(0)]
    assert_same(bad.iterate(0), good.feed.batches(0, rows), atol=1e-5)
    if repeats == 1:  # else an epoch leaves out other images
        assert (len(bad.skipped), sorted(bad.skipped)) == (3, ["picture 11", "picture 5", "picture 6"])


@kinds
@both
def test_skipped_in_evaluation_means_left_out(cache, dense):
    ours = loader(Pictures(12, bad=(4, 5, 6, 7, 9), dense=dense), cache=cache, skip_bad=True, train=False)
    if dense:
        maps = [label.tolist() for batch in ours.iterate(0) for label in batch.labels]
        assert maps == [Pictures(12, dense=True)[i].label_map.tolist() for i in (0, 1, 2, 3, 8, 10, 11)]
    else:
        assert [batch.label.tolist() for batch in ours.iterate(0)] == [[0, 1, 2, 3], [8, 10, 11]]
    assert len(ours.skipped) == 5


@kinds
@either
@both
def test_nothing_but_bad_images_is_an_error(cache, train, dense):
    with pytest.raises(ValueError, match="all 4 images are bad, none can be shown; the last: picture"):
        list(loader(Pictures(4, bad=(0, 1, 2, 3), dense=dense), cache=cache, skip_bad=True, train=train).iterate(0))


@kinds
def test_a_cache_that_cannot_fit_is_an_error_before_it_is_filled(monkeypatch, dense):
    monkeypatch.setattr("msvit_lab.data.cache.free_memory", lambda device: 2.0**10)
    source = Pictures(8, dense=dense)
    with pytest.raises(ValueError, match=r"a cache of 8 images needs about .* GiB, but cpu has .*; pass cache=False"):
        loader(source, cache=True)
    assert source.num_read == (8 if dense else 0)  # whole images are probed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 64}, "batch_size is 64, but there are 12 images; make it smaller"),
        ({"batch_size": 5, "world_size": 2}, "batch_size is 5, but .* all 2 processes .*; try 4"),
        ({"augmentation": DEIT, "batch_size": 6, "world_size": 2}, "a batch of 6 .* each of 2 processes; .* of 4"),
        ({"augmentation": DEIT, "dense": True}, "cannot follow rand_augment and erasing and mixup and cutmix and rep"),
        ({"augmentation": Augmentation(rand_augment="m9")}, r"rand_augment is 'm9', .*\(it must begin with rand\); De"),
        ({"dense": True, "scales": (2.0, 0.5)}, r"scales are \(2\.0, 0\.5\), but must be positive, the smaller first"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_wrong_options_are_errors_with_both_values(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        loader(Pictures(12, dense=options.pop("dense", False)), **options)
