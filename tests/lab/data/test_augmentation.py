"""DeiT's augmentations: timm's settings and distributions, drawn from (seed, epoch, view)."""

import pickle
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pictures import Pictures, picture
from timm.data import create_transform

from msvit_lab.build import make_loader, open_sources
from msvit_lab.config import Config, Data, Optim
from msvit_lab.data import Augmentation, Loader, Plan, batches
from msvit_lab.data.augmentation import make_rand_augment
from msvit_lab.data.transforms import Key
from msvit_lab.tasks import TASKS

RAND_AUGMENT = "rand-m9-mstd0.5-inc1"
HALF = (0.5, 0.5, 0.5)
SMALL = Data(source="scenes", num_train=16, num_val=8, scene_size=32, img_size=32, mean=HALF, std=HALF, workers=0)


def loader(num: int = 16, **options: Any) -> Loader:
    names = ("rand_augment", "erasing", "mixup", "cutmix", "smoothing", "repeats")
    extra = Augmentation(**{name: options.pop(name) for name in names if name in options})
    settings = {"img_size": 32, "batch_size": 8, "train": True, "workers": 0, "mean": HALF, "std": HALF}
    return batches(Pictures(num), **{**settings, **options}, augmentation=extra)


def key(*index: int) -> Key:
    return Key(0, 0, np.array(index))


def pixels(index: int) -> np.ndarray:
    return np.asarray(picture(index, 32, 32)).transpose(2, 0, 1)


def test_rand_augment_has_the_settings_of_timms_training():
    mean, how = (0.485, 0.456, 0.406), {"auto_augment": RAND_AUGMENT, "interpolation": "bicubic"}
    ours = make_rand_augment(RAND_AUGMENT, side=224, mean=mean, interpolation="bicubic").augment
    whole = create_transform(224, is_training=True, mean=mean, **how).transforms
    theirs = next(part for part in whole if type(part) is type(ours))
    assert (ours.num_layers, ours.choice_weights) == (theirs.num_layers, theirs.choice_weights)
    for one, other in zip(ours.ops, theirs.ops, strict=True):
        own = {"aug_fn": one.aug_fn} if one.name.startswith("Posterize") else {}  # the one that is not timm's
        assert vars(one) == vars(other) | own


def test_rand_augment_depends_on_the_view_alone():
    augment = make_rand_augment(RAND_AUGMENT, side=32, mean=HALF, interpolation="bilinear")
    first = [augment(pixels(0), key(view)) for view in range(30)]
    changed = np.array([(image != pixels(0)).any() for image in first])
    assert 0.5 < changed.mean() < 0.95  # each of two operations half the time
    assert len({image.tobytes() for image in first}) > 0.9 * changed.sum()
    random.seed(5)
    again = pickle.loads(pickle.dumps(augment))  # as a worker gets it
    for view in reversed(range(30)):
        np.testing.assert_array_equal(again(pixels(0), key(view)), first[view])


def test_rand_augment_comes_after_the_crop_and_leaves_no_object_mask():
    plain, ours = (next(loader(rand_augment=config).iterate(0)) for config in (None, RAND_AUGMENT))
    augment = make_rand_augment(RAND_AUGMENT, side=32, mean=HALF, interpolation="bilinear")
    grey = (plain.image * 127.5 + 127.5).round().to(torch.uint8).numpy()
    want = [augment(image, key(number)) for image, number in zip(grey, plain.label.tolist(), strict=True)]
    torch.testing.assert_close(ours.image, torch.from_numpy(np.stack(want)) / 127.5 - 1)
    assert plain.object_mask is not None
    assert ours.object_mask is None


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
def test_erasing_puts_normal_noise_into_a_rectangle_and_leaves_the_rest(cache):
    plain, ours = (list(loader(64, cache=cache, erasing=p).iterate(2)) for p in (0.0, 0.5))
    before, after = (torch.cat([batch.image for batch in part]) for part in (plain, ours))
    inside = (before != after).all(1)  # (b, h, w)
    assert torch.equal(inside, (before != after).any(1))
    assert torch.equal(inside, inside.any(2, keepdim=True) & inside.any(1, keepdim=True)), "rectangles"
    assert 16 < inside.any(2).any(1).sum() < 48
    noise = after.movedim(1, 3)[inside]
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)], ids=["mixup", "cutmix", "both"])
def test_labels_are_mixed_as_the_images_are(mixup, cutmix, cache):
    """The share of a label is its smoothed share of the image: of every pixel, or of the pixels."""
    plain = loader(64, cache=cache)
    mixed = loader(64, cache=cache, mixup=mixup, cutmix=cutmix, smoothing=0.1)
    shares, cut = [], []
    for before, after in zip(plain.iterate(1), mixed.iterate(1), strict=True):
        other = before.image.flip(0)
        own = F.one_hot(before.label, 64) * 0.9 + 0.1 / 64
        share = (after.label[0, before.label[0]] - 0.1 / 64).item() / 0.9
        torch.testing.assert_close(after.label, share * own + (1 - share) * own.flip(0))
        torch.testing.assert_close(after.label.sum(1), torch.ones(8))
        kept = (after.image == before.image).all(1).all(0)  # (h, w): in every image
        cut.append((after.image == torch.where(kept, before.image, other)).all().item())
        blended = share * before.image + (1 - share) * other
        if cut[-1]:
            assert share == pytest.approx(kept.float().mean().item(), abs=1e-5)
        else:
            torch.testing.assert_close(after.image, blended)
        assert after.object_mask is None
        shares.append(share)
    assert len({round(share, 6) for share in shares}) > 5
    assert sum(cut) in {(0.8, 0.0): {0}, (0.0, 1.0): {8}, (0.8, 1.0): set(range(1, 8))}[mixup, cutmix]


def test_the_loss_takes_mixed_labels_and_smooths_them_no_further():
    task, logits, label = TASKS["classify"], torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    mixed = torch.rand(6, 5).softmax(1)
    want = -(mixed * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(task.loss(logits, mixed, smoothing=0.1), want)
    smoothed = F.one_hot(label, 5) * 0.9 + 0.1 / 5
    torch.testing.assert_close(task.loss(logits, smoothed, smoothing=0.1), task.loss(logits, label, smoothing=0.1))
    assert task.accuracy(logits, smoothed) == task.accuracy(logits, label)
    assert task.accuracy(mixed, mixed) == 1


@pytest.mark.parametrize("cache", [False, True], ids=["decoded", "cached"])
def test_an_epoch_of_repeats_shows_some_images_in_several_views_and_is_as_long(cache):
    ours, seen = loader(24, repeats=3, cache=cache, crops="inception"), []
    for epoch in range(2):
        made = list(ours.iterate(epoch))
        label, image = torch.cat([b.label for b in made]), torch.cat([b.image for b in made])
        assert len(label) == 24
        assert np.unique(label, return_counts=True)[1].tolist() == [3] * 8
        assert len({one.numpy().tobytes() for one in image}) == 24  # each view has its own crop
        seen.append(set(label.tolist()))
    assert seen[0] != seen[1]


@pytest.mark.parametrize(("num", "batch", "world", "repeats"), [(50, 8, 4, 3), (37, 12, 3, 3), (40, 10, 2, 2)])
def test_views_of_an_image_go_to_different_processes(num, batch, world, repeats):
    made = {"num_images": num, "batch_size": batch, "train": True, "seed": 0, "repeats": repeats}
    rows = [Plan(**made, rank=rank, world_size=world).rows(3) for rank in range(world)]
    for row in (row for process in rows for row in process):
        assert len(row) == batch // world
        assert len(set(row % num)) == len(row)
    shown = np.concatenate([row for process in rows for row in process])
    assert len(set(shown)) == len(shown)
    assert np.unique(shown % num, return_counts=True)[1].max() == repeats


def test_evaluation_is_not_augmented():
    extra = {"rand_augment": RAND_AUGMENT, "erasing": 1.0, "mixup": 0.8, "cutmix": 1.0, "repeats": 3}
    for ours, theirs in zip(*(loader(train=False, **how).iterate(0) for how in (extra, {})), strict=True):
        assert torch.equal(ours.image, theirs.image)
        assert torch.equal(ours.label, theirs.label)
        assert torch.equal(ours.object_mask, theirs.object_mask)


def test_the_settings_of_a_configuration_reach_the_loader():
    data = replace(SMALL, rand_augment=RAND_AUGMENT, erasing=0.25, mixup=0.8, cutmix=1.0, repeats=2)
    config = Config(data=data, optim=Optim(batch_size=16, accumulate=2, smoothing=0.1))
    source = open_sources(config).train
    made = make_loader(source, config, train=True)
    assert (made.erasing, made.plan.repeats, made.feed.decoder.augment.augment.num_layers) == (0.25, 2, 2)
    assert vars(made.mixup).items() >= {
        "mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mix_prob": 1.0, "switch_prob": 0.5, "label_smoothing": 0.1,
        "mode": "batch", "num_classes": len(source.classes),
    }.items()  # fmt: skip
    assert make_loader(source, config, train=False).mixup is None
