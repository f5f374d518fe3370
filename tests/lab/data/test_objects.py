"""Masks beside the images: found by name, fitted to the image, and answered where they are not there."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from smoke_runs import smoke, write_images

from msvit.lab.data import BadImage, open_source
from msvit.lab.data.sources import ObjectSource, read_masks
from msvit.lab.evaluate import evaluate_run
from msvit.lab.training.loop import train


def mask(width: int = 18, height: int = 20) -> bytes:
    """Half the size of the images of `write_images`; the left half is the object, the last column its border."""
    pixels = np.full((height, width), 2, np.uint8)
    pixels[:, : width // 2], pixels[:, -1] = 1, 3
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "png")
    return data.getvalue()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        write_images(tmp_path / "set" / split)
    return tmp_path / "set"


def write_masks(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(f"./{name}.png")
            member.size = len(mask())
            tar.addfile(member, io.BytesIO(mask()))
    return path


def test_a_mask_is_found_by_name_and_has_the_size_of_its_image(images, tmp_path):
    write_masks(tmp_path / "val.tar.gz", [str(i) for i in range(4)])
    folder = tmp_path / "masks/val/ant"
    folder.mkdir(parents=True)
    for i in range(4):
        (folder / f"{i}.png").write_bytes(mask())
    for pattern in ("{split}.tar.gz", "masks/{split}"):
        source = ObjectSource(open_source(str(images), "val"), read_masks(f"{tmp_path}/{pattern}", "val"))
        item = source[0]
        assert item.object_mask.shape == (40, 36)
        assert item.object_mask[:, :18].all()
        assert not item.object_mask[:, 18:].any()
    with pytest.raises(BadImage, match="it has no mask of its object"):
        source[len(source) - 1]  # no folder of masks for its class


def test_the_evaluation_tells_what_is_fine_on_objects(images, tmp_path):
    masks = write_masks(tmp_path / "val.tar.gz", [str(i) for i in range(4)])
    own = {"data__source": images, "data__img_size": 64, "optim__batch_size": 6, "data__cache": "true"}
    run = train(smoke(**own, model__gate="disc", model__share=0.3), tmp_path / "run", quiet=True)
    assert evaluate_run(run, rounds=0)["fine_on_object"] is None
    found = evaluate_run(run, rounds=0, objects=str(masks).replace("val", "{split}"))
    fine = torch.tensor(found["mask_mean"])  # every image has the same mask and the same object: the left half
    assert found["fine_on_object"] == pytest.approx(fine[:, :2].mean().item())
    assert found["fine_on_ground"] == pytest.approx(fine[:, 3].mean().item())  # the third column has a trace of it
    assert fine[:, :2].mean() > 0.1


def test_masks_that_are_not_there_are_answered(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.tar").write_bytes(b"no tar")
    for name, words in (("none", "no masks at"), ("empty", "holds no PNG"), ("torn.tar", "cannot be read as a tar")):
        with pytest.raises(ValueError, match=words):
            read_masks(str(tmp_path / name), "val")
