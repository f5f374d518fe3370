"""Tiny images with label maps for the tests of dense data. A pixel's colour says its label."""

from pathlib import Path

import numpy as np
from pictures import encoded
from PIL import Image

from msvit.lab.data import BadImage
from msvit.lab.data.dense import DenseItem, DenseSource

COLOURS = np.array([[20, 20, 20], [230, 40, 40], [40, 230, 60], [40, 60, 230], [230, 220, 40]], np.uint8)
SHAPES = ((24, 36), (37, 23), (30, 30), (11, 50))


def label_map(seed: int, shape: tuple[int, int] = (20, 28)) -> np.ndarray:
    """Blocks of labels 0 to 4."""
    small = np.random.default_rng(seed).integers(0, len(COLOURS), (3, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize(shape[::-1], Image.Resampling.NEAREST))


def painted(labels: np.ndarray) -> Image.Image:
    return Image.fromarray(COLOURS[labels % len(COLOURS)])


def write(path: Path, image: Image.Image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(image, path.suffix[1:]))
    return path


def write_pair(image: Path, label: Path, seed: int, offset: int = 0) -> None:
    """The image, and its labels plus `offset` as values on disk."""
    labels = label_map(seed)
    write(image, painted(labels))
    write(label, Image.fromarray(labels + np.uint8(offset)))


class Painted(DenseSource):
    """`num` images in memory, of four shapes or one; `bad` ones are corrupt. `plain` ones have label 1 only."""

    def __init__(self, num: int, bad: tuple[int, ...] = (), shape: tuple[int, int] | None = None, plain: bool = False):
        self.num, self.bad, self.shape, self.plain = num, bad, shape, plain
        self.classes = [str(i) for i in range(len(COLOURS))]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> DenseItem:
        if index in self.bad:
            raise BadImage(f"picture {index}", "torn")
        labels = label_map(index, self.shape or SHAPES[index % len(SHAPES)])
        labels = np.ones_like(labels) if self.plain else labels
        return DenseItem(image=painted(labels), label_map=labels, name=f"picture {index}")
