"""Pairs: every image with its label map, or the name of the one that has none.

    pairs = pair_folders(Path("set/train/images"), Path("set/train/labels"))    # a/1.jpg with a/1.png
    pairs = pair_tars([Path("set/train/00.tar")])                               # images/1.webp with labels/1.png
    pairs[0].image, pairs[0].label_map                                          # places in files
"""

from pathlib import Path
from typing import NamedTuple

from msvit.lab.data.files import Place, image_endings, scan


class Pair(NamedTuple):
    """An image and its label map."""

    image: Place
    label_map: Place


def pair_folders(images: Path, labels: Path, suffixes: tuple[str, str] = ("", "")) -> list[Pair]:
    """Files of two folders with the same path and stem, whatever their endings.

    Only files whose stems end in the `suffixes` of images and label maps are taken, without these.
    """
    return match(*(list_side(folder, suffix) for folder, suffix in zip((images, labels), suffixes, strict=True)))


def list_side(folder: Path, suffix: str) -> dict[str, Place]:
    files = sorted(file for file in folder.rglob(f"*{suffix}.*") if file.suffix.lower() in image_endings())
    if not files:
        others = sum(file.is_file() for file in folder.rglob("*"))
        raise ValueError(
            f"{folder} has {others} files, but none{f' called *{suffix}' if suffix else ''} with a known ending "
            f"({', '.join(image_endings())}); put images or label maps there, or convert them"
        )
    side: dict[str, Place] = {}
    for file in files:
        key = str(file.relative_to(folder).with_suffix("")).removesuffix(suffix)
        add(side, key, Place(str(file), 0, -1, str(file)))
    return side


def add(side: dict[str, Place], key: str, place: Place) -> None:
    if key in side:
        raise ValueError(f"{side[key].name} and {place.name} differ in their endings only; remove one of them")
    side[key] = place


def pair_tars(packed: list[Path]) -> list[Pair]:
    """Members of a tar with the same path but for a folder called images or labels."""
    sides: dict[str, dict[str, Place]] = {"images": {}, "labels": {}}
    members = [member for tar in packed for member in scan(tar)]
    for member in members:
        name = Path(member.name)
        if name.suffix.lower() not in image_endings():
            continue
        parts = list(name.relative_to(member.path).with_suffix("").parts)
        side = next((part for part in parts[:-1] if part in sides), None)
        if side is not None:
            parts.remove(side)
            add(sides[side], "/".join([member.path, *parts]), member)
    if not sides["images"] and not sides["labels"]:
        raise no_pairs(packed[0].parent if len(packed) > 1 else packed[0], members)
    return match(sides["images"], sides["labels"])


def no_pairs(path: Path, members: list[Place]) -> ValueError:
    if not members:
        return ValueError(f"{path} is empty: 0 files; pack images/NAME.jpg and labels/NAME.png")
    return ValueError(
        f"{path} has {len(members)} files, the first {members[0].name}, but none in images/ or labels/; "
        f"pack images/NAME.jpg and labels/NAME.png"
    )


def match(images: dict[str, Place], labels: dict[str, Place]) -> list[Pair]:
    """Pairs in the order of the images; every file must have its partner."""
    for name, partner, ours, theirs in (
        ("image", "label map", images, labels),
        ("label map", "image", labels, images),
    ):
        if alone := [place for key, place in ours.items() if key not in theirs]:
            raise ValueError(
                f"{len(alone)} of {len(ours)} {name}s have no {partner} of the same name, the first is "
                f"{alone[0].name}; add its {partner}, or remove it"
            )
    return [Pair(image=place, label_map=labels[key]) for key, place in images.items()]
