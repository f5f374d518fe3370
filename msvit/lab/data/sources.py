"""Sources: images with labels, by number.

    source = open_source("pets", split="train")       # pets/train/CLASS/*.jpg, or pets/train/*.tar
    source = open_source("wds/imagenet", "val")       # webdataset shards in the folder imagenet
    source = open_source("hfds/cifar10", "test")      # a Hugging Face dataset, through timm
    source = open_source("scenes", "train", size=64)  # built in: drawn, not read; knows where the object is
    source[7].image, source[7].label, source.classes

A source of your own is a `Source` with `classes`, `len` and `[i]`.
"""

import struct
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image, UnidentifiedImageError

from msvit.lab.data.files import (
    Place,
    find_split,
    list_images,
    list_shards,
    numbered_classes,
    read_bytes,
    split_names,
    split_names_on_disk,
)
from msvit.lab.data.opening import open_image

BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
STREAMS = ("hfids", "tfds")
DRAWN = {"train": 8192, "val": 2048, "test": 2048}  # images of `scenes`


class BadImage(ValueError):  # noqa: N818
    """An image that cannot be decoded: which, why, and what to do."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # both: an error crosses from a worker by its arguments
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.name} cannot be read as an image ({self.reason}); "
            f"repair or delete it, or pass skip_bad=True (--skip-bad) to go on without it"
        )


@dataclass(frozen=True)
class Item:
    """One image with its label."""

    image: Image.Image | UInt8[np.ndarray, "h w 3"]
    label: int
    name: str
    object_mask: Bool[np.ndarray, "h w"] | None = None  # True where the labelled object is, where that is known


class Source:
    """Images with labels. `classes[label]` is a label's name; `[i]` raises `BadImage` for one that is corrupt."""

    classes: list[str]

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} has no len; write __len__, the number of images")

    def __getitem__(self, index: int) -> Item:
        raise TypeError(f"{type(self).__name__} has no images; write __getitem__, which returns an Item")


def decode(data: bytes, name: str) -> Image.Image:
    """An RGB image, wholly read: a truncated file fails here and not later."""
    try:
        return as_rgb(open_image(data))
    except UnidentifiedImageError:
        raise BadImage(name, f"{len(data)} bytes in no known image format") from None
    except BROKEN as error:
        raise BadImage(name, str(error)) from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Eight bits a channel. Pictures of 16 bits or of floats are scaled, where PIL alone would clip them to white."""
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        grey = np.asarray(image, dtype=np.float64)
        top = next((top for top in (1.0, 255.0) if grey.max() <= top and image.mode != "I;16"), 65535.0)
        image = Image.fromarray((grey / top * 255).clip(0, 255).round().astype(np.uint8))
    return image.convert("RGB")


class FileSource(Source):
    """Images in files and tars."""

    def __init__(self, places: list[Place], labels: list[int], classes: list[str]) -> None:
        self.places, self.labels, self.classes = places, labels, classes

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Item:
        place = self.places[index]
        try:
            data = read_bytes(place)
        except (OSError, ValueError) as error:
            raise BadImage(place.name, str(error)) from error
        return Item(image=decode(data, place.name), label=self.labels[index], name=place.name)


class HubSource(Source):
    """A Hugging Face dataset, as timm's reader gives it; `number` holds the new label of each old one."""

    def __init__(self, name: str, reader: Any, number: list[int], classes: list[str]) -> None:
        self.name, self.reader, self.number, self.classes = name, reader, number, classes

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> Item:
        name = f"{self.name}[{index}]"
        file, label = self.reader[index]
        with file:
            return Item(image=decode(file.read(), name), label=self.number[label], name=name)


class SceneSource(Source):
    """The built-in set: drawn images that know where their object is."""

    def __init__(self, scenes: Any) -> None:
        self.scenes, self.classes = scenes, list(scenes.classes)

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Item:
        scene = self.scenes[index]
        return Item(image=scene.image, label=scene.label, name=f"scenes[{index}]", object_mask=scene.object_mask)


def open_source(
    spec: str,
    split: str = "train",
    *,
    classes: list[str] | None = None,
    root: str | None = None,
    size: int = 64,
    num_images: int | None = None,
    seed: int = 0,
) -> Source:
    """The images that `spec` names: a path, `wds/FOLDER`, `hfds/NAME` or `scenes`.

    `split`: train, val (or validation; the test set, where there is none), test, or all. `classes` fixes which label
    is which class: pass the training set's when opening the validation set. `root` is where a Hugging Face dataset is
    kept. `size`, `num_images` and `seed` say what `scenes` draws; files are what they are.
    """
    prefix, _, rest = spec.partition("/")
    if spec == "scenes":
        return open_scenes(split, classes, size=size, num_images=num_images, seed=seed)
    if prefix in STREAMS:
        raise ValueError(
            f"{spec} is a stream, but image i of an epoch must be the same whatever the number of workers; "
            f"use hfds/NAME, or pack the images into tars and use wds/FOLDER"
        )
    if prefix == "hfds":
        return open_hub(rest, split, classes, root)
    path = Path(rest if prefix == "wds" else spec).expanduser()
    listing = list_shards(path, split) if prefix == "wds" else list_images(find_split(path, split))
    number = renumber(listing.classes, classes, spec)
    labels = [number[label] for label in listing.labels]
    return FileSource(listing.places, labels, listing.classes if classes is None else classes)


def open_scenes(
    split: str, classes: list[str] | None, *, size: int, num_images: int | None, seed: int
) -> SceneSource:
    from msvit.lab.data.scenes import Scenes

    name = next((name for name in DRAWN if split in split_names(name)), None)
    if name is None:
        raise ValueError(f"scenes has no split {split!r}; its splits are {', '.join(DRAWN)}")
    stream = seed + (list(DRAWN).index(name) << 20)  # no image is drawn in two splits
    source = SceneSource(Scenes(DRAWN[name] if num_images is None else num_images, size, stream))
    if classes is not None and list(classes) != source.classes:
        raise ValueError(f"scenes has the classes {source.classes}, but {classes} were asked for; leave out classes=")
    return source


def open_hub(name: str, split: str, classes: list[str] | None, root: str | None) -> HubSource:
    if find_spec("datasets") is None:
        raise ValueError(f"hfds/{name} needs the package datasets, which is not installed; pip install datasets")
    import datasets
    from timm.data import create_dataset

    found = datasets.get_dataset_split_names(name)
    here = next((other for other in split_names_on_disk(split) if other in found), None)
    if here is None:
        raise ValueError(f"hfds/{name} has no split {split!r}; splits found: {', '.join(found)}; name one of these")
    reader = create_dataset(f"hfds/{name}", root=root, split=here).reader
    known = sorted(reader.class_to_idx, key=reader.class_to_idx.__getitem__)
    if not known:
        known = numbered_classes(max(reader.dataset[reader.label_key]), f"hfds/{name}")
    number = renumber(known, classes, f"hfds/{name}")
    return HubSource(f"hfds/{name}", reader, number, known if classes is None else classes)


def renumber(found: list[str], wanted: list[str] | None, spec: str) -> list[int]:
    """The label in `wanted` of every class found, so that two splits agree on what a label means."""
    if wanted is None:
        return list(range(len(found)))
    number = {name: label for label, name in enumerate(wanted)}
    if foreign := [name for name in found if name not in number]:
        raise ValueError(
            f"{spec} has {len(found)} classes, among them {', '.join(foreign[:5])}, which the {len(wanted)} classes "
            f"asked for (those of the training set or of the model) do not have; remove or rename these folders"
        )
    return [number[name] for name in found]


def check_classes(source: Any, num_classes: int) -> None:
    """Refuse a head that does not fit the labels."""
    if len(source.classes) != num_classes:
        raise ValueError(
            f"the images have {len(source.classes)} classes, but the model's head has {num_classes}; "
            f"build the model with num_classes={len(source.classes)}"
        )


def check_same_classes(train: Any, val: Any) -> None:
    """Refuse a validation set whose labels mean something else than the training set's."""
    if train.classes == val.classes:
        return
    only = [f"{name} (train)" for name in train.classes if name not in val.classes]
    only += [f"{name} (val)" for name in val.classes if name not in train.classes]
    raise ValueError(
        f"train has {len(train.classes)} classes and val has {len(val.classes)}, so their labels differ "
        f"({', '.join(only[:5]) or 'the order'}); repair the folders (in Python, open val with classes=train.classes)"
    )
