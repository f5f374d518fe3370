"""Windows are scaled, mixed and padded as stated, and are the same for ever; colours are distorted as stated."""

import colorsys

import numpy as np
import pytest
import torch

from msvit.lab.data.crops import TRIES
from msvit.lab.data.dense import IGNORE, RandomWindow
from msvit.lab.data.dense.colour import GREY, apply, colour_transform, turn
from msvit.lab.data.dense.windows import THUMB, DenseWindows, largest_share, thumbnail

NUM = 2000
MIXED = (np.arange(THUMB * THUMB, dtype=np.uint8).reshape(THUMB, THUMB)) % 5


def drawn(rule: RandomWindow, shape: tuple[int, int], thumb: np.ndarray = MIXED, num: int = NUM, **key) -> DenseWindows:
    key = {"seed": 0, "epoch": 0, "index": np.arange(num)} | key
    return rule(np.tile(shape, (num, 1)), np.tile(thumb, (num, 1, 1)), **key)


@pytest.mark.parametrize("shape", [(300, 400), (41, 67), (900, 300)], ids=str)
@pytest.mark.parametrize("short_side", [None, 100])
def test_a_window_shows_the_image_scaled_by_the_drawn_factor(shape, short_side):
    windows = drawn(RandomWindow(side=64, short_side=short_side, scales=(0.5, 2.0)), shape)
    width, height = windows.box[:, 2] - windows.box[:, 0], windows.box[:, 3] - windows.box[:, 1]
    base = 1 if short_side is None else short_side / min(shape)
    for side, share in ((shape[0], height), (shape[1], width)):
        scale = 64 / share / side / base  # px of the window are 1 / scale px of the image
        rounding = 0.5 / side / base
        assert 0.5 - rounding <= scale.min() < 0.51 + rounding
        assert 1.99 - rounding < scale.max() <= 2.0 + rounding
        assert abs(np.median(scale) - 1.25) < 0.05


def test_a_window_lies_in_the_image_or_begins_at_its_corner():
    windows = drawn(RandomWindow(side=64), (60, 200))
    left, top, right, bottom = windows.box.T
    assert min(left.min(), top.min()) >= 0
    inside_down, inside_across = bottom <= 1 + 1e-9, right <= 1 + 1e-9
    assert 0 < inside_down.mean() < 1
    assert inside_across.all()
    assert (top[~inside_down] == 0).all()
    whole = np.rint(64 / (bottom - top))  # px of the scaled image
    np.testing.assert_array_equal(windows.filled[:, 0], np.minimum(whole, 64))
    assert (windows.filled[:, 1] == 64).all()
    assert np.ptp(left[right - left < 0.5]) > 0.4  # the place is random
    assert abs(windows.flip.mean() - 0.5) < 4 * 0.5 / NUM**0.5


def test_a_window_depends_on_seed_epoch_and_index_alone():
    rule = RandomWindow(side=64)
    whole = drawn(rule, (100, 130), num=50)
    some = drawn(rule, (100, 130), num=2, index=np.array([7, 3]))
    np.testing.assert_array_equal(some.box, whole.box[[7, 3]])
    np.testing.assert_array_equal(some.flip, whole.flip[[7, 3]])
    for other in ({"seed": 1}, {"epoch": 1}, {"index": np.arange(50) + 50}):
        assert (drawn(rule, (100, 130), num=50, **other).box != whole.box).any(1).all()


def test_no_class_takes_more_than_its_share_if_it_can_be_helped():
    half = np.zeros((THUMB, THUMB), np.uint8)
    half[:, THUMB // 2 :] = 1  # only windows about the middle are mixed
    free, ruled = (drawn(RandomWindow(side=64, max_share=share), (256, 256), half) for share in (1.0, 0.75))
    one_sided = [(largest_share(np.tile(half, (NUM, 1, 1)), w.box[:, None])[:, 0] > 0.75).mean() for w in (free, ruled)]
    assert one_sided[0] > 0.5
    assert one_sided[1] < one_sided[0] ** TRIES + 0.15  # many small windows miss the middle ten times
    hopeless = drawn(RandomWindow(side=64), (256, 256), np.zeros_like(half))
    assert np.isfinite(hopeless.box).all()  # the last try stands
    assert (hopeless.box != free.box).any(1).mean() > 0.9


def test_ignored_pixels_are_not_counted():
    labels = np.full((THUMB, THUMB), IGNORE, np.uint8)
    labels[:16], labels[16:32] = 1, 2
    whole = np.array([[[0.0, 0.0, 1.0, 1.0], [0.0, 0.5, 1.0, 1.0], [0.0, 0.0, 3.0, 3.0]]])
    np.testing.assert_allclose(largest_share(labels[None], whole), [[0.5, 2.0, 0.5]])


def test_a_thumbnail_is_the_label_map_at_evenly_spread_places():
    labels = np.arange(128, dtype=np.uint8).repeat(2)[:, None].repeat(96, 1)
    np.testing.assert_array_equal(thumbnail(labels)[:, 0], np.arange(1, 128, 2))
    assert thumbnail(np.full((3, 5), 7, np.uint8)).shape == (THUMB, THUMB)


def test_mirrored_samples_are_the_same_columns_in_reverse():
    box = np.array([[0.25, 0.0, 0.75, 1.0], [0.0, 0.0, 2.0, 2.0]])  # the second is padded to twice its size
    filled = np.array([[8, 8], [4, 4]])
    plain, mirrored = (DenseWindows(8, box, np.full(2, flip), filled) for flip in (False, True))
    size = np.array([[40, 40], [4, 4]])
    for row, width in ((0, 8), (1, 4)):
        columns = plain.samples(size).columns[row, :width]
        np.testing.assert_array_equal(mirrored.samples(size).columns[row, :width], columns[::-1])
    np.testing.assert_array_equal(plain.samples(size).columns[1], [0, 1, 2, 3, 3, 3, 3, 3])
    np.testing.assert_array_equal(mirrored.samples(size).rows, plain.samples(size).rows)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"side": 0}, "img_size is 0, but a side needs at least 1 px"),
        ({"short_side": 0}, "short_side is 0, but a side needs at least 1 px; None leaves images be"),
        ({"scales": (2.0, 0.5)}, r"scales are \(2\.0, 0\.5\), but must be positive, the smaller first"),
        ({"max_share": 0.0}, r"max_share is 0\.0, but must lie in \(0, 1\]"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_wrong_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        RandomWindow(**{"side": 8, **options})


def colour_of(colour: list[float], **changes: float) -> np.ndarray:
    """A colour after some changes, each as an amount from -1 to 1."""
    names = ("brightness", "contrast", "saturation", "hue")
    done = [0.25 if name in changes else 0.75 for name in names]
    amount = [(changes.get(name, 0.3) + 1) / 2 for name in names]
    matrix, offset = colour_transform(np.array([done + amount]))
    return (matrix @ np.array(colour) + offset)[0]


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
    assert 10 < abs(turns[0]) < 28
    assert 10 < abs(turns[1]) < 28
    assert turns[0] * turns[1] < 0
    angle = np.array([0.3])
    np.testing.assert_allclose((turn(angle) @ turn(-angle))[0], np.eye(3), atol=1e-9)  # nothing but a turn


def test_colours_are_changed_half_the_time_and_stay_in_range():
    draw = np.random.default_rng(0).random((NUM, 8))
    transform = colour_transform(draw)
    same = (abs(transform.matrix - np.eye(3)).max((1, 2)) < 1e-9) & (abs(transform.offset).max(1) < 1e-9)
    assert abs(same.mean() - 1 / 16) < 0.02
    image = torch.rand(NUM, 3, 2, 2) * 255
    changed = apply(transform, image)
    assert changed.min() == 0
    assert changed.max() == 255
    want = torch.from_numpy(transform.matrix[5] @ image[5, :, 1, 0].double().numpy() + transform.offset[5])
    torch.testing.assert_close(changed[5, :, 1, 0], want.clamp(0, 255).float(), rtol=0, atol=1e-3)
    torch.testing.assert_close(changed[same], image[same], rtol=0, atol=1e-3)
