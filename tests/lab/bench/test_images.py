"""Images that are timed are different ones, whatever the folder looks like."""

import shutil
import tarfile

import pytest
import torch
from smoke_runs import write_images

from msvit.lab.bench.images import Pictures, in_sets, normalise


@pytest.fixture
def folder(tmp_path):
    """Seven different images: four in folders, three in a tar; three copies, a torn file and a text besides."""
    photos = write_images(tmp_path / "photos", ("ant", "bee"), each=2)
    with tarfile.open(photos / "more.tar", "w") as tar:
        tar.add(write_images(tmp_path / "packed", ("cat",), each=3), arcname="inside")
    for copy in range(3):
        shutil.copy(photos / "ant/0.png", photos / f"copy{copy}.png")
    (photos / "torn.png").write_bytes((photos / "ant/0.png").read_bytes()[:50])
    (photos / "notes.txt").write_text("no image")
    return photos


def test_no_two_images_are_equal(folder):
    pictures = Pictures(folder)
    squares = pictures.squares(size=16, wanted=100, least=1)
    assert squares.shape == (7, 3, 16, 16)
    assert len(squares.flatten(1).unique(dim=0)) == 7
    assert pictures.num_bad == 1
    assert pictures.name == f"{folder.parent.name}/photos"


def test_fewer_images_than_a_batch_are_refused(folder):
    with pytest.raises(ValueError, match="7 different images, but a batch of 8 needs as many"):
        Pictures(folder).squares(size=16, wanted=32, least=8)


def test_more_images_are_read_when_more_are_wanted_and_the_first_stay(folder):
    pictures = Pictures(folder)
    few = pictures.squares(size=16, wanted=2, least=1)
    assert len(few) == 2
    assert torch.equal(pictures.squares(size=16, wanted=5, least=1)[:2], few)
    assert pictures.squares(size=32, wanted=3, least=1).shape == (3, 3, 32, 32)


def test_what_holds_no_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist; give --images"):
        Pictures(tmp_path / "nothing")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="no image with a known ending"):
        Pictures(tmp_path)


def test_without_a_folder_scenes_are_drawn():
    pictures = Pictures()
    assert pictures.name == "scenes"
    assert len(pictures.squares(size=32, wanted=6, least=6).flatten(1).unique(dim=0)) == 6


def test_sets_are_whole_batches_of_other_images():
    images = torch.arange(7.0).view(7, 1, 1, 1)
    assert [part.flatten().tolist() for part in in_sets(images, 3)] == [[0, 1, 2], [3, 4, 5]]
    grey = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1)
    assert normalise(grey, (0.5,) * 3, (0.25,) * 3)[:, 0, 0, 0].tolist() == [-2, 2]
