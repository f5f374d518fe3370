"""msvit calibrate: a budget by a folder of images."""

import json
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
from msvit.budget import gate_targets
from msvit_lab.calibration import find_model
from msvit_lab.cli import app


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images in two class folders, and one that is none."""
    folder, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for index in range(12):
        path = folder / ("cat", "dog")[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        noise = draw.integers(0, 256, (64, 64, 3)) * np.linspace(0, 1, 64)[:, None]
        Image.fromarray(noise.astype(np.uint8)).save(path)
    (folder / "cat" / "cut.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of msvit.save with names of classes."""
    host = tiny_host(dtype=torch.float32, img_size=64, num_classes=2, depth=4, embed_dim=64)
    host.pretrained_cfg = timm.get_pretrained_cfg("vit_small_patch16_224").to_dict() | {"input_size": (3, 64, 64)}
    model = msvit.convert(host, gate="gradient").eval()
    model.classes = ["cat", "dog"]
    return msvit.save(model, tmp_path_factory.mktemp("saved") / "model")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)], terminal_width=300)


def test_another_gate_leaves_the_rest_of_a_model_as_it_was(saved: Path, tmp_path: Path) -> None:
    given = msvit.load(saved).with_options(proportional_attention=0.5, reducer=msvit.ToMe(r=1))
    model = find_model(str(msvit.save(given, tmp_path / "model")), gate="entropy")
    assert isinstance(model.gate, msvit.EntropyGate)
    assert (model.proportional_attention, model.reducer.r, model.classes) == (0.5, 1, ("cat", "dog"))


def test_a_model_with_the_budget_is_written_and_bad_images_are_counted(
    photos: Path, saved: Path, tmp_path: Path
) -> None:
    result = run(saved, "--images", photos, "--budget", 0.6, "--out", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert "12 images of 64 px" in result.stdout
    assert "images left out that could not be read: 1" in result.stdout
    assert "0.6, chosen" in result.stdout
    model, images = msvit.load(tmp_path / "model"), torch.zeros(2, 3, 64, 64)
    assert model.classes == ("cat", "dog")
    share = model.macs(images).double().mean().item() / model.backbone.dense_macs(model.grid(images))
    assert share == pytest.approx(0.6, abs=0.01)


@pytest.mark.filterwarnings("ignore:there are 4 images, too few to hold some back")
def test_the_gate_is_fitted_first_if_asked_and_the_choice_is_shown(
    photos: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NUM_MASKS", "NUM_GRADIENTS"):
        monkeypatch.setattr(gate_targets, name, 2)
    common = (saved, "--images", photos, "--num", 4, "--budget", 0.6, "--gate", "default")
    result = run(*common, "--fit-gate", "--steps", 1, "--out", tmp_path / "fitted")
    assert result.exit_code == 0, result.output
    tried = {line.split()[1]: line.split() for line in result.stdout.splitlines() if " +- " in line or "given" in line}
    assert {"given", "attention", "masks", "gradient"} <= {*tried}
    assert result.stdout.count(" kept ") >= 1
    assert "targets: 100%" in result.stderr
    weights, same = (msvit.load(folder).host.state_dict() for folder in (saved, tmp_path / "fitted"))
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    result = run(*common[:-1], "disc", "--fit-gate", "--out", tmp_path / "disc")
    assert result.exit_code != 0
    assert "has no weights to fit" in result.output


def test_other_budgets_are_shown_beside_the_chosen_one(photos: Path, saved: Path, tmp_path: Path) -> None:
    common = ("--images", photos, "--out", tmp_path / "model", "--json")
    result = run(saved, "--budget", 0.5, *common)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["images"], found["skipped"]) == (12, 1)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "chosen"]
    assert rows["chosen"] == rows["0.5"] | {"name": "chosen"}
    model = msvit.load(tmp_path / "model")
    dense = model.backbone.dense_macs(model.grid(torch.zeros(1, 3, 64, 64))) / 1e9
    assert rows["0.5"]["gmacs"] == pytest.approx(0.5 * dense, rel=0.02)


def test_a_run_is_calibrated_with_its_own_gate(trained: Path, tmp_path: Path, photos: Path) -> None:
    arguments = ("--images", photos, "--budget", 1.4, "--out", tmp_path / "model", "--json")  # its gate costs most
    result = run(trained / "gated", *arguments)
    assert result.exit_code == 0, result.output
    model = msvit.load(tmp_path / "model")
    assert isinstance(model.gate, msvit.LearnedGate)
    assert model.gate.curves[0].num_images == 12
    assert isinstance(msvit.set_budget(model, 0.7, "tokens"), msvit.MSViT)
