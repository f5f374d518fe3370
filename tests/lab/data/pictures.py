"""Tiny images on disk and in memory for the tests of data."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from msvit_lab.data import BadImage, Item, Source

CLASSES = ["Zebra", "bee", "class10", "class9"]  # timm's order would put 9 before 10 and Z last, ours is Python's
COLOURS = np.array([[20, 20, 20], [230, 40, 40], [40, 230, 60], [40, 60, 230], [230, 220, 40]], np.uint8)  # of labels


def picture(seed: int, height: int = 20, width: int = 28) -> Image.Image:
    """Smooth, so that no compression and no filter changes it much."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def label_map(seed: int, shape: tuple[int, int] = (20, 28)) -> np.ndarray:
    """Blocks of labels 0 to 4."""
    small = np.random.default_rng(seed).integers(0, len(COLOURS), (3, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize(shape[::-1], Image.Resampling.NEAREST))


def painted(labels: np.ndarray) -> Image.Image:
    """An image whose colours are those of its labels."""
    return Image.fromarray(COLOURS[labels % len(COLOURS)])


def encoded(image: Image.Image, ending: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, {"jpg": "jpeg"}.get(ending, ending))
    return buffer.getvalue()


def write(path: Path, image: Image.Image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(image, path.suffix[1:]))
    return path


def write_pair(image: Path, label: Path, seed: int, offset: int = 0) -> None:
    """The image, and its labels plus `offset` as values on disk."""
    labels = label_map(seed)
    write(image, painted(labels))
    write(label, Image.fromarray(labels + np.uint8(offset)))


def write_folders(root: Path, classes: list[str] = CLASSES, each: int = 3) -> Path:
    """root/CLASS/i.{jpg, png, webp}."""
    for label, name in enumerate(classes):
        for i in range(each):
            write(root / name / f"{i}.{('jpg', 'png', 'webp')[i % 3]}", picture(10 * label + i))
    return root


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


class Pictures(Source):
    """`num` images in memory, of several shapes or one; `bad` ones are corrupt.

    By default the label is the image's number, and the object is where red is strong, so that a mask can be compared
    with its image after any crop. With `dense` there are label maps, and a pixel's colour is that of its label.
    """

    def __init__(
        self, num: int, bad: tuple[int, ...] = (), shape: tuple[int, int] | None = None, dense: bool = False
    ) -> None:
        self.num, self.bad, self.shape, self.dense, self.num_read = num, bad, shape, dense, 0
        self.classes = [str(i) for i in range(len(COLOURS) if dense else num)]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Item:
        self.num_read += 1
        name, shape = f"picture {index}", self.shape or ((24, 36), (37, 23), (30, 30), (11, 50))[index % 4]
        if index in self.bad:
            raise BadImage(name, "torn")
        if self.dense:
            labels = label_map(index, shape)
            return Item(painted(labels), name, label_map=labels)
        image = picture(index, *shape)
        return Item(image, name, label=index, object_mask=np.asarray(image)[:, :, 0] > 127)
