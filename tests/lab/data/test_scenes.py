"""The built-in set: its class is in the detail, and nowhere else."""

import numpy as np
import pytest
from scipy.stats import f_oneway

from msvit_lab.data.scenes import WEAVES, Scenes, weave

TRAIN, TEST = 640, 320  # images of each class: an eighth of them


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images (n, h, w, 3) as float, labels, object masks."""
    scenes = Scenes(TRAIN + TEST, size=64, seed=5)
    items = [scenes[i] for i in range(len(scenes))]
    image = np.stack([item.image for item in items]).astype(np.float32)
    return image, np.array([item.label for item in items]), np.stack([item.object_mask for item in items])


def accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    """Of ridge regression to one-hot labels, on images it has not seen; chance is 1/8."""
    x = features.reshape(len(features), -1)
    x = (x - x[:TRAIN].mean(0)) / (x[:TRAIN].std(0) + 1e-6)
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    gram = x[:TRAIN] @ x[:TRAIN].T  # dual form: features may outnumber images
    weights = x[:TRAIN].T @ np.linalg.solve(gram + 10 * np.eye(TRAIN), np.eye(8)[labels[:TRAIN]])
    return float(((x[TRAIN:] @ weights).argmax(1) == labels[TRAIN:]).mean())


def brightness_and_colour(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Mean and spread of each channel, in the whole image, on the object and on the ground."""
    rows = []
    for one, where in zip(image, mask, strict=True):
        parts = (one.reshape(-1, 3), one[where], one[~where])
        rows.append(np.concatenate([np.concatenate([p.mean(0), p.std(0)]) for p in parts]))
    return np.stack(rows)


def place(mask: np.ndarray) -> np.ndarray:
    """Where the object is, how large and how long: first and second moments and the area."""
    points = [np.argwhere(one).T for one in mask]  # (2, n): rows and columns
    return np.array([[*p.mean(1), *p.std(1), np.cov(p, bias=True)[0, 1], p.shape[1]] for p in points])


def detail(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Within the object, how neighbouring pixels go together: their products at distances up to 3 px."""
    steps = [(dy, dx) for dy in range(4) for dx in range(4)]
    rows = []
    for one, where in zip(image.mean(3), mask, strict=True):
        light = np.where(where, (one - one[where].mean()) / one[where].std(), 0)
        rows.append([(light * np.roll(light, step, (0, 1))).sum() / where.sum() for step in steps])
    return np.array(rows)


def test_the_class_is_in_the_detail_and_lost_at_the_coarse_scale(drawn):
    image, labels, mask = drawn
    assert accuracy(detail(image, mask), labels) > 0.8
    small = image.reshape(len(image), 32, 2, 32, 2, 3).mean((2, 4))  # what a coarse token sees
    where = mask.reshape(len(mask), 32, 2, 32, 2).mean((2, 4)) == 1  # whole blocks of object
    assert accuracy(small, labels) < 0.2
    assert accuracy(detail(small, where), labels) < 0.2  # not even where one knows to look, nor for what


def test_the_class_is_not_in_brightness_colour_or_place(drawn):
    image, labels, mask = drawn
    colour, where = brightness_and_colour(image, mask), place(mask)
    for features in (colour, where, mask[:, ::4, ::4].astype(np.float32)):
        assert accuracy(features, labels) < 0.2
    # Finer than any learner: the variance between classes is no larger than chance makes it.
    features = np.concatenate([colour, where], axis=1)  # (n, 24)
    ratio = f_oneway(*(features[labels == label] for label in range(8))).statistic
    assert ratio.max() < 4  # of 24, beyond this once in a hundred thousand draws


def test_every_weave_is_grey_in_every_two_by_two_pixels_and_another_one_at_full_size():
    patterns = {name: weave(name, 8) for name in WEAVES}
    for name, pattern in patterns.items():
        assert not pattern.reshape(4, 2, 4, 2).sum((1, 3)).any(), name
    assert len({pattern.tobytes() for pattern in patterns.values()}) == 8


def test_a_scene_is_its_seed_and_its_number():
    few, many = Scenes(9, seed=3), Scenes(90, seed=3)
    for index in (8, 0, 5):  # in any order, whatever came before
        one, other = few[index], many[index]
        assert np.array_equal(one.image, other.image)
        assert np.array_equal(one.object_mask, other.object_mask)
        assert one.label == other.label == index % 8
    for other in (Scenes(9, seed=4)[0], few[8]):
        assert not np.array_equal(few[0].image, other.image)


def test_scenes_that_cannot_be_drawn_are_errors():
    with pytest.raises(ValueError, match="num_images is 0 and size is 16, but they must be at least 1 and 32"):
        Scenes(0, size=16)
    assert len(list(Scenes(3, size=32))) == 3, "a loop over scenes ends"
