"""Images: any folder, decoded to squares that all differ. Timing copies of one image would hide that images differ.

    pictures = Pictures(Path("photos"))         # every image below it, those in tars too; None: scenes, drawn
    pictures.squares(size=224, wanted=1024, least=256)    # (n, 3, 224, 224) bytes, n between the two

The order is shuffled once, always in the same way, so that a few images are a fair sample of the folder.
"""

from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from msvit.image_files import walk
from msvit_lab.data import CentreCrop, Source, open_source
from msvit_lab.data.decode import Decoder
from msvit_lab.data.files import Place, image_endings, only_photographs, places_in
from msvit_lab.data.layouts import ADE20K, CITYSCAPES, PASCAL_VOC, PLAIN
from msvit_lab.data.loader import usable_cores
from msvit_lab.data.sources import FileSource
from msvit_lab.data.transforms import shuffled

NUM_SCENES = 4096
SCENE = 128  # px: drawn at one size and resized, as photographs are
CHUNK = 64  # images decoded before the different ones are counted again
PETS = ("images", "annotations/trimaps")
IMAGE_LABEL_FOLDERS = (PLAIN, ADE20K, CITYSCAPES, PASCAL_VOC, ("JPEGImages", "SegmentationObject"), PETS)
LABEL_ENDING = "_seg"  # ADE20K in full has photo_seg.png beside photo.jpg


class Pictures:
    """Different images of a folder, as squares; the largest square in the centre of each."""

    def __init__(self, folder: Path | None = None) -> None:
        self.name = "scenes" if folder is None else short(folder)
        self.source: Source = (
            open_source("scenes", "val", size=SCENE, num_images=NUM_SCENES)
            if folder is None
            else FileSource(places := list_places(folder), [0] * len(places), ["image"])
        )
        self.num_bad = 0
        self._kept: dict[int, tuple[int, UInt8[Tensor, "n 3 s s"]]] = {}  # by size: how many were wanted, and found

    def squares(self, size: int, wanted: int, least: int) -> UInt8[Tensor, "n 3 {size} {size}"]:
        """Up to `wanted` different images, and never fewer than `least`."""
        before, found = self._kept.get(size, (0, torch.empty(0)))
        are_all = len(found) < before  # fewer than were wanted
        if wanted > before and not are_all:
            found = self._read(size, wanted)
            self._kept[size] = wanted, found
        found = found[:wanted]
        if len(found) < least:
            raise ValueError(
                f"{self.name} has {len(found)} different images, but a batch of {least} needs as many, as copies "
                f"of one image would be no measurement; give --images with more of them, or a smaller --batch"
            )
        return found

    def _read(self, size: int, wanted: int) -> UInt8[Tensor, "n 3 {size} {size}"]:
        decoder = Decoder(self.source, CentreCrop(side=size, interpolation="bicubic", share=1.0))
        order = shuffled(len(self.source), seed=0, epoch=0)
        found: dict[bytes, Tensor] = {}  # by the hash of its pixels
        self.num_bad = 0
        with ThreadPoolExecutor(usable_cores()) as pool:
            for start in range(0, len(order), CHUNK):
                keys = [(0, order[i : i + 1]) for i in range(start, min(start + CHUNK, len(order)))]
                for part in pool.map(decoder.__getitem__, keys):
                    self.num_bad += len(part.bad)
                    for square in part.pixels.view(-1, 3, size, size):
                        found.setdefault(sha256(square.numpy().tobytes()).digest(), square)
                if len(found) >= wanted:
                    break
        return torch.stack([*found.values()][:wanted]) if found else torch.empty(0, 3, size, size, dtype=torch.uint8)


def list_places(folder: Path) -> list[Place]:
    """Every image below a folder or in a tar, by name, without the label maps of segmentation sets."""
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; give --images a folder of images or a tar")
    files = [folder] if folder.is_file() else sorted(path for path in map(Path, walk(folder)) if path.is_file())
    if not (found := only_photographs(places_in(files))):
        raise ValueError(f"{folder} has no images in it ({', '.join(image_endings())}); give a folder or tar with some")
    return without_label_maps(found)


def without_label_maps(places: list[Place]) -> list[Place]:
    """Images only: no labels/a.png where images/ has images too, and no a.png or a_seg.png beside a.jpg or a.webp."""
    paths = [Path(place.name) for place in places]
    folders = {path.parent for path in paths}
    photos = {path.with_suffix("") for path in paths if path.suffix.lower() != ".png"}

    def is_label_map(path: Path) -> bool:
        folder = f"/{path.parent.as_posix()}/"
        beside = (
            Path(folder.replace(f"/{labels}/", f"/{images}/")[1:])
            for images, labels in IMAGE_LABEL_FOLDERS
            if f"/{labels}/" in folder
        )
        photo = path.with_name(path.stem.removesuffix(LABEL_ENDING))
        return (path.suffix.lower() == ".png" and photo in photos) or not folders.isdisjoint(beside)

    return [place for place, path in zip(places, paths, strict=True) if not is_label_map(path)]


def batches(images: Shaped[Tensor, "n c h w"], batch: int) -> list[Tensor]:
    """Whole batches of different images, without the rest."""
    return [part for part in images.split(batch) if len(part) == batch]


def short(path: Path) -> str:
    """The last two names of a path: enough to identify it on any machine."""
    return "/".join(path.resolve().parts[-2:])
