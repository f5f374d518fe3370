"""Sources give the same images and labels whatever they are packed in, or say what is wrong."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from pictures import CLASSES, encoded, picture, write_folders, write_tar

from msvit_lab.data import open_source


def pixels(source) -> dict[tuple[str, str], np.ndarray]:
    """Every image under its class and its own number."""
    items = [source[i] for i in range(len(source))]
    return {(source.classes[item.label], Path(item.name).stem): np.asarray(item.image) for item in items}


def packed(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.*"))}


@pytest.fixture
def folder(tmp_path):
    write_folders(tmp_path / "set" / "train")
    write_folders(tmp_path / "set" / "validation", each=1)
    return tmp_path / "set"


def test_class_folders_are_read_with_jpg_png_and_webp(folder):
    train, val = open_source(str(folder), "train"), open_source(str(folder), "val")
    assert (len(train), len(val)) == (12, 4)
    assert train.classes == val.classes == CLASSES
    image = train[0].image
    assert (image.mode, image.size) == ("RGB", (28, 20))
    assert [train[i].label for i in range(12)] == [CLASSES.index(Path(train[i].name).parent.name) for i in range(12)]


@pytest.mark.parametrize("layout", ["one tar", "folder of tars", "tar a class", "tar of tars", "tar beside"])
def test_tars_hold_what_the_folders_held(folder, layout):
    files = packed(folder / "train")
    root = folder.parent / "packed"
    by_class = {name: packed(folder / "train" / name) for name in CLASSES}
    spec, split = root, "train"
    if layout == "one tar":
        spec, split = write_tar(root / "train.tar", files), "train"
    elif layout == "folder of tars":
        for part in (0, 1):
            write_tar(root / "train" / f"{part}.tar", dict(list(files.items())[part::2]))
    elif layout == "tar a class":
        split = "training"
        for name, inside in by_class.items():
            write_tar(root / "train" / f"{name}.tar", inside)
    elif layout == "tar of tars":
        outer = {f"{name}.tar": write_tar(root / "x.tar", inside).read_bytes() for name, inside in by_class.items()}
        spec = write_tar(root / "outer" / "train.tar", outer)
    else:
        write_tar(root / "train.tar", files)
    want, got = pixels(open_source(str(folder), "train")), pixels(source := open_source(str(spec), split))
    assert source.classes == CLASSES
    assert want.keys() == got.keys()
    assert all(np.array_equal(want[key], got[key]) for key in want)


def test_the_training_set_says_what_a_label_means(tmp_path):
    write_folders(tmp_path / "train", ["ant", "bee", "cow"])
    write_folders(tmp_path / "val", ["ant", "cow"])
    train = open_source(str(tmp_path), "train")
    val = open_source(str(tmp_path), "val", classes=train.classes)
    assert val.classes == train.classes
    assert {val[i].label for i in range(len(val))} == {0, 2}
    with pytest.raises(ValueError, match=r"has 3 classes, among them bee, which the 2 .* do not have"):
        open_source(str(tmp_path), "train", classes=["ant", "cow"])


def test_a_path_may_be_the_split_itself_but_never_by_accident(folder):
    assert len(open_source(str(folder / "validation"), "val")) == 4
    for spec in (folder / "train", write_tar(folder / "any.tar", packed(folder / "train"))):
        with pytest.raises(ValueError, match=rf"{spec.name} has no split 'val'; splits found: none"):
            open_source(str(spec), "val")


def test_what_holds_no_images_is_an_error_with_the_remedy(folder, tmp_path):
    png = encoded(picture(0), "png")
    (folder / "empty/test").mkdir(parents=True)
    for name, data in (
        ("set/text/test/notes.txt", b"hello"), ("set/flat/test/a.png", png), ("torn/val.tar", b"no tar at all" * 100),
        ("zip/val.zip", b""),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(data)
    write_tar(tmp_path / "flat/val.tar", {"./a.png": png})
    write_tar(tmp_path / "empty/val.tar", {})
    for spec, split, sentence in (
        (tmp_path / "nowhere", "train", "nowhere does not exist; give a folder with train/CLASS"),
        (folder, "test", "has no split 'test'; splits found: train, validation"),
        (folder / "empty", "test", "test is empty: 0 files; put images"),
        (folder / "text", "test", r"1 files but no image with a known ending: found \.txt, known are .*\.webp"),
        (folder / "flat", "test", r"images lie directly in .*test, but .* label is the name of its folder"),
        (tmp_path / "torn", "val", r"val\.tar cannot be read as a tar"),
        (tmp_path / "flat", "val", "images lie directly in"),
        (tmp_path / "zip/val.zip", "val", r"is a \.zip file, but only \.tar is read"),
        (tmp_path / "empty", "val", r"val\.tar is empty"),
    ):
        with pytest.raises(ValueError, match=sentence):
            open_source(str(spec), split)


def test_the_test_set_validates_where_there_is_no_other(tmp_path):
    for split, each in (("train", 3), ("test", 2)):
        write_folders(tmp_path / split, ["ant", "bee"][:each])
    assert "/test/" in open_source(str(tmp_path), "val")[0].name
    write_folders(tmp_path / "valid", ["ant", "bee"])
    assert "/valid/" in open_source(str(tmp_path), "val")[0].name
    with pytest.raises(ValueError, match="has no split 'val'"):  # its own name is not that of a validation set
        open_source(str(tmp_path / "test"), "val")


def names(path: Path, split: str, share: float = 0.2) -> list[str]:
    """The images of a split, by class and stem."""
    return ["/".join(Path(p.name).parts[-2:]) for p in open_source(str(path), split, holdout=share).places]


@pytest.mark.parametrize("inside", [".", "train"])
def test_a_share_of_each_class_is_held_out_and_nothing_is_in_both(tmp_path, inside):
    write_folders(tmp_path / inside, ["ant", "bee"], each=10)
    write_folders(tmp_path / inside, ["cat"], each=2)
    train, val = names(tmp_path, "train"), names(tmp_path, "val")
    assert not set(train) & set(val)
    assert [sum(name.startswith(kind) for name in val) for kind in ("ant", "bee", "cat")] == [2, 2, 1]
    assert len(train) == 22 - 5
    (tmp_path / inside / "bee/0.reduced.png").write_bytes(encoded(picture(0), "png"))
    assert (train, val) == (names(tmp_path, "train"), names(tmp_path, "val")), "without pictures of msvit viz"
    for split in ("train", "val"):
        assert open_source(str(tmp_path), split, holdout=0.2).classes == ["ant", "bee", "cat"]
    (tmp_path / inside / "cat/1.png").unlink()
    with pytest.raises(ValueError, match="has one image of cat, but needs two of each class"):
        names(tmp_path, "train")


def test_the_images_held_out_are_the_same_wherever_the_folder_lies_and_whatever_lies_beside(tmp_path: Path) -> None:
    first = write_folders(tmp_path / "first", ["ant", "bee"], each=10)
    val = names(first, "val")
    assert val == names(first, "val")
    second = tmp_path / "elsewhere/second"
    shutil.copytree(first, second)
    write_folders(second, ["cat"], each=4)
    assert [name for name in names(second, "val") if not name.startswith("cat")] == val
    write_tar(tmp_path / "tarred/train.tar", packed(first))
    assert sorted(names(tmp_path / "tarred", "val")) == sorted(val)


def test_sets_with_a_validation_split_and_without_a_holdout_are_as_they_were(tmp_path: Path) -> None:
    write_folders(tmp_path / "whole/train", ["ant", "bee"], each=5)
    write_folders(tmp_path / "whole/val", ["ant", "bee"], each=3)
    assert (len(names(tmp_path / "whole", "train")), len(names(tmp_path / "whole", "val"))) == (10, 6)
    assert len(names(tmp_path / "whole/val", "val")) == 6, "a validation set itself, given alone"
    shutil.rmtree(tmp_path / "whole/val")
    with pytest.raises(ValueError, match="has no split 'val'"):
        names(tmp_path / "whole", "val", 0.0)
    assert len(names(tmp_path / "whole", "train", 0.0)) == 10
