"""Transforms: the window of an image that becomes a model's input, cut alike from image, label map and object mask.

    crop = RandomCrop(side=224, area=(0.05, 1.0))        # the inception crop, with flips
    crop = CentreCrop(side=224, share=0.875)             # DeiT's evaluation
    crop = RandomWindow(side=512, scales=(0.5, 2.0))     # Segmenter's training: scaled, classes mixed, padded
    key = Key(seed=0, epoch=3, index=i)                  # i (b,): numbers of images
    windows = crop(size, key, thumb)                     # size (b, 2): heights and widths; thumb (b, 64, 64) or None
    cut(image, windows, "bicubic")                       # PIL image -> (3, 224, 224) uint8, the first window
    resample(images, windows, "bicubic")                 # (b, 3, s, s) uint8 -> (b, 3, 224, 224), on its device
    distort(images, key)                                 # photometric distortion, on its device

What is drawn for image i in epoch e is a function of seed, e and i and of nothing else: no generator is advanced, so
workers, processes and resumed runs agree. torchvision's transforms v2 draw from the global generator, cut at whole
pixels and have no batch in which every image has its own window; their conversion and flip take two to three times as
long as numpy's. Both ways of resampling widen the filter when they shrink (antialiasing) and agree to within about a
grey level.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8, UInt64
from PIL import Image
from torch import Tensor

from msvit.preprocessing import FILTERS
from msvit.types import IGNORE

# Streams of `random_bits`: draws for one purpose are independent of another's.
ORDER, CROP, WINDOW, COLOUR, RAND_AUGMENT, ERASING, MIXING = range(7)
TRIES = 10
RATIO = (3 / 4, 4 / 3)
THUMB = 64  # rows and columns of a label map's thumbnail
GRID = 24  # rows and columns of the samples in which a window's classes are counted
CROPS: dict[str, tuple[float, float] | None] = {
    "inception": (0.05, 1.0), "medium": (0.35, 1.0), "light": (0.9, 1.0), "none": None
}  # fmt: skip

BRIGHTNESS = 32.0  # grey levels, up or down
CONTRAST = SATURATION = 0.5  # of the factor 1, up or down
HUE = 18.0  # degrees, either way
GREY = np.array([0.299, 0.587, 0.114])  # brightness of red, green and blue
YIQ = np.array([GREY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])  # brightness and the plane of colours


@dataclass(frozen=True)
class Key:
    """What all that is drawn depends on."""

    seed: int
    epoch: int
    index: Int[np.ndarray, " b"]  # numbers of images, or of views: view r of image i among n is number i + r * n


def scramble(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers without visible pattern (the finaliser of SplitMix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_bits(key: Key, num: int, stream: int) -> UInt64[np.ndarray, "b num"]:
    """`num` numbers of 64 bits for every image, the same whatever other images they are drawn with."""
    bits = np.zeros(1, np.uint64)
    for part in (key.seed, key.epoch, stream):
        bits = scramble(bits ^ np.array([part], np.int64).astype(np.uint64))
    bits = scramble(bits ^ key.index.astype(np.uint64))  # (b,)
    return scramble(bits[:, None] ^ np.arange(num, dtype=np.uint64))  # (b, num)


def uniform(key: Key, num: int, stream: int) -> Float[np.ndarray, "b num"]:
    """`num` numbers in [0, 1) for every image."""
    return (random_bits(key, num, stream) >> np.uint64(11)) * 2.0**-53


def shuffled(num_images: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
    """The order of an epoch."""
    return np.argsort(uniform(Key(seed, epoch, np.arange(num_images)), 1, ORDER)[:, 0], kind="stable")


@dataclass(frozen=True)
class Windows:
    """A window in each image, what of it lies in the image, and whether that is mirrored."""

    side: int  # px of the square that the window becomes
    box: Float[np.ndarray, "b 4"]  # left, top, right, bottom as shares of the image; beyond 1 is padding
    flip: Bool[np.ndarray, " b"]
    filled: Int[np.ndarray, "b 2"]  # rows and columns of the square that show the image, from the top left

    def columns(self) -> Float[np.ndarray, "b 2"]:
        """Where the columns begin and end, as shares of the width: from right to left where mirrored.

        The image stays at the left of its square, so a mirrored one begins at the last column that is seen.
        """
        left, right = self.box[:, 0], self.box[:, 2]
        start = np.where(self.flip, np.minimum(right, 1), left)
        return np.stack([start, start + np.where(self.flip, left - right, right - left)], 1)

    def nearest(self, size: Int[np.ndarray, "b 2"]) -> tuple[Int[np.ndarray, "b s"], Int[np.ndarray, "b s"]]:
        """Rows and columns of label maps of these heights and widths that are shown; the last ones under padding."""
        return nearest(self.box[:, 1::2], size[:, 0], self.side), nearest(self.columns(), size[:, 1], self.side)


def nearest(ends: Float[np.ndarray, "b 2"], count: Int[np.ndarray, " b"], num: int) -> Int[np.ndarray, "b num"]:
    """`num` places between two shares, as numbers of `count` pixels."""
    share = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * ((np.arange(num) + 0.5) / num)  # (b, num)
    return np.clip(np.floor(share * count[:, None]).astype(np.int64), 0, count[:, None] - 1)


@dataclass(frozen=True, kw_only=True)
class Crop:
    """All of the image, squeezed into a square: evaluation of the ViT recipe. Other crops take a part of it."""

    random: ClassVar[bool] = False
    side: int  # px of the square
    interpolation: str = "bilinear"

    def __call__(
        self, size: Int[np.ndarray, "b 2"], key: Key, thumb: UInt8[np.ndarray, "b t t"] | None = None
    ) -> Windows:
        """Windows in images of these heights and widths; `thumb` are thumbnails of label maps, where there are any."""
        return self.inside(np.tile([0.0, 0.0, 1.0, 1.0], (len(size), 1)))

    def inside(self, box: Float[np.ndarray, "b 4"], flip: Bool[np.ndarray, " b"] | None = None) -> Windows:
        """Windows without padding."""
        num = len(box)
        return Windows(self.side, box, np.zeros(num, bool) if flip is None else flip, np.full((num, 2), self.side))


@dataclass(frozen=True, kw_only=True)
class CentreCrop(Crop):
    """The square in the centre whose side is `share` of the shorter side.

    The same pixels as resizing the shorter side to img_size / share and cutting out the centre.
    """

    share: float

    def __call__(self, size: np.ndarray, key: Key, thumb: np.ndarray | None = None) -> Windows:
        half = self.share * size.min(1, keepdims=True) / size / 2  # (b, 2): of the height, of the width
        return self.inside(np.concatenate([0.5 - half[:, ::-1], 0.5 + half[:, ::-1]], 1))


@dataclass(frozen=True, kw_only=True)
class RandomCrop(Crop):
    """A random window of a random share of the area and a random ratio of its sides, flipped half the time.

    As usual, ten pairs of area and ratio are tried. Where none fits (light crops of wide images, mostly), the window
    gets the image's own ratio, so that the area stays within its range and the place stays random.
    """

    random = True
    area: tuple[float, float]

    def __call__(self, size: np.ndarray, key: Key, thumb: np.ndarray | None = None) -> Windows:
        draw = uniform(key, 2 * TRIES + 3, CROP)
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
        return self.inside(box, flip=draw[:, -1] < 0.5)


@dataclass(frozen=True, kw_only=True)
class RandomWindow(Crop):
    """Segmenter's training window: the image scaled by a random factor, cut where classes are mixed, mirrored half the
    time. The first of ten places is taken at which no class has more than `max_share` of the window."""

    random = True
    short_side: int | None = None
    scales: tuple[float, float] = (0.5, 2.0)
    max_share: float = 0.75

    def __post_init__(self) -> None:
        if not 0 < self.scales[0] <= self.scales[1]:
            raise ValueError(f"scales are {self.scales}, but must be positive, the smaller first; (0.5, 2.0) is usual")

    def __call__(self, size: np.ndarray, key: Key, thumb: np.ndarray | None = None) -> Windows:
        assert thumb is not None, "windows of segmentation are chosen by their label maps"
        draw = uniform(key, 2 * TRIES + 2, WINDOW)
        factor = self.scales[0] + (self.scales[1] - self.scales[0]) * draw[:, -2]
        whole = scaled(size, self.short_side, factor)[:, None]  # (b, 1, 2): px of the image
        room = np.maximum(whole - self.side, 0) + 1
        corner = np.floor(draw[:, : 2 * TRIES].reshape(-1, TRIES, 2) * room)  # (b, tries, 2): top, left
        start, stop = corner / whole, (corner + self.side) / whole
        box = np.stack([start[..., 1], start[..., 0], stop[..., 1], stop[..., 0]], 2)  # (b, tries, 4)
        mixed = largest_share(thumb, box) <= self.max_share  # (b, tries)
        chosen = np.where(mixed.any(1), mixed.argmax(1), TRIES - 1)
        box = box[np.arange(len(box)), chosen]
        return Windows(self.side, box, flip=draw[:, -1] < 0.5, filled=np.minimum(whole[:, 0], self.side))


@dataclass(frozen=True, kw_only=True)
class Scaled(Crop):
    """All of the image with its shorter side at `short_side` px: no square, so label maps stay as they are."""

    side: int = 0  # no square
    short_side: int | None = None

    def __call__(self, size: np.ndarray, key: Key, thumb: np.ndarray | None = None) -> Windows:
        return replace(super().__call__(size, key), filled=scaled(size, self.short_side, np.ones(len(size))))


def scaled(size: Int[np.ndarray, "b 2"], short_side: int | None, factor: np.ndarray) -> Int[np.ndarray, "b 2"]:
    """Heights and widths with the shorter side at `short_side` px (None: as they are), times a factor."""
    if short_side is not None:
        factor = factor * (short_side / size.min(1))
    return np.maximum(np.rint(size * factor[:, None]), 1).astype(np.int64)


def thumbnail(label_map: UInt8[np.ndarray, "h w"]) -> UInt8[np.ndarray, "t t"]:
    """The label map at `THUMB` x `THUMB` places: small enough to keep for every image."""
    rows, columns = nearest(np.array([[0.0, 1.0]] * 2), np.array(label_map.shape), THUMB)
    return label_map[rows[:, None], columns]


def largest_share(thumb: UInt8[np.ndarray, "b t t"], box: Float[np.ndarray, "b n 4"]) -> Float[np.ndarray, "b n"]:
    """The share of the most frequent class among the labelled samples of each window; 2 where there is none."""
    b, tries = box.shape[:2]
    inside = np.minimum(box, 1).reshape(-1, 4)  # padding has no label, so only what the image fills is sampled
    count = np.full(len(inside), thumb.shape[1])
    first = np.repeat(np.arange(b), tries)[:, None] * thumb[0].size  # where each window's thumbnail begins
    rows = first + thumb.shape[1] * nearest(inside[:, 1::2], count, GRID)
    columns = nearest(inside[:, ::2], count, GRID)
    found = thumb.ravel().take(rows[:, :, None] + columns[:, None])  # (b * tries, grid, grid)
    bins = found + 256 * np.arange(b * tries)[:, None, None]  # a histogram for each window
    counts = np.bincount(bins.ravel(), minlength=256 * b * tries).reshape(-1, 256)[:, :IGNORE]
    total = counts.sum(1)
    return np.where(total > 0, counts.max(1) / np.maximum(total, 1), 2.0).reshape(b, tries)


def cut(image: Image.Image, windows: Windows, interpolation: str) -> UInt8[np.ndarray, "c h w"]:
    """What the first window shows of an RGB or grey image, padded to a square unless there is none (side 0)."""
    height, width = windows.filled[0].tolist()
    box = tuple(np.minimum(windows.box[0], 1) * (image.size * 2))
    part = np.asarray(image.resize((width, height), FILTERS[interpolation], box=box)).reshape(height, width, -1)
    part = (part[:, ::-1] if windows.flip[0] else part).transpose(2, 0, 1)
    below, right = max(windows.side - height, 0), max(windows.side - width, 0)
    return np.pad(part, ((0, 0), (0, below), (0, right))) if below or right else part


def resample(images: UInt8[Tensor, "b c s s"], windows: Windows, interpolation: str) -> Float[Tensor, "b c h w"]:
    """The same for a batch of squares, on the device they lie on. Grey levels 0 to 255, not rounded."""
    left, top, right, bottom = torch.from_numpy(windows.box.T).to(images.device, torch.float32)
    flip = torch.from_numpy(windows.flip).to(images.device)
    left, right = torch.where(flip, right, left), torch.where(flip, left, right)
    weights = []
    for start, stop, num in ((top, bottom, images.shape[2]), (left, right, images.shape[3])):
        count = torch.full_like(start, num)
        ends = start * count, stop * count, count
        weights.append(pixel_weights(*ends, canvas=num, size=windows.side, interpolation=interpolation))
    return weighted(images, *weights)


def weighted(
    images: UInt8[Tensor, "b c h0 w0"], rows: Float[Tensor, "b h h0"], columns: Float[Tensor, "b w w0"]
) -> Float[Tensor, "b c h w"]:
    """Two matrix products per image, so any window, flipped or not, shrunk or enlarged, costs the same."""
    dtype = torch.float16 if images.is_cuda else torch.float32  # 11 bits are enough for 8
    narrow = images.to(dtype).flatten(1, 2) @ columns.to(dtype).mT  # (b, c * h0, w)
    return (rows.to(dtype)[:, None] @ narrow.unflatten(1, images.shape[1:3])).float().clamp_(0, 255)


def pixel_weights(
    start: Float[Tensor, " b"], stop: Float[Tensor, " b"], count: Float[Tensor, " b"], *, canvas: int, size: int,
    interpolation: str,
) -> Float[Tensor, "b size canvas"]:  # fmt: skip
    """The weight of each pixel in each of `size` samples between start and stop (px, from right to left if start is
    larger), for images that fill `count` pixels of a larger canvas. A sample beyond the image is its nearest pixel."""
    step = (stop - start)[:, None, None] / size  # pixels per sample
    reach = step.abs().clamp(min=1)
    count = count[:, None, None]
    centre = start[:, None, None] + step * (torch.arange(size, device=start.device)[:, None] + 0.5)
    centre = centre.clamp(min=0).minimum(count)
    pixel = torch.arange(canvas, device=start.device) + 0.5
    distance = (pixel / reach - centre / reach).abs_()  # (b, size, canvas)
    weight = (1 - distance).clamp_(min=0) if interpolation == "bilinear" else cubic(distance)
    weight = weight.mul_(pixel < count)
    return weight.div_(weight.sum(2, keepdim=True))


def cubic(x: Tensor) -> Tensor:
    """The cubic convolution kernel with a = -1/2, as PIL has it."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def distort(image: Float[Tensor, "b 3 h w"], key: Key) -> Float[Tensor, "b 3 h w"]:
    """Photometric distortion: one affine map of colours per image, within grey levels 0 to 255."""
    colours = colour_transform(uniform(key, 8, COLOUR)).astype(np.float32)
    moved = torch.from_numpy(colours).to(image.device, non_blocking=True)  # (b, 3, 4)
    changed = torch.baddbmm(moved[:, :, :1], moved[:, :, 1:], image.flatten(2))
    return changed.clamp_(0, 255).unflatten(2, image.shape[2:])


def colour_transform(draw: Float[np.ndarray, "b 8"]) -> Float[np.ndarray, "b 3 4"]:
    """Offset and matrix of x -> matrix @ x + offset, from whether each of four changes is made, then how much.

    Brightness, contrast, saturation and hue are changed in this order, each in half of the images. Saturation scales
    the colours' distance from the grey of the same brightness, hue turns them about the axis of greys.
    """
    done, amount = draw[:, :4] < 0.5, 2 * draw[:, 4:] - 1  # amount in [-1, 1)
    amount = np.where(done, amount, 0.0)  # (b, 4); 0 changes nothing
    contrast, saturation = 1 + CONTRAST * amount[:, 1], 1 + SATURATION * amount[:, 2]
    grey = np.tile(GREY, (3, 1))  # every channel becomes the brightness
    saturate = grey + saturation[:, None, None] * (np.eye(3) - grey)
    matrix = contrast[:, None, None] * hue_rotation(np.deg2rad(HUE) * amount[:, 3]) @ saturate  # (b, 3, 3)
    offset = matrix.sum(2) * (BRIGHTNESS * amount[:, 0])[:, None]
    return np.concatenate([offset[:, :, None], matrix], 2)


def hue_rotation(angle: Float[np.ndarray, " b"]) -> Float[np.ndarray, "b 3 3"]:
    """A rotation of the plane of colours; greys and the brightness stay."""
    cos, sin, zero, one = np.cos(angle), np.sin(angle), np.zeros_like(angle), np.ones_like(angle)
    rotation = np.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).reshape(-1, 3, 3)
    return np.linalg.inv(YIQ) @ rotation @ YIQ
