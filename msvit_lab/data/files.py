"""Where images lie: class folders and tars become one list of places in files.

    listing = list_images(find_split(Path("pets"), "val"))   # pets/val/CLASS/*.jpg or pets/val/*.tar
    listing = list_split(Path("photos"), "val", holdout=0.1) # photos/CLASS/*.jpg: every tenth, chosen by its path
    read_bytes(listing.places[0]), listing.labels[0], listing.classes

A class is named by the last folder, or by the tar where there is none, and classes are numbered in the order of
`sorted(names)`. A tar is read by position, never through a shared handle, so any number of workers may read it at once.
"""

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from msvit.image_files import DRAWN, read_plain, walk
from msvit_lab.data.opening import BadImage

SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
SPLIT_NAMES = {name for names in SPLITS.values() for name in names}
MAX_HEADER = 1 << 20  # bytes of one header in a tar
MAX_NESTED = 4  # tars in each other


class Place(NamedTuple):
    """The bytes of one image: a file, or a stretch of a tar."""

    path: str
    offset: int
    num_bytes: int  # -1: to the end of the file
    name: str  # for messages


@dataclass(frozen=True)
class Listing:
    """Images in a fixed order, and what their labels mean."""

    places: list[Place]
    labels: list[int]
    classes: list[str]


def read_bytes(place: Place) -> bytes:
    """Raise BadImage for what is no plain file, or too large for one image."""
    try:
        return read_plain(place.path, place.offset, place.num_bytes)
    except (OSError, ValueError) as error:
        raise BadImage(place.name, str(error)) from error


def split_names(split: str) -> tuple[str, ...]:
    """What a split may be called on disk: the name itself first."""
    group = next((names for names in SPLITS.values() if split in names), ())
    return (split, *(name for name in group if name != split))


def split_names_on_disk(split: str) -> tuple[str, ...]:
    """The same and, in the absence of a validation set, the test set."""
    return split_names(split) + (SPLITS["test"] if split in SPLITS["val"] else ())


def find_split(path: Path, split: str) -> Path:
    """The folder or tar of a split: PATH/val, PATH/val.tar, or PATH itself where that is its name."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a folder with {split}/CLASS/*.jpg or {split}/*.tar, or a tar")
    if (there := split_below(path, split)) is not None:
        return there
    if path.stem in split_names(split):
        return path
    inside = path.iterdir() if path.is_dir() else ()
    found = [p.stem for p in inside if p.stem in SPLIT_NAMES and (p.is_dir() or p.suffix == ".tar")]
    raise ValueError(
        f"{path} has no split {split!r}; splits found: {', '.join(sorted(found)) or 'none'}. Make the folder "
        f"{path / split} with a folder of images for each class"
    )


def split_below(path: Path, split: str) -> Path | None:
    """The folder or tar of this split in a folder, if there is one; for val the test set counts."""
    places = (place for name in split_names_on_disk(split) for place in (path / name, path / f"{name}.tar"))
    return next((place for place in places if place.exists()), None)


def splits_itself(path: Path) -> bool:
    """Whether images have no validation set on disk, so that some may be held out of the training images."""
    return path.exists() and split_below(path, "val") is None and path.stem not in split_names_on_disk("val")


def list_split(path: Path, split: str, holdout: float = 0.0) -> Listing:
    """The images of a split. `holdout`: where there is no validation set, the share of the training images, or of all
    where there is no training set either, that are held out for one."""
    wanted = next((name for name in ("train", "val") if split in SPLITS[name]), None)
    if not holdout or wanted is None or not splits_itself(path):
        return list_images(find_split(path, split))
    root = split_below(path, "train") or path
    return hold_out(list_images(root), root, holdout, validation=wanted == "val")


def hold_out(listing: Listing, root: Path, share: float, validation: bool) -> Listing:
    """The images that are held out (`validation`), or all others: `share` of each class, at least one.

    They are those whose paths below `root` have the lowest hashes: the same ones wherever the folder lies and in
    whatever order its files are listed.
    """
    members: dict[int, list[int]] = {label: [] for label in range(len(listing.classes))}
    for index, label in enumerate(listing.labels):
        members[label].append(index)
    if small := [listing.classes[label] for label, images in members.items() if len(images) < 2]:
        raise ValueError(
            f"{root} has one image of {', '.join(small[:5])}, but needs two of each class, one to train and one to "
            f"validate, as there is no validation set; add images, or remove the class"
        )

    def digest(index: int) -> bytes:
        below = os.path.relpath(listing.places[index].name, root).replace(os.sep, "/")
        return hashlib.sha256(below.encode("utf-8", "surrogateescape")).digest()

    held: set[int] = set()
    for images in members.values():
        held.update(sorted(images, key=digest)[: max(1, min(round(share * len(images)), len(images) - 1))])
    kept = [index for index in range(len(listing.places)) if (index in held) == validation]
    return Listing([listing.places[i] for i in kept], [listing.labels[i] for i in kept], listing.classes)


def image_endings() -> tuple[str, ...]:
    """timm's list of known endings, with .webp."""
    from timm.data import add_img_extensions, get_img_extensions

    if ".webp" not in get_img_extensions():
        add_img_extensions(".webp")
    return get_img_extensions()


def only_images(places: Iterable[Place]) -> list[Place]:
    endings = image_endings()
    return [place for place in places if os.path.splitext(place.name)[1].lower() in endings]


def only_photographs(places: Iterable[Place]) -> list[Place]:
    """Images that are not pictures of msvit viz beside them."""
    return [place for place in only_images(places) if not place.name.endswith(DRAWN)]


def no_images(path: Path, names: Iterable[str]) -> ValueError:
    """The error for a place without images."""
    names = list(names)
    known = ", ".join(image_endings())
    if not names:
        return ValueError(f"{path} is empty: 0 files; put images ({known}) in folders named after their classes")
    seen = ", ".join(sorted({Path(name).suffix or "no ending" for name in names})[:8])
    return ValueError(
        f"{path} has {len(names)} files but no image with a known ending: found {seen}, known are {known}; "
        f"convert them, or register the ending with timm.data.add_img_extensions"
    )


def list_images(path: Path) -> Listing:
    """Class folders, a tar with class folders, or a folder of such tars. The order of classes is Python's, not timm's:
    upper case first."""
    from timm.utils.misc import natural_key

    if path.is_file() and path.suffix != ".tar":
        raise ValueError(f"{path} is a {path.suffix or 'plain'} file, but only .tar is read; unpack or repack it")
    tars = [path] if path.is_file() else sorted(path.glob("*.tar"))
    files = [] if tars else sorted(walk(path), key=natural_key)
    listed = [member for tar in tars for member in scan(tar)] or [Place(file, 0, -1, file) for file in files]
    places = only_photographs(listed)
    if not places:
        raise no_images(path, (place.name for place in listed if not place.name.endswith(DRAWN)))
    names = []
    for place in places:
        folder = os.path.normpath(os.path.dirname(place.name))
        if folder == os.path.normpath(path):
            raise ValueError(
                f"images lie directly in {path}, but an image's label is the name of its folder; "
                f"move them to {path}/CLASS/, one folder for each class"
            )
        names.append(Path(folder).stem if folder == os.path.normpath(place.path) else os.path.basename(folder))
    classes = sorted(set(names))
    number = {name: label for label, name in enumerate(classes)}
    return Listing(places, [number[name] for name in names], classes)


def places_in(files: Iterable[Path]) -> list[Place]:
    """These files, in the place of a tar all that is in it."""
    found = (scan(file) if file.suffix == ".tar" else [Place(str(file), 0, -1, str(file))] for file in files)
    return [place for places in found for place in places]


def scan(tar: Path) -> list[Place]:
    """Every file in a tar, those in tars inside it too, without reading their contents."""
    try:
        if not tar.is_file():
            raise tarfile.ReadError("it is no plain file")
        with open(tar, "rb") as file:
            return [
                Place(str(tar), offset, num_bytes, f"{tar}/{name}")
                for name, offset, num_bytes in members(Headers(file), "", 0)
            ]
    except (OSError, tarfile.TarError) as error:
        raise ValueError(f"{tar} cannot be read as a tar ({error}); copy or pack it again") from error


class Headers:
    """A file of which only headers are read: one that would have gigabytes is damaged or means harm."""

    def __init__(self, file: BufferedReader) -> None:
        self.file, self.seek, self.tell, self.seekable = file, file.seek, file.tell, file.seekable

    def read(self, num: int = -1) -> bytes:
        if not 0 <= num <= MAX_HEADER:
            raise tarfile.ReadError(f"a header of {num} bytes, but {MAX_HEADER} are read at most")
        return self.file.read(num)


def members(file: Any, folder: str, start: int, depth: int = 0) -> Iterator[tuple[str, int, int]]:
    """Name, offset and length of every file in a tar."""
    if depth > MAX_NESTED:
        raise tarfile.ReadError(f"more than {MAX_NESTED} tars lie in each other")
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if member.issparse():
                raise tarfile.ReadError(f"{folder}{member.name} is sparse; pack it without --sparse")
            inside = tar.extractfile(member) if member.isfile() and member.name.endswith(".tar") else None
            if isinstance(inside, BufferedReader):
                name = f"{folder}{member.name[:-4]}/"
                yield from members(Headers(inside), name, start + member.offset_data, depth + 1)
            elif member.isfile():
                yield f"{folder}{member.name}", start + member.offset_data, member.size
