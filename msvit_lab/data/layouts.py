"""Layouts: which label map belongs to which image, for segmentation sets as they are published or packed.

    found = list_label_maps(Path("VOCdevkit/VOC2012"), "val")
    found.images[0], found.label_maps[0]     # places in files
    found.classes                            # names, or None where nothing on disk gives them
    found.table[7]                           # the label that the value 7 on disk stands for

An image and its label map have the same path but for the folder that says which is which (images and labels, or those
of ADE20K, Pascal VOC and Cityscapes), in folders or in tars. `KNOWN` lists the layouts.
"""

import os
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from msvit.image_files import walk
from msvit.types import IGNORE
from msvit_lab.data.files import SPLIT_NAMES, Place, only_images, places_in, split_names, split_names_on_disk
from msvit_lab.data.opening import read_lines

KNOWN = (
    "ADE20K (images/training, annotations/training), Pascal VOC (JPEGImages, SegmentationClass, ImageSets), "
    "Cityscapes (leftImg8bit, gtFine), SPLIT/images with SPLIT/labels, images/SPLIT with labels/SPLIT, "
    "and SPLIT/*.tar or SPLIT.tar holding images/ and labels/"
)
PLAIN, ADE20K = ("images", "labels"), ("images", "annotations")  # folders of images and of label maps
PASCAL_VOC, CITYSCAPES = ("JPEGImages", "SegmentationClass"), ("leftImg8bit", "gtFine")
NUM_ADE20K = 150
VOC_CLASSES = [
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
]  # fmt: skip
CITYSCAPES_IDS = {  # the value in labelIds of each class that is trained
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19,
    "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26, "truck": 27,
    "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33,
}  # fmt: skip
NUM_CITYSCAPES_IDS = 34  # values that labelIds may hold


@dataclass(frozen=True)
class LabelMaps:
    """The images of a split with their label maps, and what the values on disk stand for."""

    images: list[Place]
    label_maps: list[Place]
    classes: list[str] | None
    table: UInt8[np.ndarray, "256"]


def list_label_maps(path: Path, split: str) -> LabelMaps:
    """The layout of a path, by what lies there."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a folder or a tar with images and label maps: {KNOWN}")
    files = list_files(path)
    table = np.arange(256, dtype=np.uint8)
    if lists := [file for file in files if file.match("ImageSets/Segmentation/*.txt")]:
        return LabelMaps(*pascal_voc(lists, split), VOC_CLASSES, table)
    places = places_of(path, split, files)
    if sides := both_sides(path, places, CITYSCAPES):
        trained = any(place.name.endswith("_labelTrainIds.png") for place in sides[1])
        if not trained:
            table[:NUM_CITYSCAPES_IDS] = IGNORE
            table[list(CITYSCAPES_IDS.values())] = np.arange(len(CITYSCAPES_IDS))
        suffixes = "_leftImg8bit", "_gtFine_labelTrainIds" if trained else "_gtFine_labelIds"
        return LabelMaps(*match(path, sides, suffixes), list(CITYSCAPES_IDS), table)
    sides = both_sides(path, places, ADE20K)
    if sides and {"training", "validation"} & set(parts(path, sides[1][0].name)):
        table[0], table[1:IGNORE] = IGNORE, np.arange(IGNORE - 1)  # 0 is unlabelled, 1 to 150 are the classes
        return LabelMaps(*match(path, sides), ade20k_classes(files), table)
    sides = both_sides(path, places, PLAIN)
    if sides is None:
        there = path.iterdir() if path.is_dir() else [path]
        some = ", ".join(sorted(file.name for file in there)[:12]) or "nothing"
        found = {part for file in files for part in parts(path, file) if part in SPLIT_NAMES}
        raise ValueError(
            f"{path} holds {some}, but no images with label maps for split {split!r}; splits found: "
            f"{', '.join(sorted(found)) or 'none'}; layouts known are {KNOWN}; rename or move the folders"
        )
    return LabelMaps(*match(path, sides), read_classes(path if path.is_dir() else path.parent), table)


def counted_label_maps(path: Path, split: str, found: LabelMaps) -> list[Place]:
    """Those in which classes without names are counted: the training split's, where there is one."""
    train = [] if split in split_names("train") else places_of(path, "train", list_files(path))
    sides = both_sides(path, train, PLAIN)
    return sides[1] if sides else found.label_maps


def list_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(map(Path, walk(path)))


def parts(path: Path, file: Path | str) -> list[str]:
    """The folders between a set and one of its files, then the file; tars count as folders."""
    between = str(file)[len(str(path)) :].replace(os.sep, "/").split("/")
    return [part.removesuffix(".tar") for part in between if part not in ("", ".")]


def places_of(path: Path, split: str, files: list[Path]) -> list[Place]:
    """The images and label maps of a split: those in a folder or tar of its name; of test, where there is no val."""
    groups = ([file for file in files if name in parts(path, file)] for name in split_names_on_disk(split))
    whole = files if path.stem in split_names(split) else []
    files = next((group for group in groups if group), whole)
    return only_images(places_in(files))


def both_sides(path: Path, places: list[Place], folders: tuple[str, str]) -> tuple[list[Place], list[Place]] | None:
    """The images and the label maps, by a folder in their paths; None where either is missing."""
    images, label_maps = ([p for p in places if folder in parts(path, p.name)[:-1]] for folder in folders)
    return (images, label_maps) if images and label_maps else None


def match(
    path: Path, sides: tuple[list[Place], list[Place]], suffixes: tuple[str, str] = ("", "")
) -> tuple[list[Place], list[Place]]:
    """Pairs in the order of the images; every file must have its partner. Only stems that end in the suffixes count."""
    folders = {*PLAIN, *ADE20K, *CITYSCAPES}
    keyed: list[dict[tuple[str, ...], Place]] = [{}, {}]
    for side, suffix, by_key in zip(sides, suffixes, keyed, strict=True):
        for place in side:
            *between, name = parts(path, place.name)
            between.remove(next(folder for folder in between if folder in folders))
            stem = Path(name).stem
            key = (*between, stem.removesuffix(suffix))
            if not stem.endswith(suffix):
                continue
            if key in by_key:
                raise ValueError(f"{by_key[key].name} and {place.name} differ in their endings only; remove one")
            by_key[key] = place
    for (name, ours), (partner, theirs) in permutations(zip(("image", "label map"), keyed, strict=True)):
        if alone := [place for key, place in ours.items() if key not in theirs]:
            raise ValueError(
                f"{len(alone)} of {len(ours)} {name}s have no {partner} of the same name, the first is "
                f"{alone[0].name}; add its {partner}, or remove it"
            )
    return list(keyed[0].values()), [keyed[1][key] for key in keyed[0]]


def pascal_voc(lists: list[Path], split: str) -> tuple[list[Place], list[Place]]:
    """The images that the split's list names; borders between objects have the value 255."""
    root = lists[-1].parents[2]  # VOC2012, where VOC2007 lies beside it
    found = {file.stem: file for file in lists if file.parents[2] == root}
    file = next((found[name] for name in split_names(split) if name in found), None)
    if file is None:
        raise ValueError(f"{root} has no split {split!r}; splits found: {', '.join(sorted(found))}; name one of these")
    stems = " ".join(read_lines(file)).split()
    if not stems:
        raise ValueError(f"{file} is empty, but lists the images of split {split!r}; unpack it again")
    sides: tuple[list[Place], list[Place]] = [], []
    for stem in stems:
        for side, folder, ending in zip(sides, PASCAL_VOC, (".jpg", ".png"), strict=True):
            path = root / folder / f"{stem}{ending}"
            if not path.is_file():
                raise ValueError(f"{path} does not exist, but {file.name} lists {stem}; add it, or edit the list")
            side += places_in([path])
    return sides


def ade20k_classes(files: list[Path]) -> list[str]:
    """The last column of objectInfo150.txt, up to the first of several names; numbers where the file is not there."""
    file = next((file for file in files if file.name == "objectInfo150.txt"), None)
    if file is None:
        return [f"class {number}" for number in range(1, NUM_ADE20K + 1)]
    rows = [line.split("\t") for line in read_lines(file)[1:] if line.strip()]
    names = [row[-1].split(",")[0].strip() for row in rows]
    if len(names) != NUM_ADE20K:
        raise ValueError(f"{file} has {len(names)} classes, but ADE20K has {NUM_ADE20K}; unpack it again, or delete it")
    return names


def read_classes(root: Path) -> list[str] | None:
    """The lines of classes.txt, where there is one."""
    file = root / "classes.txt"
    if not file.is_file():
        return None
    names = [line.strip() for line in read_lines(file) if line.strip()]
    if not names:
        raise ValueError(f"{file} is empty, but names the classes, one per line; write them, or delete the file")
    return names
