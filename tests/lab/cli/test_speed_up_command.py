"""msvit speed-up: a faster model by a folder of images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tiny import tiny_host
from typer.testing import CliRunner

import msvit
from msvit_lab.cli import app


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for index in range(12):
        Image.fromarray(draw.integers(0, 256, (40, 40, 3), np.uint8)).save(folder / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of msvit.save with names of classes and a gate, which has no part in it."""
    host = tiny_host(dtype=torch.float32, img_size=32, num_classes=2, depth=4)
    host.pretrained_cfg = timm.get_pretrained_cfg("vit_small_patch16_224").to_dict() | {"input_size": (3, 32, 32)}
    model = msvit.convert(host, gate="gradient").eval()
    model.classes = ["cat", "dog"]
    return msvit.save(model, tmp_path_factory.mktemp("saved") / "model")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["speed-up", *map(str, arguments)], terminal_width=300)


def test_three_lines_are_printed_and_the_model_is_written(photos: Path, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    result = run(saved, "--images", photos, "--out", out, "--budget", 0.8)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [
        "same class as the dense model", "multiply-adds", "ms per image"
    ]  # fmt: skip
    assert lines[3] == f"written to {out}"
    assert "\n1 of 40 schedules: " in result.stderr, "from the start"
    model, image = msvit.load(out), torch.zeros(2, 3, 32, 32)
    assert type(model) is msvit.MSViT
    assert model.classes == ("cat", "dog")
    share = model.macs(image).double().mean().item() / model.backbone.dense_macs(model.grid(image))
    assert share == pytest.approx(0.8, abs=0.05)


def test_a_folder_of_save_pretrained_is_read_and_written_as_such(photos: Path, tmp_path: Path) -> None:
    tiny = pytest.importorskip("tiny_transformers")
    host = tiny.tiny_transformers("ViTForImageClassification", torch.float32, image_size=32, num_hidden_layers=4)
    msvit.convert(host.eval(), gate="gradient").save_pretrained(tmp_path / "given")
    result = run(tmp_path / "given", "--images", photos, "--out", tmp_path / "model", "--budget", 0.8)
    assert result.exit_code == 0, result.output
    model = msvit.load(tmp_path / "model")
    assert type(model).__name__ == "MSViTForImageClassification"
    assert (model.budget, model.speed_report.num_images) == ((0.8, "macs"), 3)


def test_mistakes_are_sentences(photos: Path, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    for arguments, message in (
        ((saved, "--images", tmp_path / "nowhere", "--out", out), "nowhere does not exist"),
        ((saved, "--images", photos, "--out", out, "--budget", 2), "budget is 2.0, but must be"),
        ((saved, "--images", photos, "--out", out, "--weights", "w.bin"), "has weights of its own"),
        (("no_such_model", "--images", photos, "--out", out), "no_such_model"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    assert not out.exists()
