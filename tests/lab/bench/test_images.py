"""Images that are timed are different ones, whatever the folder holds."""

import shutil
import tarfile

import pytest
import torch
from smoke_runs import write_images

from msvit_lab.bench.images import Pictures, batches, list_places


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


def test_no_two_images_are_equal_and_a_batch_has_as_many_as_it_says(folder):
    pictures = Pictures(folder)
    few = pictures.squares(size=16, wanted=2, least=1)
    assert len(few) == 2
    squares = pictures.squares(size=16, wanted=100, least=1)
    assert squares.shape == (7, 3, 16, 16)
    assert len(squares.flatten(1).unique(dim=0)) == 7
    assert torch.equal(squares[:2], few)
    assert (pictures.num_bad, pictures.name) == (1, f"{folder.parent.name}/photos")
    assert pictures.squares(size=32, wanted=3, least=1).shape == (3, 3, 32, 32)
    assert [part.tolist() for part in batches(torch.arange(7), 3)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="7 different images, but a batch of 8 needs as many"):
        pictures.squares(size=16, wanted=32, least=8)


@pytest.mark.parametrize(
    ("images", "others"),
    [
        (("images/a.webp", "images/b.webp"), ("labels/a.png", "labels/b.png")),
        (("images/a.jpg", "mylabels/a.jpg"), ("annotations/trimaps/a.png",)),
        (("val/ADE_1.jpg", "val/other_seg.png"), ("val/ADE_1_seg.png",)),
        (("images/val/a.jpg",), ("annotations/val/a.png",)),
        (("JPEGImages/a.jpg", "JPEGImages/b.jpg"), ("SegmentationClass/a.png", "SegmentationObject/a.png")),
        (("leftImg8bit/val/x/0_leftImg8bit.png",), ("gtFine/val/x/0_gtFine_labelIds.png", "gtFine/val/x/0_color.png")),
        (("a.jpg", "b.png", "c/a.png", "c/b.JPEG"), ("a.png", "c/b.PNG")),
        (("labels/a.png", "labels/b.jpg", "images.jpg", "classes/labels/0.png"), ("labels/b.png",)),
    ],
    ids=["plain", "pets", "ade20k in full", "ade20k", "voc", "cityscapes", "side by side", "without images beside"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
def test_label_maps_are_no_images(tmp_path, images, others, packed):
    root = tmp_path / "set"
    for name in (*images, *others):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    if packed:
        with tarfile.open(tmp_path / "set.tar", "w") as tar:
            tar.add(root, arcname=".")
    found = list_places(tmp_path / "set.tar" if packed else root)
    below = "set.tar/./" if packed else "set/"
    assert sorted(place.name.split(below)[1] for place in found) == sorted(images)


def test_without_a_folder_scenes_are_drawn_and_one_without_images_is_an_error(tmp_path):
    pictures = Pictures()
    assert pictures.name == "scenes"
    assert len(pictures.squares(size=32, wanted=6, least=6).flatten(1).unique(dim=0)) == 6
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="no image with a known ending"):
        Pictures(tmp_path)
