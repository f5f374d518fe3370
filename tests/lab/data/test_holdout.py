"""Class folders without a validation set: a share of each class is held out, always the same."""

import shutil
from pathlib import Path

import pytest
from pictures import write_folders, write_tar

from msvit_lab.data import open_source

SHARE = 0.2


def names(path: Path, split: str, share: float = SHARE) -> list[str]:
    """The images of a split, by class and stem."""
    return ["/".join(Path(p.name).parts[-2:]) for p in open_source(str(path), split, holdout=share).places]


@pytest.mark.parametrize("inside", [".", "train"])
def test_a_share_of_each_class_is_held_out_and_nothing_is_in_both(tmp_path: Path, inside: str) -> None:
    write_folders(tmp_path / inside, ["ant", "bee"], each=10)
    write_folders(tmp_path / inside, ["cat"], each=2)
    train, val = names(tmp_path, "train"), names(tmp_path, "val")
    assert [sum(name.startswith(kind) for name in val) for kind in ("ant", "bee", "cat")] == [2, 2, 1]
    assert len(train) == 22 - 5
    assert not set(train) & set(val)
    for split in ("train", "val"):
        assert open_source(str(tmp_path), split, holdout=SHARE).classes == ["ant", "bee", "cat"]


def test_the_images_held_out_are_the_same_wherever_the_folder_lies_and_whatever_lies_beside(tmp_path: Path) -> None:
    first = write_folders(tmp_path / "first", ["ant", "bee"], each=10)
    val = names(first, "val")
    assert val == names(first, "val")
    second = tmp_path / "elsewhere/second"
    shutil.copytree(first, second)
    write_folders(second, ["cat"], each=4)
    assert [name for name in names(second, "val") if not name.startswith("cat")] == val
    files = {str(file.relative_to(first)): file.read_bytes() for file in sorted(first.rglob("*.*"))}
    write_tar(tmp_path / "tarred/train.tar", files)
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


def test_one_image_of_a_class_cannot_be_in_both(tmp_path: Path) -> None:
    write_folders(tmp_path, ["ant", "bee"], each=3)
    write_folders(tmp_path, ["cat"], each=1)
    with pytest.raises(ValueError, match="has one image of cat, but needs two of each class"):
        names(tmp_path, "train")
