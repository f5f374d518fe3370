"""Tiny images on disk and in memory for the tests of data."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from msvit.lab.data import BadImage, Item, Source

CLASSES = ["ant", "bee", "class10", "class9"]  # timm's order would put 9 before 10, ours is Python's


def picture(seed: int, height: int = 20, width: int = 28) -> Image.Image:
    """Smooth, so that no compression and no filter changes it much."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, ending: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, {"jpg": "jpeg"}.get(ending, ending))
    return buffer.getvalue()


def write_folders(root: Path, classes: list[str] = CLASSES, each: int = 3) -> Path:
    """root/CLASS/i.{jpg, png, webp}."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(each):
            ending = ("jpg", "png", "webp")[i % 3]
            (root / name / f"{i}.{ending}").write_bytes(encoded(picture(10 * label + i), ending))
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
    """`num` images in memory, of three shapes or one; `bad` ones are corrupt. The label is the image's number."""

    def __init__(self, num: int, bad: tuple[int, ...] = (), shape: tuple[int, int] | None = None, mask: bool = False):
        self.num, self.bad, self.shape, self.mask = num, bad, shape, mask
        self.classes = [str(i) for i in range(num)]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Item:
        if index in self.bad:
            raise BadImage(f"picture {index}", "torn")
        image = np.asarray(picture(index, *(self.shape or ((24, 36), (36, 24), (30, 30))[index % 3])))
        # The object is where red is strong, so the mask can be told from the image after any crop.
        return Item(image, index, f"picture {index}", image[:, :, 0] > 127 if self.mask else None)
