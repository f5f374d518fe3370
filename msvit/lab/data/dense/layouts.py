"""Layouts: which label map belongs to which image, for segmentation sets as they are published or packed.

    layout = find_layout(Path("VOCdevkit/VOC2012"), "val")
    layout.pairs[0].image, layout.pairs[0].label_map     # places in files
    layout.classes                                       # names, or None where nothing on disk gives them
    layout.table[7]                                      # the label that the value 7 on disk stands for

What is on disk says which layout it is; `KNOWN` lists them.
"""

from pathlib import Path

from msvit.lab.data.dense.pairs import Pair, pair_folders, pair_tars
from msvit.lab.data.dense.published import Layout, find_published, plain_table
from msvit.lab.data.files import ALL, split_names
from msvit.lab.data.opening import read_lines

KNOWN = (
    "ADE20K (images/training, annotations/training), Pascal VOC (JPEGImages, SegmentationClass, ImageSets), "
    "Cityscapes (leftImg8bit, gtFine), SPLIT/images with SPLIT/labels, images/SPLIT with labels/SPLIT, "
    "and SPLIT/*.tar or SPLIT.tar holding images/ and labels/"
)


def find_layout(path: Path, split: str) -> Layout:
    """The layout of a path, by what lies there."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a folder or a tar with images and label maps: {KNOWN}")
    published = find_published(path, split)
    if published is not None:
        return published
    pairs = find_pairs(path, split)
    if pairs is None:
        raise unknown(path, split)
    return Layout(pairs=pairs, classes=read_names(path if path.is_dir() else path.parent), table=plain_table())


def counted_pairs(path: Path, split: str, layout: Layout) -> list[Pair]:
    """The pairs in which classes without names are counted: the training split's, where there is one."""
    train = None if split in (ALL, *split_names("train")) else find_pairs(path, "train")
    return train or layout.pairs


def unknown(path: Path, split: str) -> ValueError:
    """The sentence for a split that is not there, or for folders that say nothing."""
    found = [child.name for child in path.iterdir()] if path.is_dir() else [path.name]
    inside = [child.name for child in (path / "labels").iterdir()] if (path / "labels").is_dir() else []
    if splits := sorted(name for name in {Path(name).stem for name in [*found, *inside]} if has_pairs(path, name)):
        return ValueError(
            f"{path} has no split {split!r}; splits found: {', '.join(splits)}. Name one of these, "
            f"or make {path / split / 'images'} and {path / split / 'labels'}"
        )
    return ValueError(
        f"{path} holds {', '.join(sorted(found)[:12]) or 'nothing'}, which is no known layout of images and label maps "
        f"for split {split!r}; known are {KNOWN}; rename or move the folders"
    )


def read_names(root: Path) -> list[str] | None:
    """The lines of classes.txt, where there is one."""
    file = root / "classes.txt"
    if not file.is_file():
        return None
    names = [line.strip() for line in read_lines(file) if line.strip()]
    if not names:
        raise ValueError(f"{file} is empty, but names the classes, one a line; write them, or delete the file")
    return names


def candidates(path: Path, split: str) -> list[tuple[Path, Path]]:
    """Where the folders of images and of label maps may lie."""
    if split == ALL:
        return [(path / "images", path / "labels")]
    here = [(path / "images", path / "labels")] if path.name in split_names(split) else []
    below = [(path / name / "images", path / name / "labels") for name in split_names(split)]
    return [*here, *below, *((path / "images" / name, path / "labels" / name) for name in split_names(split))]


def tars(path: Path, split: str) -> list[Path]:
    """The tars of a split, where it has any."""
    names = split_names(split)
    if path.is_file():
        return [path] if path.suffix == ".tar" and (split == ALL or path.stem in names) else []
    if split == ALL or path.name in names:
        return sorted(path.glob("*.tar"))
    files = [path / f"{name}.tar" for name in names if (path / f"{name}.tar").is_file()]
    return files[:1] or next((found for name in names if (found := sorted((path / name).glob("*.tar")))), [])


def has_pairs(path: Path, name: str) -> bool:
    """Whether a split of exactly this name lies there."""
    folders = [path / name / "labels", path / "labels" / name]
    return (path / f"{name}.tar").is_file() or any((path / name).glob("*.tar")) or any(map(Path.is_dir, folders))


def find_pairs(path: Path, split: str) -> list[Pair] | None:
    """The pairs of a folder or of tars; None where there is no such split."""
    if packed := tars(path, split):
        return pair_tars(packed)
    for images, labels in candidates(path, split):
        if images.is_dir() and labels.is_dir():
            return pair_folders(images, labels)
    return None
