"""Dense batches are a function of seed, epoch and step; labels go where the pixels go; caches change nothing."""

import numpy as np
import pytest
import torch
from label_maps import COLOURS, Painted, label_map, painted

from msvit.lab.data import BadImage
from msvit.lab.data.dense import IGNORE, DenseBatch, DenseImages, DenseItem, dense_batches, open_dense

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
forking = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning", "ignore:This DataLoader will")
both = pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
either = pytest.mark.parametrize("train", [True, False], ids=["train", "val"])


def loader(source, **options):
    settings = {"img_size": 32, "batch_size": 4, "train": True, "workers": 0, **HALF}
    return dense_batches(source, **{**settings, **options})


def assert_same(got, want, atol: float = 0.0) -> None:
    assert len(got) == len(want) > 0
    for ours, theirs in zip(got, want, strict=True):
        if isinstance(theirs, DenseBatch):
            pairs = [(ours.label, theirs.label)], [(ours.image, theirs.image)]
        else:
            assert (ours.names, ours.indices) == (theirs.names, theirs.indices)
            pairs = zip(ours.labels, theirs.labels, strict=True), zip(ours.images, theirs.images, strict=True)
        for label, other in pairs[0]:
            torch.testing.assert_close(label, other)
        for image, other in pairs[1]:
            torch.testing.assert_close(image, other, rtol=0, atol=atol)


@forking
@either
@both
def test_workers_change_nothing(cache, train):
    source = Painted(14, bad=(5,))
    options = {"cache": cache, "train": train, "skip_bad": True}
    one, two = loader(source, **options), loader(source, workers=2, **options)
    assert_same(list(two.iterate(3)), list(one.iterate(3)))
    assert one.skipped == two.skipped == ["picture 5"]


@both
def test_the_same_epoch_is_the_same_and_the_next_is_another(cache):
    ours = loader(Painted(12), cache=cache, seed=7)
    first = list(ours.iterate(0))
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert_same(list(ours.iterate(0)), first)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])
    assert not torch.equal(next(ours.iterate(1)).label, first[0].label)
    assert not torch.equal(next(loader(Painted(12), cache=cache, seed=8).iterate(0)).label, first[0].label)


@either
@both
def test_a_resumed_epoch_is_the_rest_of_it(cache, train):
    ours = loader(Painted(20), cache=cache, train=train)
    assert_same(list(ours.iterate(1, start_step=3)), list(ours.iterate(1))[3:])


@both
def test_two_processes_see_the_halves_of_what_one_sees_in_training(cache):
    source = Painted(11)
    whole = list(loader(source, cache=cache, drop_last=False))
    halves = [list(loader(source, cache=cache, drop_last=False, rank=rank, world_size=2)) for rank in (0, 1)]
    joined = [
        DenseBatch(torch.cat([a.image, b.image]), torch.cat([a.label, b.label])) for a, b in zip(*halves, strict=True)
    ]
    assert_same(joined, whole, atol=1e-5)


@both
def test_two_processes_see_the_halves_of_what_one_sees_in_evaluation(cache):
    source = Painted(11)
    whole = list(loader(source, cache=cache, train=False))
    halves = [list(loader(source, cache=cache, train=False, rank=rank, world_size=2)) for rank in (0, 1)]
    joined = [
        DenseImages(a.images + b.images, a.labels + b.labels, a.names + b.names, a.indices + b.indices)
        for a, b in zip(*halves, strict=True)
    ]
    assert_same(joined, whole)


@pytest.mark.parametrize("scales", [(0.5, 2.0), (0.2, 0.4), (3.0, 4.0)], ids=["usual", "small", "large"])
@pytest.mark.parametrize("photometric", [False, True], ids=["plain", "photometric"])
def test_cached_and_decoded_training_agree(scales, photometric):
    options = {"scales": scales, "batch_size": 16, "photometric": photometric}
    for epoch in range(3):
        cached = list(loader(Painted(16), cache=True, **options).iterate(epoch))
        decoded = list(loader(Painted(16), **options).iterate(epoch))
        limit = 5 if photometric else 2  # grey levels; bytes are rounded twice on one side, and contrast enlarges that
        assert_same(cached, decoded, atol=limit / 127.5)


def test_a_cache_of_scaled_images_cuts_the_same_windows():
    options = {"short_side": 40, "batch_size": 16, "photometric": False}
    cached, decoded = next(iter(loader(Painted(16), cache=True, **options))), next(iter(loader(Painted(16), **options)))
    assert torch.equal(cached.label, decoded.label)
    assert (cached.image - decoded.image).abs().mean() < 0.05


@pytest.mark.gpu
def test_a_cache_on_the_gpu_gives_what_the_cpu_gives():
    ours = loader(Painted(16), cache=True, device="cuda").iterate(3)
    cpu = [DenseBatch(batch.image.cpu(), batch.label.cpu()) for batch in ours]
    assert_same(cpu, list(loader(Painted(16)).iterate(3)), atol=5 / 127.5)
    ours = loader(Painted(16), device="cuda", workers=2).iterate(3)
    cpu = [DenseBatch(batch.image.cpu(), batch.label.cpu()) for batch in ours]
    assert_same(cpu, list(loader(Painted(16)).iterate(3)), atol=1e-3)


@both
@pytest.mark.parametrize("short_side", [None, 45])
def test_every_pixel_has_the_colour_of_its_label_wherever_it_goes(cache, short_side):
    colours = torch.from_numpy(COLOURS.astype(np.float32))
    for epoch in range(2):
        ours = loader(Painted(16), cache=cache, photometric=False, batch_size=16, short_side=short_side)
        batch = next(ours.iterate(epoch))
        grey = batch.image.permute(0, 2, 3, 1) * 127.5 + 127.5
        labelled = batch.label != IGNORE
        nearest = (grey[..., None, :] - colours).abs().sum(-1).argmin(-1)  # (b, s, s)
        label = batch.label.float()[:, None]
        around = torch.nn.functional.max_pool2d(label, 7, 1, 3) == -torch.nn.functional.max_pool2d(-label, 7, 1, 3)
        inside = around[:, 0] & labelled  # away from borders, where colours are mixed
        assert inside.float().mean() > 0.1
        assert (nearest == batch.label)[inside].float().mean() > 0.99  # a border may lie just outside of the window
        assert (nearest == batch.label)[labelled].float().mean() > 0.85


@both
def test_windows_are_mirrored_half_the_time(cache):
    class Rising(Painted):
        """Labels rise from left to right."""

        def __getitem__(self, index: int) -> DenseItem:
            labels = np.linspace(0, 4.99, 40).astype(np.uint8)[None].repeat(40, 0)
            return DenseItem(image=painted(labels), label_map=labels, name=str(index))

    label = next(iter(loader(Rising(64), cache=cache, batch_size=64, scales=(1.0, 1.0)))).label
    assert (label[:, 0, 0] != label[:, 0, -1]).all()
    assert 16 < (label[:, 0, 0] > label[:, 0, -1]).sum() < 48


@both
def test_a_window_larger_than_the_image_is_padded_with_0_and_ignore(cache):
    options = {"scales": (1.0, 1.0), "img_size": 48, "mean": (0.1, 0.2, 0.3), "batch_size": 8}
    batch = next(loader(Painted(8, shape=(21, 33)), cache=cache, **options).iterate(0))
    assert batch.image.shape == (8, 3, 48, 48)
    assert (batch.image[:, :, 21:] == 0).all()
    assert (batch.image[:, :, :, 33:] == 0).all()
    assert (batch.label[:, 21:] == IGNORE).all()
    assert (batch.label[:, :, 33:] == IGNORE).all()
    assert (batch.label[:, :21, :33] < 5).all()
    assert (batch.image[:, :, :21, :33] != 0).float().mean() > 0.99
    assert batch.label.dtype == torch.int64


@both
def test_at_scale_1_a_window_is_the_image_itself(cache):
    source = Painted(8, shape=(32, 32))
    batch = next(loader(source, cache=cache, scales=(1.0, 1.0), photometric=False, batch_size=8).iterate(0))
    unseen = set(range(8))
    for image, label in zip(batch.image, batch.label, strict=True):
        for number in unseen:
            for turned in (label_map(number, (32, 32)), label_map(number, (32, 32))[:, ::-1]):
                if np.array_equal(label.numpy(), turned):
                    found, want = number, COLOURS[turned]
        unseen.remove(found)
        np.testing.assert_allclose(image.permute(1, 2, 0) * 127.5 + 127.5, want, atol=1e-3)
    assert not unseen


@both
@pytest.mark.parametrize("short_side", [None, 17])
def test_evaluation_scales_images_and_leaves_label_maps_as_they_are(cache, short_side):
    source = Painted(7)
    seen = list(loader(source, train=False, cache=cache, short_side=short_side))
    assert [batch.indices for batch in seen] == [[0, 1, 2, 3], [4, 5, 6]]
    for batch in seen:
        for image, label, name, index in zip(batch.images, batch.labels, batch.names, batch.indices, strict=True):
            item = source[index]
            assert name == item.name == f"picture {index}"
            np.testing.assert_array_equal(label, item.label_map)
            assert (image.dtype, label.dtype) == (torch.float32, torch.int64)
            height, width = label.shape
            if short_side is None:
                np.testing.assert_allclose(image.permute(1, 2, 0) * 127.5 + 127.5, item.image, atol=1e-3)
            else:
                assert min(image.shape[1:]) == 17
                assert abs(image.shape[2] / image.shape[1] - width / height) < 0.1 * width / height


@pytest.mark.parametrize("short_side", [None, 17])
def test_evaluation_is_the_same_to_the_bit_with_and_without_a_cache(short_side):
    options = {"train": False, "short_side": short_side}
    assert_same(list(loader(Painted(9), cache=True, **options)), list(loader(Painted(9), **options)))


@both
def test_a_bad_image_stops_the_run_with_its_name(cache):
    with pytest.raises(BadImage, match=r"picture 5 cannot be read as an image \(torn\)"):
        list(loader(Painted(12, bad=(5,)), cache=cache))


@both
def test_skipped_in_training_means_the_next_good_image_stands_in(cache):
    bad = loader(Painted(8, bad=(2, 7)), cache=cache, skip_bad=True, batch_size=8)
    stand_in = loader(Painted(8), batch_size=8)
    assert len(next(bad.iterate(0)).label) == 8
    assert bad.num_skipped == 2
    rows = stand_in.plan.rows(0)[0]
    rows = np.array([{2: 3, 7: 0}.get(row, row) for row in rows.tolist()])
    assert_same(list(bad.iterate(0)), list(stand_in.feed.batches(0, [rows])), atol=5 / 127.5)


@both
def test_skipped_in_evaluation_means_left_out(cache):
    ours = loader(Painted(12, bad=(4, 5, 6, 7, 9)), cache=cache, skip_bad=True, train=False)
    assert [batch.indices for batch in ours] == [[0, 1, 2, 3], [8, 10, 11]]
    assert ours.num_skipped == 5


@either
@both
def test_nothing_but_bad_images_is_refused(cache, train):
    with pytest.raises(ValueError, match="all 4 images are bad, none can be shown; the last: picture"):
        list(loader(Painted(4, bad=(0, 1, 2, 3)), cache=cache, skip_bad=True, train=train))


def test_a_cache_that_cannot_fit_is_refused_before_it_is_filled(monkeypatch):
    monkeypatch.setattr("msvit.lab.data.dense.store.free_memory", lambda device: 2.0**10)
    with pytest.raises(ValueError, match=r"a cache of 8 images .* needs about .* but cpu has .*; pass cache=False"):
        loader(Painted(8), cache=True)


def test_a_cache_grows_where_images_are_larger_than_foretold(monkeypatch):
    monkeypatch.setattr("msvit.lab.data.dense.store.foretell", lambda decoder: (10.0, 10.0))
    options = {"train": False, "cache": True}
    assert_same(list(loader(Painted(9), **options)), list(loader(Painted(9), train=False)))


def test_a_cache_without_a_spare_byte_has_room_for_every_canvas(monkeypatch):
    monkeypatch.setattr("msvit.lab.data.dense.store.ROOM", 1.0)
    options = {"batch_size": 8, "photometric": False}
    cached, decoded = loader(Painted(8), cache=True, **options), loader(Painted(8), **options)
    assert_same(list(cached), list(decoded), atol=2 / 127.5)


def test_scenes_can_be_trained_on():
    batch = next(iter(loader(open_dense("scenes", size=32, num_images=8), cache=True, img_size=48)))
    assert batch.image.shape == (4, 3, 48, 48)
    assert len(batch.label.unique()) > 2
