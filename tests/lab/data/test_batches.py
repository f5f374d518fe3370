"""Batches are a function of seed, epoch and step: not of workers, processes, caches or where a run began."""

import numpy as np
import pytest
import torch
from pictures import Pictures, write_folders

from msvit.lab.data import BadImage, Batch, batches, open_source

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
forking = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning", "ignore:This DataLoader will")


def loader(source, **options):
    settings = {"img_size": 16, "batch_size": 4, "train": True, "crops": "inception", "workers": 0, **HALF}
    return batches(source, **{**settings, **options})


def assert_same(got: list[Batch], want: list[Batch], atol: float = 0.0) -> None:
    assert len(got) == len(want) > 0
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours.label, theirs.label)
        torch.testing.assert_close(ours.image, theirs.image, rtol=0, atol=atol)
        assert (ours.object_mask is None) == (theirs.object_mask is None)
        if ours.object_mask is not None:
            torch.testing.assert_close(ours.object_mask, theirs.object_mask, rtol=0, atol=atol)


@forking
@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
def test_workers_change_nothing(cache):
    source = Pictures(14, bad=(5,), mask=True)
    one = loader(source, cache=cache, skip_bad=True)
    two = loader(source, cache=cache, skip_bad=True, workers=2)
    assert_same(list(two.iterate(3)), list(one.iterate(3)))
    assert one.skipped == two.skipped == ["picture 5"]


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
def test_the_same_epoch_is_the_same_and_the_next_is_another(cache):
    ours = loader(Pictures(12), cache=cache, seed=7)
    first = list(ours.iterate(0))
    torch.manual_seed(5)
    np.random.seed(5)
    assert_same(list(ours.iterate(0)), first)
    assert not torch.equal(next(ours.iterate(1)).label, first[0].label)
    assert not torch.equal(next(loader(Pictures(12), cache=cache, seed=8).iterate(0)).label, first[0].label)


def test_iter_goes_on_to_the_next_epoch():
    ours = loader(Pictures(12), epoch=2)
    assert_same([*ours, *ours], [*ours.iterate(2), *ours.iterate(3)])


def test_an_epoch_shows_every_image_once():
    labels = torch.cat([batch.label for batch in loader(Pictures(12)).iterate(4)])
    assert sorted(labels.tolist()) == list(range(12))


def test_the_global_generators_are_left_alone():
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(loader(Pictures(12), cache=True))
    list(loader(Pictures(12)))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "val"])
def test_two_processes_see_the_halves_of_what_one_sees(cache, train):
    source = Pictures(11, mask=True)
    options = {"cache": cache, "train": train, "drop_last": False}
    whole = list(loader(source, **options))
    halves = [list(loader(source, rank=rank, world_size=2, **options)) for rank in (0, 1)]
    joined = [
        Batch(*(torch.cat([getattr(half, name) for half in pair]) for name in ("image", "label", "object_mask")))
        for pair in zip(*halves, strict=True)
    ]
    assert_same(joined, whole, atol=1e-5)
    assert [len(half.label) for half in halves[0]] == [2, 2, 1]


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
def test_a_resumed_epoch_is_the_rest_of_it(cache):
    ours = loader(Pictures(20), cache=cache)
    assert_same(list(ours.iterate(1, start_step=3)), list(ours.iterate(1))[3:])
    assert list(ours.iterate(1, start_step=5)) == []
    with pytest.raises(ValueError, match="start_step is 6, but an epoch has 5 steps"):
        ours.iterate(1, start_step=6)


def test_a_resumed_epoch_does_not_decode_what_it_skips():
    class Counted(Pictures):
        seen = 0

        def __getitem__(self, index):
            self.seen += 1
            return super().__getitem__(index)

    source = Counted(20)
    list(loader(source).iterate(0, start_step=4))
    assert source.seen == 4


@pytest.mark.parametrize("crops", ["inception", "light", "none"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_cache_that_loses_nothing_changes_nothing(crops, interpolation):
    source = Pictures(8, shape=(40, 40), mask=True)
    options = {"crops": crops, "interpolation": interpolation}
    cached, decoded = loader(source, cache=True, cache_size=40, **options), loader(source, **options)
    assert_same(list(cached.iterate(3)), list(decoded.iterate(3)), atol=1.6 / 127.5)  # bytes are rounded on one side


@pytest.mark.gpu
@pytest.mark.parametrize("crops", ["inception", "light", "none"])
def test_a_cache_on_the_gpu_gives_what_the_cpu_gives(crops):
    source = Pictures(8, shape=(40, 40), mask=True)
    ours = loader(source, cache=True, cache_size=40, crops=crops, device="cuda").iterate(3)
    cpu = [Batch(batch.image.cpu(), batch.label.cpu(), batch.object_mask.cpu()) for batch in ours]
    assert_same(cpu, list(loader(source, crops=crops).iterate(3)), atol=2 / 127.5)  # bytes are rounded on one side
    assert_same(
        [Batch(b.image.cpu(), b.label.cpu(), b.object_mask.cpu()) for b in loader(source, crops=crops, device="cuda")],
        list(loader(source, crops=crops)),
        atol=1e-5,
    )


def test_a_cache_cuts_the_same_windows_from_images_of_any_shape():
    source = Pictures(9)
    cached, decoded = loader(source, batch_size=9, cache=True, cache_size=36), loader(source, batch_size=9)
    ours, theirs = next(iter(cached)), next(iter(decoded))
    assert torch.equal(ours.label, theirs.label)
    assert (ours.image - theirs.image).abs().mean() < 0.02
    other = next(decoded.iterate(1)).image
    assert (ours.image - other).abs().mean() > 0.2  # what another window would give


@pytest.mark.parametrize("eval_crop", [1.0, 0.875])
def test_evaluation_is_the_same_to_the_bit_with_and_without_a_cache(eval_crop, tmp_path):
    write_folders(tmp_path / "val")
    source = open_source(str(tmp_path), "val")
    options = {"train": False, "eval_crop": eval_crop, "interpolation": "bicubic", "img_size": 24, "batch_size": 5}
    cached, decoded = loader(source, cache=True, **options), loader(source, **options)
    assert len(cached) == 3
    assert_same(list(cached), list(decoded))
    labels = torch.cat([batch.label for batch in cached])
    assert labels.tolist() == [source[index].label for index in range(len(source))]  # in order


def test_images_are_normalised():
    source = Pictures(4, shape=(16, 16))
    batch = next(iter(loader(source, train=False, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0))))
    image = torch.from_numpy(np.stack([np.asarray(source[i].image) for i in range(4)])).permute(0, 3, 1, 2) / 255
    want = (image - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    torch.testing.assert_close(batch.image, want)


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
def test_the_object_mask_goes_where_the_image_goes(cache):
    ours = loader(Pictures(12, mask=True), cache=cache, crops="inception", img_size=32)
    for batch in ours:
        red = batch.image[:, 0] * 127.5 + 127.5
        sure = (red - 127.5).abs() > 25  # away from the border, where both are mixed
        assert sure.float().mean() > 0.3
        wrong = ((batch.object_mask > 0.5) != (red > 127.5)) & sure
        assert wrong.float().mean() < 0.01, wrong.float().mean((1, 2))
        assert batch.object_mask.min() >= 0
        assert batch.object_mask.max() <= 1


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
def test_a_bad_image_stops_the_run_with_its_name(cache):
    with pytest.raises(BadImage, match=r"picture 5 cannot be read as an image \(torn\); .*--skip-bad"):
        list(loader(Pictures(12, bad=(5, 6)), cache=cache, train=False))


@forking
def test_a_bad_image_in_a_worker_says_the_same():
    with pytest.raises(BadImage) as caught:
        list(loader(Pictures(12, bad=(5,)), workers=2))
    assert str(caught.value).startswith("picture 5 cannot be read")


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
def test_skipped_in_training_means_the_next_good_image_stands_in(cache):
    ours = loader(Pictures(12, bad=(5, 6, 11)), cache=cache, skip_bad=True)
    labels = torch.cat([batch.label for batch in ours])
    assert sorted(labels.tolist()) == sorted([0, 0, 1, 2, 3, 4, 7, 7, 7, 8, 9, 10])
    assert ours.num_skipped == 3
    assert sorted(ours.skipped) == ["picture 11", "picture 5", "picture 6"]


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
def test_skipped_in_evaluation_means_left_out(cache):
    ours = loader(Pictures(12, bad=(4, 5, 6, 7, 9)), cache=cache, skip_bad=True, train=False)
    assert [batch.label.tolist() for batch in ours] == [[0, 1, 2, 3], [8, 10, 11]]
    assert ours.num_skipped == 5


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "val"])
def test_nothing_but_bad_images_is_refused(cache, train):
    with pytest.raises(ValueError, match="all 4 images are bad, none can be shown; the last: picture"):
        list(loader(Pictures(4, bad=(0, 1, 2, 3)), cache=cache, skip_bad=True, train=train))


def test_in_training_the_last_short_batch_is_left_out():
    assert [len(batch.label) for batch in loader(Pictures(11))] == [4, 4]
    assert [len(batch.label) for batch in loader(Pictures(11), train=False)] == [4, 4, 3]
    assert len(loader(Pictures(11))) == 2


def test_a_process_without_rows_in_the_last_batch_gives_none():
    sizes = [[len(b.label) for b in loader(Pictures(9), train=False, rank=r, world_size=2)] for r in (0, 1)]
    assert sizes == [[2, 2], [2, 2, 1]]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"interpolation": "cubic"}, "interpolation is 'cubic', but must be one of bilinear, bicubic"),
        ({"crops": "heavy"}, "crops is 'heavy', but must be one of inception, medium, light, none"),
        ({"img_size": 0}, "img_size is 0, but a side needs at least 1 px"),
        ({"batch_size": 64}, "batch_size is 64, but there are 12 images; make it smaller, or pass drop_last=False"),
        ({"batch_size": 5, "world_size": 2}, "batch_size is 5, but .* all 2 processes .*; try 4"),
        ({"rank": 2, "world_size": 2}, "rank is 2, but 2 processes are numbered from 0"),
        ({"batch_size": 11 * 3, "world_size": 3, "drop_last": False, "num": 34}, "last batch has 1 images for 3 proc"),
        ({"cache": True, "cache_size": 10**7}, r"needs \d.* GiB, but cpu has .* GiB; pass cache=False"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_wrong_options_are_refused_with_both_values(options, sentence):
    num = options.get("num", 12)
    with pytest.raises(ValueError, match=sentence):
        loader(Pictures(num), **{key: value for key, value in options.items() if key != "num"})
