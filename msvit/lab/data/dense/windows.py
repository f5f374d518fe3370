"""Windows: which square of a scaled image a segmentation model is trained on.

    rule = RandomWindow(side=512, short_side=512, scales=(0.5, 2.0), max_share=0.75)
    windows = rule(size, thumb, seed=0, epoch=3, index=i)    # size (b, 2), thumb (b, 64, 64)
    windows.box                  # (b, 4): left, top, right, bottom as shares of the image; beyond 1 is padding
    windows.filled               # (b, 2): rows and columns of the square that show the image, from the top left
    windows.samples(size)        # which row and column of a label map each pixel of the square shows

The image is scaled by a random factor and a square is cut from it, at a place where no class takes more than
`max_share` of it, if one of ten tries finds such a place. As in `msvit.lab.data.crops`, a window is a function of seed,
epoch and image number. Classes are counted in a thumbnail of the label map, small enough to keep for every image.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer, UInt8

from msvit.lab.data.crops import TRIES, uniform
from msvit.types import IGNORE

WINDOW, COLOUR = 2, 3  # streams of `uniform`, after those of msvit.lab.data.crops
THUMB = 64  # rows and columns of a thumbnail
GRID = 24  # rows and columns of the samples in which a window's classes are counted


class Samples(NamedTuple):
    """The row and the column of the label map under each pixel of a square."""

    rows: Int[np.ndarray, "b s"]
    columns: Int[np.ndarray, "b s"]


@dataclass(frozen=True)
class DenseWindows:
    """A window in each image, what of it lies in the image, and whether that is mirrored."""

    side: int  # px of the square that the window becomes
    box: Float[np.ndarray, "b 4"]
    flip: Bool[np.ndarray, " b"]
    filled: Int[np.ndarray, "b 2"]

    def columns(self) -> Float[np.ndarray, "b 2"]:
        """Where the columns begin and end, as shares of the width: from right to left where mirrored.

        The image stays at the left of its square, so a mirrored one begins at the last column that is seen.
        """
        left, right = self.box[:, 0], self.box[:, 2]
        start = np.where(self.flip, np.minimum(right, 1), left)
        return np.stack([start, start + np.where(self.flip, left - right, right - left)], 1)

    def samples(self, size: Int[np.ndarray, "b 2"]) -> Samples:
        """The nearest row and column of label maps of these heights and widths; the last one under padding."""
        return Samples(
            rows=nearest(self.box[:, 1::2], size[:, 0], self.side),
            columns=nearest(self.columns(), size[:, 1], self.side),
        )


def nearest(ends: Float[np.ndarray, "b 2"], count: Int[np.ndarray, " b"], num: int) -> Int[np.ndarray, "b num"]:
    """`num` places between two shares, as numbers of `count` pixels."""
    share = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * ((np.arange(num) + 0.5) / num)  # (b, num)
    return np.clip(np.floor(share * count[:, None]).astype(np.int64), 0, count[:, None] - 1)


def thumbnail(label_map: UInt8[np.ndarray, "h w"]) -> UInt8[np.ndarray, "t t"]:
    """The label map at `THUMB` x `THUMB` places."""
    rows, columns = nearest(np.array([[0.0, 1.0]] * 2), np.array(label_map.shape), THUMB)
    return label_map[rows[:, None], columns]


def scaled(size: Int[np.ndarray, "b 2"], factor: Float[np.ndarray, " b"]) -> Int[np.ndarray, "b 2"]:
    """Heights and widths times a factor, in whole pixels."""
    return np.maximum(np.rint(size * factor[:, None]), 1).astype(np.int64)


def to_short_side(size: Int[np.ndarray, "b 2"], short_side: int | None) -> Float[np.ndarray, " b"]:
    """The factor that makes the shorter side `short_side` px; 1 where that is None."""
    return np.ones(len(size)) if short_side is None else short_side / size.min(1)


@dataclass(frozen=True)
class RandomWindow:
    """Segmenter's training window: scaled, cut where classes are mixed, mirrored half the time."""

    side: int  # px of the square
    short_side: int | None = None
    scales: tuple[float, float] = (0.5, 2.0)
    max_share: float = 0.75

    def __post_init__(self) -> None:
        if self.side < 1:
            raise ValueError(f"img_size is {self.side}, but a side needs at least 1 px; 512 is usual")
        if self.short_side is not None and self.short_side < 1:
            raise ValueError(f"short_side is {self.short_side}, but a side needs at least 1 px; None leaves images be")
        if not 0 < self.scales[0] <= self.scales[1]:
            raise ValueError(f"scales are {self.scales}, but must be positive, the smaller first; (0.5, 2.0) is usual")
        if not 0 < self.max_share <= 1:
            raise ValueError(f"max_share is {self.max_share}, but must lie in (0, 1]; 0.75 is usual, 1 allows all")

    def __call__(
        self,
        size: Int[np.ndarray, "b 2"],
        thumb: UInt8[np.ndarray, "b t t"],
        *,
        seed: int,
        epoch: int,
        index: Int[np.ndarray, " b"],
    ) -> DenseWindows:
        draw = uniform(seed, epoch, index, 2 * TRIES + 2, WINDOW)
        factor = self.scales[0] + (self.scales[1] - self.scales[0]) * draw[:, -2]
        whole = scaled(size, factor * to_short_side(size, self.short_side))[:, None]  # (b, 1, 2): px of the image
        room = np.maximum(whole - self.side, 0) + 1
        corner = np.floor(draw[:, : 2 * TRIES].reshape(-1, TRIES, 2) * room)  # (b, tries, 2): top, left
        start, stop = corner / whole, (corner + self.side) / whole
        box = np.stack([start[..., 1], start[..., 0], stop[..., 1], stop[..., 0]], 2)  # (b, tries, 4)
        mixed = largest_share(thumb, box) <= self.max_share  # (b, tries)
        chosen = np.where(mixed.any(1), mixed.argmax(1), TRIES - 1)
        return DenseWindows(
            side=self.side,
            box=box[np.arange(len(box)), chosen],
            flip=draw[:, -1] < 0.5,
            filled=np.minimum(whole[:, 0], self.side),
        )


def largest_share(
    thumb: UInt8[np.ndarray, "b t t"], box: Float[np.ndarray, "b tries 4"]
) -> Float[np.ndarray, "b tries"]:
    """The share of the most frequent class among the labelled samples of each window; 2 where there is none."""
    b, tries = box.shape[:2]
    inside = np.minimum(box, 1).reshape(-1, 4)  # padding has no label, so only what the image fills is sampled
    count = np.full(len(inside), thumb.shape[1])
    first = np.repeat(np.arange(b), tries)[:, None] * thumb[0].size  # where each window's thumbnail begins
    rows = first + thumb.shape[1] * nearest(inside[:, 1::2], count, GRID)
    columns = nearest(inside[:, ::2], count, GRID)
    found = thumb.ravel().take(rows[:, :, None] + columns[:, None])  # (b * tries, grid, grid)
    counts = histograms(found.reshape(b * tries, -1))[:, :IGNORE]
    total = counts.sum(1)
    return np.where(total > 0, counts.max(1) / np.maximum(total, 1), 2.0).reshape(b, tries)


def histograms(values: UInt8[np.ndarray, "n k"]) -> Integer[np.ndarray, "n 256"]:
    """How often each value occurs in each row."""
    places = values.astype(np.int64) + 256 * np.arange(len(values))[:, None]
    return np.bincount(places.ravel(), minlength=256 * len(values)).reshape(-1, 256)
