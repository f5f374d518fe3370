"""msvit eval of a saved model: the accuracy of its own predictions, beside its dense host's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from smoke_runs import done, files, refused, write_images
from tiny import tiny_model

import msvit
from msvit.gates import EntropyGate

CLASSES = ("ant", "bee", "cat", "dog", "eel")
PHOTOS = [Image.fromarray(p) for p in np.random.default_rng(0).integers(0, 256, (40, 20, 28, 3), np.uint8)]
PREPARE = msvit.Preprocessing(16, (0.5,) * 3, (0.25,) * 3, "bilinear", crop=0.7, crop_mode="squash")


@pytest.fixture
def model(tmp_path: Path) -> msvit.MSViT:
    model = tiny_model(dtype=torch.float32, gate=EntropyGate(coarse=8, share=0.3)).eval()
    with torch.no_grad():
        logits = model.host(torch.stack([PREPARE(photo) for photo in PHOTOS]))
        model.host.head.bias -= logits.mean(0)  # so that not all photos are of one class
    model.classes = CLASSES
    model.preprocessing = PREPARE
    msvit.save(model, tmp_path / "saved")
    return model


@pytest.mark.parametrize("names", [CLASSES, "01234", "vwxyz"], ids=["names", "numbers", "order"])
def test_the_accuracy_is_that_of_its_predictions(model, tmp_path, monkeypatch, names):
    """Of images in folders that the dense host would sort them into."""
    monkeypatch.chdir(tmp_path)
    dense = msvit.convert(model.host, 8, "all-fine")
    dense.classes, dense.preprocessing = CLASSES, PREPARE
    labels = [CLASSES.index(each.name) for each in dense.predict(PHOTOS)]
    assert set(labels) == set(range(5))
    for i, (image, label) in enumerate(zip(PHOTOS, labels, strict=True)):
        (folder := Path("photos/val") / names[label]).mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{i}.png")
    before = files(Path("saved"))
    found = json.loads(done("eval", "saved", "--data", "photos", "--json"))
    right = [each.name == CLASSES[label] for each, label in zip(model.predict(PHOTOS), labels, strict=True)]
    assert 0.2 < sum(right) / 40 < 1
    assert (found["top1"], found["dense_top1"]) == pytest.approx((sum(right) / 40, 1))
    msvit.save(model.bfloat16(), "half")
    shown = done("eval", "half", "--data", "photos")
    assert "top-1 of the dense host │ " in shown
    assert files(Path("saved")) == before, "nothing is written"


def test_what_it_needs(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos", ("ant", "yak"), each=1)
    write_images(tmp_path / "from-one", "12345", each=1)
    write_images(tmp_path / "unsplit/train", ("ant", "bee"), each=1)
    msvit.save(tiny_model(dtype=torch.float32, num_classes=0), tmp_path / "features")
    for line, sentence in (
        ("saved", "is a saved model, without images; give --data"),
        ("saved --data nowhere", "nowhere does not exist; give a folder with a folder of images for each class"),
        ("saved --data photos --size 32", "--size is 32, but"),
        ("saved --data photos", "has 2 classes, among them ant, yak, but the model has 5, such as ant, bee, cat"),
        ("saved --data from-one", "has 5 classes, among them 1, 2, 3, but the model has 5"),
        ("saved --data unsplit", "has no split 'val'; splits found: train"),
        ("features --data photos", "a model without a classifier"),
    ):
        assert sentence in refused("eval", *line.split())
