"""Sources: images with labels, by number.

    source = open_source("pets", split="train")       # pets/train/CLASS/*.jpg, or pets/train/*.tar
    source[7].image, source[7].label, source.classes  # with target="label_map" also source[7].label_map, (h, w) bytes

A source of your own is a `Source` with `classes`, `len` and `[i]`.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msvit.types import IGNORE
from msvit_lab.data.files import Place, list_split, read_bytes, split_names
from msvit_lab.data.items import Item, Source
from msvit_lab.data.layouts import VOC_CLASSES, LabelMaps, counted_label_maps, list_label_maps
from msvit_lab.data.opening import BadImage, BadLabelMap, decode, decode_label_map
from msvit_lab.data.scenes import Scenes

DRAWN = {"train": 8192, "val": 2048, "test": 2048}  # images of `scenes`


class FileSource(Source):
    """Images in files and tars, each with its class."""

    def __init__(self, places: list[Place], labels: list[int], classes: list[str]) -> None:
        self.places, self.labels, self.classes = places, labels, classes

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Item:
        place = self.places[index]
        return Item(image=decode(read_bytes(place), place.name), name=place.name, label=self.labels[index])


class LabelMapSource(Source):
    """Images in files and tars, each with its label map."""

    def __init__(self, found: LabelMaps, classes: list[str]) -> None:
        self.found, self.classes = found, classes

    def __len__(self) -> int:
        return len(self.found.images)

    def __getitem__(self, index: int) -> Item:
        place, where = self.found.images[index], self.found.label_maps[index]
        image = decode(read_bytes(place), place.name)
        values = decode_label_map(read_bytes(where), where.name)
        if values.shape != (image.height, image.width):
            raise BadLabelMap(
                where.name,
                f"is {values.shape[0]}x{values.shape[1]}, but its image {Path(place.name).name} is "
                f"{image.height}x{image.width}; scale one to the other, label maps by nearest neighbour",
            )
        labels = self.found.table[values]
        outside = (labels >= len(self.classes)) & (labels != IGNORE)
        if outside.any():
            raise BadLabelMap(
                where.name,
                f"holds the value {values[outside].max()}, but there are {len(self.classes)} classes, "
                f"{self.classes[0]} to {self.classes[-1]}; add its class, or make it {IGNORE} to have it ignored",
            )
        return Item(image=image, name=place.name, label_map=labels)


def open_source(
    spec: str, split: str = "train", *, target: str = "class", classes: list[str] | None = None, size: int = 64,
    num_images: int | None = None, seed: int = 0, holdout: float = 0.0,
) -> Source:  # fmt: skip
    """The images that `spec` names: a path or `scenes`.

    `split`: train, val (or validation; for classes the test set, where there is none) or test.
    `target`: "class" for images with a class each, "label_map" for a class for every pixel (a path or `scenes`).
    `classes` fixes which label is which class: pass the training set's when opening the validation set. Where nothing
    on disk names the classes of label maps, they are counted in those of the training split, each read once.
    `holdout`: of class folders without a validation set, the share of each class that is held out as one.
    `size`, `num_images` and `seed` say what `scenes` draws.
    """
    if spec == "scenes":
        return open_scenes(split, classes, target=target, size=size, num_images=num_images, seed=seed)
    if target == "label_map":
        return open_label_maps(spec, split, classes)
    listing = list_split(Path(spec).expanduser(), split, holdout)
    wanted = listing.classes if classes is None else classes
    number = renumber(listing.classes, wanted, spec)
    return FileSource(listing.places, [number[label] for label in listing.labels], wanted)


def open_scenes(
    split: str, classes: list[str] | None, *, target: str, size: int, num_images: int | None, seed: int
) -> Source:
    name = next((name for name in DRAWN if split in split_names(name)), None)
    if name is None:
        raise ValueError(f"scenes has no split {split!r}; its splits are {', '.join(DRAWN)}")
    stream = seed + (list(DRAWN).index(name) << 20)  # no image is drawn in two splits
    source = Scenes(DRAWN[name] if num_images is None else num_images, size, stream, target)
    check_names("scenes", source.classes, classes)
    return source


def open_label_maps(spec: str, split: str, classes: list[str] | None) -> LabelMapSource:
    path = Path(spec).expanduser()
    found = list_label_maps(path, split)
    if found.classes is not None:
        check_names(spec, found.classes, classes)
    names = found.classes or classes
    if names is None:
        names = count_classes(counted_label_maps(path, split, found), path)
    if len(names) > IGNORE:
        raise ValueError(
            f"{spec} has {len(names)} classes, but a label is a byte and {IGNORE} means ignored, "
            f"so there may be {IGNORE}; join some classes"
        )
    return LabelMapSource(found, names)


def count_classes(label_maps: list[Place], path: Path) -> list[str]:
    """Numbers for names, up to the highest value in the label maps."""
    with ThreadPoolExecutor() as pool:
        highest = max(pool.map(highest_label, label_maps))
    if highest < 0:
        raise ValueError(f"no label map of {path} has a label other than {IGNORE}, which is ignored; label some pixels")
    if highest + 1 == len(VOC_CLASSES) and path.name.lower().startswith("voc"):
        return list(VOC_CLASSES)
    return [str(label) for label in range(highest + 1)]


def highest_label(place: Place) -> int:
    """-1 where there is none, or where the label map is bad: that is an error when its image is read."""
    try:
        values = decode_label_map(read_bytes(place), place.name)
    except BadImage:
        return -1
    return int(values.max(where=values != IGNORE, initial=0)) if (values != IGNORE).any() else -1


def renumber(found: list[str], wanted: list[str], spec: str) -> list[int]:
    """The label in `wanted` of every class found, so that two splits agree on what a label means."""
    number = {name: label for label, name in enumerate(wanted)}
    if foreign := [name for name in found if name not in number]:
        raise ValueError(
            f"{spec} has {len(found)} classes, among them {', '.join(foreign[:5])}, which the {len(wanted)} classes "
            f"asked for (those of the training set or of the model) do not have; remove or rename these folders"
        )
    return [number[name] for name in found]


def check_names(spec: str, found: list[str], wanted: list[str] | None) -> None:
    """Raise ValueError unless the classes that a set itself names are those wanted."""
    if wanted not in (None, found):
        raise ValueError(
            f"{spec} has {len(found)} classes, {', '.join(found[:3])} and so on, but {len(wanted or [])} were asked "
            f"for, {', '.join((wanted or [])[:3])} and so on; leave out classes=, or open the set they belong to"
        )


def check_classes(source: Source, num_classes: int) -> None:
    """Raise ValueError unless a head fits the labels."""
    if len(source.classes) != num_classes:
        raise ValueError(
            f"the images have {len(source.classes)} classes, but the model's head has {num_classes}; "
            f"build the model with num_classes={len(source.classes)}"
        )
