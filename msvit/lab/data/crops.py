"""Crops: which window of an image becomes the square that a model sees.

    crop = RandomCrop(area=(0.05, 1.0))              # the inception crop, with flips
    crop = CentreCrop(share=0.875)                   # DeiT's evaluation
    windows = crop(size, seed=0, epoch=3, index=i)   # size (b, 2): heights and widths
    windows.box                                      # (b, 4): left, top, right, bottom as shares of the image

The window of image i in epoch e is a function of seed, e and i and of nothing else: no generator is advanced,
so workers, processes and resumed runs agree.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

ORDER, CROP = 0, 1  # streams of `uniform`: what is drawn for one purpose says nothing about another
TRIES = 10
RATIO = (3 / 4, 4 / 3)

CROPS: dict[str, tuple[float, float] | None] = {
    "inception": (0.05, 1.0), "medium": (0.35, 1.0), "light": (0.9, 1.0), "none": None
}  # fmt: skip


def scramble(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers without visible pattern (the finaliser of SplitMix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seed: int, epoch: int, index: Int[np.ndarray, " b"], num: int, stream: int) -> Float[np.ndarray, "b num"]:
    """`num` numbers in [0, 1) for every image, the same wherever and in whatever company they are asked for."""
    key = np.zeros(1, np.uint64)
    for part in (seed, epoch, stream):
        key = scramble(key ^ np.array([part], np.int64).astype(np.uint64))
    key = scramble(key ^ index.astype(np.uint64))  # (b,)
    key = scramble(key[:, None] ^ np.arange(num, dtype=np.uint64))  # (b, num)
    return (key >> np.uint64(11)) * 2.0**-53


def shuffled(num_images: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
    """The order of an epoch."""
    return np.argsort(uniform(seed, epoch, np.arange(num_images), 1, ORDER)[:, 0], kind="stable")


@dataclass(frozen=True)
class Windows:
    """A window in each image, and whether it is read from right to left."""

    box: Float[np.ndarray, "b 4"]  # left, top, right, bottom as shares of the image, in [0, 1]
    flip: Bool[np.ndarray, " b"]


@dataclass(frozen=True)
class WholeImage:
    """All of the image, squeezed into a square: evaluation of the ViT recipe."""

    def __call__(self, size: Int[np.ndarray, "b 2"], *, seed: int, epoch: int, index: Int[np.ndarray, " b"]) -> Windows:
        return Windows(box=np.tile([0.0, 0.0, 1.0, 1.0], (len(size), 1)), flip=np.zeros(len(size), bool))


@dataclass(frozen=True)
class CentreCrop:
    """The square in the centre whose side is `share` of the shorter side.

    The same pixels as resizing the shorter side to img_size / share and cutting out the centre.
    """

    share: float

    def __call__(self, size: Int[np.ndarray, "b 2"], *, seed: int, epoch: int, index: Int[np.ndarray, " b"]) -> Windows:
        half = self.share * size.min(1, keepdims=True) / size / 2  # (b, 2): of the height, of the width
        box = np.concatenate([0.5 - half[:, ::-1], 0.5 + half[:, ::-1]], 1)
        return Windows(box=box, flip=np.zeros(len(size), bool))


@dataclass(frozen=True)
class RandomCrop:
    """A random window of a random share of the area and a random ratio of its sides, flipped half the time.

    As usual, ten pairs of area and ratio are tried. Where none fits (light crops of wide images, mostly), the window
    gets the image's own ratio, so that the area stays within its range and the place stays random.
    """

    area: tuple[float, float]

    def __call__(self, size: Int[np.ndarray, "b 2"], *, seed: int, epoch: int, index: Int[np.ndarray, " b"]) -> Windows:
        draw = uniform(seed, epoch, index, 2 * TRIES + 3, CROP)
        area = self.area[0] + (self.area[1] - self.area[0]) * draw[:, :TRIES]  # (b, tries)
        ratio = RATIO[0] * (RATIO[1] / RATIO[0]) ** draw[:, TRIES : 2 * TRIES]  # uniform in its logarithm
        ratio = ratio * (size[:, :1] / size[:, 1:])  # of width to height, both as shares of the image
        width, height = np.sqrt(area * ratio), np.sqrt(area / ratio)
        fits = (width <= 1) & (height <= 1)
        first = fits.argmax(1)[:, None]
        own = np.sqrt(area[:, :1])
        some = fits.any(1, keepdims=True)
        width = np.where(some, np.take_along_axis(width, first, 1), own)[:, 0]
        height = np.where(some, np.take_along_axis(height, first, 1), own)[:, 0]
        left, top = draw[:, -3] * (1 - width), draw[:, -2] * (1 - height)
        box = np.stack([left, top, np.minimum(left + width, 1), np.minimum(top + height, 1)], 1)
        return Windows(box=box, flip=draw[:, -1] < 0.5)


Crop = WholeImage | CentreCrop | RandomCrop  # sizes (b, 2), seed, epoch and indices -> Windows


def choose_crop(*, train: bool, crops: str, eval_crop: float) -> Crop:
    """The crop of a recipe: `crops` in training, `eval_crop` in evaluation."""
    if crops not in CROPS:
        raise ValueError(f"crops is {crops!r}, but must be one of {', '.join(CROPS)}")
    if not 0 < eval_crop <= 1:
        raise ValueError(f"eval_crop is {eval_crop}, but must lie in (0, 1]; 1.0 is the whole image, 0.875 is usual")
    if train:
        area = CROPS[crops]
        return WholeImage() if area is None else RandomCrop(area)
    return WholeImage() if eval_crop == 1 else CentreCrop(eval_crop)
