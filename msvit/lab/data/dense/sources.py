"""Dense sources: images with a label for every pixel, by number.

    train = open_dense("ade20k", "train")                   # ADE20K, Pascal VOC, Cityscapes, folders or tars
    val = open_dense("ade20k", "val", classes=train.classes)
    toy = open_dense("scenes", "train", size=64)            # built in: drawn, not read
    train[7].image, train[7].label_map                      # an RGB image and (h, w) bytes
    train.classes[3]                                        # the name of label 3; IGNORE (255) has none

A source of your own is a `DenseSource` with `classes`, `len` and `[i]`.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from msvit.lab.data.dense.layouts import counted_pairs, find_layout
from msvit.lab.data.dense.pairs import Pair
from msvit.lab.data.dense.published import VOC
from msvit.lab.data.files import Place, read_bytes
from msvit.lab.data.opening import open_image
from msvit.lab.data.sources import BROKEN, BadImage, decode, open_scenes
from msvit.types import IGNORE

GREY_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")  # one number a pixel


class BadLabelMap(BadImage):
    """A label map that does not fit its image or its classes. `reason` goes on after the name."""

    def __str__(self) -> str:
        return f"{self.name} {self.reason}, or pass skip_bad=True (--skip-bad) to go on without it"


@dataclass(frozen=True)
class DenseItem:
    """One image with a label for every pixel: 0 to num_classes - 1, or IGNORE."""

    image: Image.Image
    label_map: UInt8[np.ndarray, "h w"]
    name: str


class DenseSource:
    """Images with label maps. `[i]` raises `BadImage` for one that is corrupt or does not fit."""

    classes: list[str]

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} has no len; write __len__, the number of images")

    def __getitem__(self, index: int) -> DenseItem:
        raise TypeError(f"{type(self).__name__} has no images; write __getitem__, which returns a DenseItem")


class PairSource(DenseSource):
    """Images and label maps in files and tars; `table` holds the label that each value on disk stands for."""

    def __init__(self, pairs: list[Pair], classes: list[str], table: UInt8[np.ndarray, "256"]) -> None:
        self.pairs, self.classes, self.table = pairs, classes, table

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> DenseItem:
        pair = self.pairs[index]
        image = decode(read_place(pair.image), pair.image.name)
        values = decode_label_map(read_place(pair.label_map), pair.label_map.name)
        if values.shape != (image.height, image.width):
            raise BadLabelMap(
                pair.label_map.name,
                f"is {values.shape[0]}x{values.shape[1]}, but its image {Path(pair.image.name).name} is "
                f"{image.height}x{image.width}; scale one to the other, label maps by nearest neighbour",
            )
        labels = self.table[values]
        outside = (labels >= len(self.classes)) & (labels != IGNORE)
        if outside.any():
            raise BadLabelMap(
                pair.label_map.name,
                f"holds the value {values[outside].max()}, but there are {len(self.classes)} classes, "
                f"{self.classes[0]} to {self.classes[-1]}; add its class, or make it {IGNORE} to have it ignored",
            )
        return DenseItem(image=image, label_map=labels, name=pair.image.name)


class SceneMaps(DenseSource):
    """The built-in set: the ground is label 0, an object 1 + its class."""

    def __init__(self, scenes: Any) -> None:
        self.scenes, self.classes = scenes, ["ground", *scenes.classes]

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> DenseItem:
        scene = self.scenes[index]
        label_map = np.where(scene.object_mask, 1 + scene.label, 0).astype(np.uint8)
        return DenseItem(image=Image.fromarray(scene.image), label_map=label_map, name=f"scenes[{index}]")


def read_place(place: Place) -> bytes:
    try:
        return read_bytes(place)
    except (OSError, ValueError) as error:
        raise BadImage(place.name, str(error)) from error


def decode_label_map(data: bytes, name: str) -> UInt8[np.ndarray, "h w"]:
    """The numbers in an image of one channel. A palette is only for the eye."""
    try:
        image = open_image(data)
        values = np.asarray(image)
    except UnidentifiedImageError:
        raise BadImage(name, f"{len(data)} bytes in no known image format") from None
    except BROKEN as error:
        raise BadImage(name, str(error)) from error
    if image.mode not in GREY_MODES:
        raise BadLabelMap(
            name,
            f"has the channels {image.mode}, but a label map has one number a pixel; where colours stand for classes, "
            f"write their numbers into a PNG of one channel",
        )
    if image.format == "JPEG":
        raise BadLabelMap(name, "is a JPEG, which does not keep numbers as they are; write label maps as PNG")
    if values.min() < 0 or values.max() > IGNORE:
        wrong = values.min() if values.min() < 0 else values.max()
        raise BadLabelMap(name, f"holds the value {wrong}, but labels are 0 to 254, {IGNORE} is ignored; renumber it")
    return values.astype(np.uint8)


def open_dense(
    spec: str,
    split: str = "train",
    *,
    classes: list[str] | None = None,
    size: int = 64,
    num_images: int | None = None,
    seed: int = 0,
) -> DenseSource:
    """The images and label maps that `spec` names: a path, or `scenes`.

    `split`: train, val (or validation), test, or all. `classes`: pass the training set's when opening the validation
    set. Where nothing on disk names the classes, they are counted in the label maps of the training split, each of
    which is then read once. `size`, `num_images` and `seed` say what `scenes` draws.
    """
    if spec == "scenes":
        source = SceneMaps(open_scenes(split, None, size=size, num_images=num_images, seed=seed).scenes)
        check_names(spec, source.classes, classes)
        return source
    path = Path(spec).expanduser()
    layout = find_layout(path, split)
    if layout.classes is not None:
        check_names(spec, layout.classes, classes)
    names = layout.classes or classes
    if names is None:
        names = count_classes(counted_pairs(path, split, layout), path)
    check_count(spec, names)
    return PairSource(layout.pairs, names, layout.table)


def check_names(spec: str, found: list[str], wanted: list[str] | None) -> None:
    if wanted not in (None, found):
        raise ValueError(
            f"{spec} has {len(found)} classes, {', '.join(found[:3])} and so on, but {len(wanted or [])} were asked "
            f"for, {', '.join((wanted or [])[:3])} and so on; leave out classes=, or open the set they belong to"
        )


def check_count(spec: str, classes: list[str]) -> None:
    if len(classes) > IGNORE:
        raise ValueError(
            f"{spec} has {len(classes)} classes, but a label is a byte and {IGNORE} means ignored, "
            f"so there may be {IGNORE}; join some classes"
        )


def count_classes(pairs: list[Pair], path: Path) -> list[str]:
    """Numbers for names, as many as the highest value in the label maps asks for."""
    with ThreadPoolExecutor() as pool:
        highest = max(pool.map(highest_label, [pair.label_map for pair in pairs]))
    if highest < 0:
        raise ValueError(f"no label map of {path} has a label other than {IGNORE}, which is ignored; label some pixels")
    if highest + 1 == len(VOC) and path.name.lower().startswith("voc"):
        return list(VOC)
    return [str(label) for label in range(highest + 1)]


def highest_label(place: Place) -> int:
    """-1 where there is none, or where the label map is bad: that is said when it is its turn."""
    try:
        values = decode_label_map(read_place(place), place.name)
    except BadImage:
        return -1
    return int(values.max(where=values != IGNORE, initial=0)) if (values != IGNORE).any() else -1
