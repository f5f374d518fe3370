"""Objects: where in its image the labelled thing is, for data sets that have masks beside their images.

    masks = read_masks("pets/{split}_trimaps.tar.gz", split="val")     # or a folder: pets/masks/{split}
    source = ObjectSource(open_source("pets", "val"), masks)
    source[7].object_mask                                              # (h, w) bool, of the image's size

A mask has the name of its image, in a folder of its class or not; pixels of value 1 are the object (Pets' trimaps: 1
the animal, 2 background, 3 border).
"""

import tarfile
from dataclasses import replace
from pathlib import Path, PurePath

import numpy as np
from PIL import Image

from msvit.lab.data.opening import open_image, read_plain
from msvit.lab.data.sources import BROKEN, BadImage, Item, Source

OBJECT = 1
MAX_MASKS = 1 << 32  # bytes of all masks together


def read_masks(pattern: str, split: str) -> dict[str, bytes]:
    """The bytes of every mask, by the end of its path without the ending: "cat/7", or "7"."""
    path = Path(pattern.replace("{split}", split))
    if path.is_dir():
        found = {str(file.relative_to(path)): read_plain(file) for file in sorted(path.rglob("*.png"))}
    elif path.is_file():
        try:
            with tarfile.open(path) as tar:
                members = [member for member in tar.getmembers() if member.isfile() and member.name.endswith(".png")]
                check_total(path, sum(member.size for member in members))
                found = {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]
        except (tarfile.TarError, OSError) as error:
            raise ValueError(f"{path} cannot be read as a tar ({error}); give a tar or a folder of PNG masks") from None
    else:
        raise ValueError(f"there are no masks at {path}; give a tar or a folder, with {{split}} for val")
    if not found:
        raise ValueError(f"{path} holds no PNG; masks are PNGs named as their images")
    return {str(PurePath(name).with_suffix("")): data for name, data in found.items()}


def check_total(path: Path, num_bytes: int) -> None:
    if num_bytes > MAX_MASKS:
        raise ValueError(f"{path} unpacks to {num_bytes} bytes, but {MAX_MASKS} are read at most; make them smaller")


class ObjectSource(Source):
    """Another source's images, each with its mask."""

    def __init__(self, source: Source, masks: dict[str, bytes]) -> None:
        self.source, self.masks, self.classes = source, masks, source.classes

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Item:
        item = self.source[index]
        image = item.image if isinstance(item.image, Image.Image) else Image.fromarray(item.image)
        stem = PurePath(item.name).stem
        data = self.masks.get(f"{self.classes[item.label]}/{stem}", self.masks.get(stem))
        if data is None:
            raise BadImage(item.name, "it has no mask of its object")
        try:
            with open_image(data) as mask:
                pixels = np.asarray(mask.resize(image.size, Image.Resampling.NEAREST))
        except BROKEN as error:
            raise BadImage(item.name, f"the mask of its object is broken: {error}") from error
        return replace(item, object_mask=pixels == OBJECT)
