"""Published sets: ADE20K, Pascal VOC and Cityscapes as they come out of their archives.

    layout = find_published(Path("ADEChallengeData2016"), "val")    # None where it is none of them
    layout.pairs[0].image, layout.pairs[0].label_map                # places in files
    layout.classes[3]                                               # the name of label 3
    layout.table[7]                                                 # the label that the value 7 on disk stands for
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from msvit.lab.data.dense.pairs import Pair, pair_folders
from msvit.lab.data.files import Place, split_names
from msvit.lab.data.opening import read_lines
from msvit.types import IGNORE

VOC = [
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
]  # fmt: skip
CITYSCAPES = {  # the value in labelIds of each class that is trained
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19,
    "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26, "truck": 27,
    "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33,
}  # fmt: skip
CITYSCAPES_IDS = 34  # values that labelIds may hold
ADE20K = 150  # classes
ADE20K_SPLITS = ("training", "validation")


@dataclass(frozen=True)
class Layout:
    """What a split holds, what its classes are called, if that is known, and what the values on disk stand for."""

    pairs: list[Pair]
    classes: list[str] | None
    table: UInt8[np.ndarray, "256"]


def plain_table() -> UInt8[np.ndarray, "256"]:
    """Values on disk are labels."""
    return np.arange(256, dtype=np.uint8)


def find_published(path: Path, split: str) -> Layout | None:
    """By the folders that each of them has, at the path or where its archive puts them."""
    for root in (path, path / "ADEChallengeData2016"):
        if any(all((root / kind / name).is_dir() for kind in ("images", "annotations")) for name in ADE20K_SPLITS):
            return ade20k(root, split)
    for root in (path, path / "VOC2012", path / "VOCdevkit" / "VOC2012"):
        if all((root / folder).is_dir() for folder in ("JPEGImages", "SegmentationClass", "ImageSets")):
            return pascal_voc(root, split)
    if all((path / folder).is_dir() for folder in ("leftImg8bit", "gtFine")):
        return cityscapes(path, split)
    return None


def choose(root: Path, split: str, found: list[str]) -> str:
    """The name of a split among those found."""
    name = next((name for name in split_names(split) if name in found), None)
    if name is None:
        raise ValueError(f"{root} has no split {split!r}; splits found: {', '.join(sorted(found))}; name one of these")
    return name


def folders(root: Path) -> list[str]:
    """Their names."""
    return [child.name for child in root.iterdir() if child.is_dir()]


def ade20k(root: Path, split: str) -> Layout:
    """Label 0 is ignored, 1 to 150 are the classes."""
    name = choose(root, split, folders(root / "annotations"))
    pairs = pair_folders(root / "images" / name, root / "annotations" / name)
    table = plain_table()
    table[0], table[1:IGNORE] = IGNORE, np.arange(IGNORE - 1)
    return Layout(pairs=pairs, classes=ade20k_names(root), table=table)


def ade20k_names(root: Path) -> list[str]:
    """The last column of objectInfo150.txt, up to the first of several names; numbers where the file is not there."""
    file = root / "objectInfo150.txt"
    if not file.is_file():
        return [f"class {number}" for number in range(1, ADE20K + 1)]
    rows = [line.split("\t") for line in read_lines(file)[1:] if line.strip()]
    names = [row[-1].split(",")[0].strip() for row in rows]
    if len(names) != ADE20K:
        raise ValueError(f"{file} names {len(names)} classes, but ADE20K has {ADE20K}; unpack it again, or delete it")
    return names


def pascal_voc(root: Path, split: str) -> Layout:
    """The images that a list names; borders between objects have the value 255."""
    lists = root / "ImageSets" / "Segmentation"
    name = choose(root, split, [file.stem for file in lists.glob("*.txt")])
    stems = " ".join(read_lines(lists / f"{name}.txt")).split()
    if not stems:
        raise ValueError(f"{lists / name}.txt is empty, but lists the images of split {split!r}; unpack it again")
    pairs = []
    for stem in stems:
        files = root / "JPEGImages" / f"{stem}.jpg", root / "SegmentationClass" / f"{stem}.png"
        for file in files:
            if not file.is_file():
                raise ValueError(f"{file} does not exist, but {name}.txt lists {stem}; add it, or take it off the list")
        pairs.append(Pair(*(Place(str(file), 0, -1, str(file)) for file in files)))
    return Layout(pairs=pairs, classes=list(VOC), table=plain_table())


def cityscapes(root: Path, split: str) -> Layout:
    """CITY/X_leftImg8bit.png with CITY/X_gtFine_labelTrainIds.png, or the 19 trained classes of _labelIds.png."""
    name = choose(root, split, folders(root / "gtFine"))
    labels = root / "gtFine" / name
    trained = next(labels.rglob("*_gtFine_labelTrainIds.png"), None) is not None
    pairs = pair_folders(
        root / "leftImg8bit" / name,
        labels,
        suffixes=("_leftImg8bit", "_gtFine_labelTrainIds" if trained else "_gtFine_labelIds"),
    )
    table = plain_table()
    if not trained:
        table[:CITYSCAPES_IDS] = IGNORE
        table[list(CITYSCAPES.values())] = np.arange(len(CITYSCAPES))
    return Layout(pairs=pairs, classes=list(CITYSCAPES), table=table)
