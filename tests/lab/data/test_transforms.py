"""Windows lie where they should and are the same for ever; colours are distorted as stated."""

import colorsys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from msvit_lab.data import CROPS, CentreCrop, Crop, RandomCrop, RandomWindow
from msvit_lab.data.transforms import (
    CROP,
    GREY,
    THUMB,
    TRIES,
    Key,
    Windows,
    colour_transform,
    cut,
    distort,
    hue_rotation,
    largest_share,
    resample,
    uniform,
)

NUM = 2000
MIXED = (np.arange(THUMB * THUMB, dtype=np.uint8).reshape(THUMB, THUMB)) % 5
SHAPES = [(224, 224), (300, 400), (400, 300), (200, 600), (500, 333)]


def windows_of(
    crop: Crop, shape: tuple[int, int], thumb: np.ndarray = MIXED, num: int = NUM, **key: Any
) -> Windows:
    drawn = Key(**{"seed": 0, "epoch": 0, "index": np.arange(num), **key})
    return crop(np.tile(shape, (num, 1)), drawn, np.tile(thumb, (num, 1, 1)))


@pytest.mark.parametrize("name", ["inception", "light"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_crops_stay_inside_have_the_stated_area_and_are_flipped_half_the_time(name, shape):
    area = CROPS[name]
    windows = windows_of(RandomCrop(side=8, area=area), shape)
    left, top, right, bottom = windows.box.T
    assert min(left.min(), top.min()) >= 0
    assert max(right.max(), bottom.max()) <= 1
    share = (right - left) * (bottom - top)
    assert area[0] - 1e-9 <= share.min() < area[0] + 0.02
    assert share.max() <= area[1] + 1e-9
    assert np.ptp(left) > 0.02  # the place is random, whatever the shape
    assert np.ptp(top) > 0.02
    assert abs(windows.flip.mean() - 0.5) < 4 * 0.5 / NUM**0.5


def test_the_inception_crop_has_the_ratios_and_areas_of_torchvision():
    box = windows_of(RandomCrop(side=8, area=(0.05, 1.0)), (375, 500), num=4000, seed=3).box
    ours = np.stack([(box[:, 3] - box[:, 1]) * 375, (box[:, 2] - box[:, 0]) * 500], 1)
    image = torch.empty(3, 375, 500)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.05, 1.0], [3 / 4, 4 / 3])[2:] for _ in range(4000)])
    quantiles = np.linspace(0.02, 0.98, 25)
    for measure in (lambda x: x[:, 0] * x[:, 1] / (375 * 500), lambda x: np.log(x[:, 1] / x[:, 0])):
        difference = np.quantile(measure(ours), quantiles) - np.quantile(measure(theirs), quantiles)
        assert abs(difference).max() < 0.03, difference


def test_the_centre_crop_is_resize_then_crop():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8))
    ours = cut(image, windows_of(CentreCrop(side=28, share=0.875), (64, 96), num=1), "bicubic")
    theirs = image.resize((48, 32), Image.Resampling.BICUBIC).crop((10, 2, 38, 30))
    assert abs(ours.astype(int) - np.array(theirs, int).transpose(2, 0, 1)).max() <= 1


@pytest.mark.parametrize("shape", [(300, 400), (41, 67), (900, 300)], ids=str)
@pytest.mark.parametrize("short_side", [None, 100])
def test_a_window_shows_the_image_scaled_by_the_drawn_factor(shape, short_side):
    box = windows_of(RandomWindow(side=64, short_side=short_side, scales=(0.5, 2.0)), shape).box
    base = 1 if short_side is None else short_side / min(shape)
    for side, share in ((shape[0], box[:, 3] - box[:, 1]), (shape[1], box[:, 2] - box[:, 0])):
        scale = 64 / share / side / base  # px of the window are 1 / scale px of the image
        rounding = 0.5 / side / base
        assert 0.5 - rounding <= scale.min() < 0.51 + rounding
        assert 1.99 - rounding < scale.max() <= 2.0 + rounding
        assert abs(np.median(scale) - 1.25) < 0.05


def test_draws_are_uniform_and_unrelated():
    draw = uniform(Key(0, 0, np.arange(20000)), 4, CROP)
    following = uniform(Key(0, 1, np.arange(20000)), 1, CROP)
    correlation = np.corrcoef(np.concatenate([draw, following], 1).T) - np.eye(5)
    assert abs(correlation).max() < 0.03
    histogram = np.histogram(draw, bins=16, range=(0, 1))[0] / draw.size * 16
    assert abs(histogram - 1).max() < 0.06
    assert not np.isin(uniform(Key(0, 1, np.arange(50)), 4, CROP), uniform(Key(1, 0, np.arange(50)), 4, CROP)).any()


def test_no_class_takes_more_than_its_share_if_it_can_be_helped():
    half = np.zeros((THUMB, THUMB), np.uint8)
    half[:, THUMB // 2 :] = 1  # only windows about the middle are mixed
    free, ruled = (windows_of(RandomWindow(side=64, max_share=share), (256, 256), half) for share in (1.0, 0.75))
    one_sided = [(largest_share(np.tile(half, (NUM, 1, 1)), w.box[:, None])[:, 0] > 0.75).mean() for w in (free, ruled)]
    assert one_sided[0] > 0.5
    assert one_sided[1] < one_sided[0] ** TRIES + 0.15  # many small windows miss the middle ten times
    hopeless = windows_of(RandomWindow(side=64), (256, 256), np.zeros_like(half))
    assert np.isfinite(hopeless.box).all()  # the last try stands
    assert (hopeless.box != free.box).any(1).mean() > 0.9


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("side", [17, 40, 90], ids=["shrunk", "same", "enlarged"])
def test_a_batch_is_resampled_as_pil_resamples_one(interpolation, side):
    noise = np.random.default_rng(0).integers(70, 190, (6, 40, 40, 3), dtype=np.uint8)  # PIL clips between its passes
    windows = windows_of(RandomCrop(side=side, area=(0.05, 1.0)), (40, 40), num=6)
    assert 0 < windows.flip.sum() < 6
    batch = resample(torch.from_numpy(noise).permute(0, 3, 1, 2), windows, interpolation)
    for row in range(6):
        alone = Windows(side, windows.box[row:], windows.flip[row:], windows.filled[row:])
        one = cut(Image.fromarray(noise[row]), alone, interpolation)
        assert abs(batch[row].numpy() - one).max() < 1.6, row  # and rounds after each


@pytest.mark.gpu
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_gpu_resamples_as_the_cpu_does(interpolation):
    images = torch.randint(0, 256, (8, 3, 256, 256), dtype=torch.uint8)
    windows = windows_of(RandomCrop(side=224, area=(0.05, 1.0)), (256, 256), num=8)
    cpu, gpu = (resample(x, windows, interpolation).cpu() for x in (images, images.cuda()))
    assert (cpu - gpu).abs().max() < 0.5


def colour_of(colour: list[float], **changes: float) -> np.ndarray:
    """A colour after some changes, each as an amount from -1 to 1."""
    names = ("brightness", "contrast", "saturation", "hue")
    done = [0.25 if name in changes else 0.75 for name in names]
    amount = [(changes.get(name, 0.3) + 1) / 2 for name in names]
    return colour_transform(np.array([done + amount]))[0] @ np.array([1, *colour])


def test_each_change_of_colour_is_what_it_is_called():
    colour = [120.0, 90.0, 60.0]
    np.testing.assert_allclose(colour_of(colour), colour, atol=1e-9)
    np.testing.assert_allclose(colour_of(colour, brightness=1), [152, 122, 92])
    np.testing.assert_allclose(colour_of(colour, brightness=-0.5), [104, 74, 44])
    np.testing.assert_allclose(colour_of(colour, contrast=-1), [60, 45, 30])
    np.testing.assert_allclose(colour_of(colour, contrast=1, brightness=1), [228, 183, 138])
    grey = GREY @ colour
    np.testing.assert_allclose(colour_of(colour, saturation=1), grey + 1.5 * (np.array(colour) - grey))
    np.testing.assert_allclose(colour_of([80.0] * 3, saturation=-1, hue=1), [80] * 3, atol=1e-6)
    turned = colour_of(colour, hue=1)
    np.testing.assert_allclose(GREY @ turned, grey)  # as bright as before
    hue = [colorsys.rgb_to_hsv(*(c / 255))[0] * 360 for c in (np.array(colour), turned, colour_of(colour, hue=-1))]
    turns = (np.array(hue[1:]) - hue[0] + 180) % 360 - 180
    assert (abs(abs(turns) - 19) < 9).all()
    assert turns[0] * turns[1] < 0
    angle = np.array([0.3])
    np.testing.assert_allclose((hue_rotation(angle) @ hue_rotation(-angle))[0], np.eye(3), atol=1e-9)


def test_colours_are_changed_half_the_time_and_stay_in_range():
    key, image = Key(0, 0, np.arange(NUM)), torch.rand(NUM, 3, 2, 2) * 255
    transform = colour_transform(uniform(key, 8, 3))  # (b, 3, 4)
    same = abs(transform - np.eye(3, 4, 1)).max((1, 2)) < 1e-9
    assert abs(same.mean() - 1 / 16) < 0.02
    changed = distort(image, key)
    assert (changed.min(), changed.max()) == (0, 255)
    want = transform[5] @ np.array([1, *image[5, :, 1, 0].double()])
    np.testing.assert_allclose(changed[5, :, 1, 0], want.clip(0, 255), atol=1e-3)
    torch.testing.assert_close(changed[same], image[same], rtol=0, atol=1e-3)
