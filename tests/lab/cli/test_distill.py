"""msvit distill: a folder for msvit.load, whatever happens on the way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from smoke_runs import command
from tiny import tiny_host
from typer.testing import CliRunner

import msvit
from msvit.budget import distillation
from msvit_lab.cli import app
from msvit_lab.interrupts import RESUME_CODE

STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A saved model, and two folders of images, of which one cannot be read."""
    host = tiny_host(dtype=torch.float32, img_size=32)
    for weight in (*host.blocks.parameters(), host.head.weight):
        weight.data *= 4  # so that what the patches hold changes the logits
    host.pretrained_cfg = timm.get_pretrained_cfg("vit_small_patch16_224").to_dict() | {"input_size": (3, 32, 32)}
    saved = msvit.save(msvit.convert(host, gate="gradient").eval(), tmp_path_factory.mktemp("saved") / "model")
    folders, draw = [tmp_path_factory.mktemp("photos") for _ in range(2)], np.random.default_rng(0)
    for index in range(13):
        pixels = draw.integers(0, 256, (4, 4, 3)).astype(np.uint8)
        Image.fromarray(pixels).resize((40, 40)).save(folders[index % 2] / f"{index}.png")
    (folders[0] / "cut.png").write_bytes(b"no image")
    return saved, folders


def run(inputs: tuple[Path, list[Path]], out: Path, *more: object) -> Any:
    saved, folders = inputs
    options = [part for folder in folders for part in ("--images", folder)]
    options += ["--budget", 0.6, "--steps", STEPS, "--checkpoint-every", 2, "--out", out]
    sets = [part for text in ("lr=1e-4", "batch_size=4", "ema=0.5", "jitter=1") for part in ("--set", text)]
    return CliRunner().invoke(app, ["distill", *map(str, [saved, *options, *sets, *more])], terminal_width=300)


@pytest.fixture(scope="module")
def whole(inputs: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "model"
    result = run(inputs, out)
    assert result.exit_code == 0, result.output
    assert "divergence from the dense model" in result.stdout
    return out


def test_a_folder_for_load_is_written_and_nothing_else_is_left(inputs: tuple[Path, list[Path]], whole: Path) -> None:
    model, given, image = msvit.load(whole), msvit.load(inputs[0]), torch.zeros(2, 3, 32, 32)
    assert not torch.equal(model.host.blocks[0].mlp.fc1.weight, given.host.blocks[0].mlp.fc1.weight)
    assert model.macs(image)[0] / model.backbone.dense_macs(model.grid(image)) == pytest.approx(0.6, abs=0.05)
    record = json.loads((whole / "distillation.json").read_text())["result"]
    assert record["steps"] == STEPS
    assert record["num_images"] + record["num_held_back"] == 14
    assert {path.name for path in whole.iterdir()} == {
        "model.safetensors", "msvit.json", "metrics.jsonl", "distillation.json"
    }  # fmt: skip
    assert run(inputs, whole, "--resume").exit_code == 0  # nothing is left to do


@pytest.mark.parametrize("end", ["killed", "signal"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(
    inputs: tuple[Path, list[Path]], whole: Path, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, step = tmp_path / "model", distillation.Distiller.step

    def stop(self: Any, index: int, *args: Any) -> Any:
        if index == 4 and end == "killed":
            raise RuntimeError("killed")
        if index == 2 and end == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, index, *args)

    with monkeypatch.context() as patch:
        patch.setattr(distillation.Distiller, "step", stop)
        result = run(inputs, out)
    assert result.exit_code == (RESUME_CODE if end == "signal" else 1), result.output
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        msvit.load(out)
    assert run(inputs, out).exit_code == 2  # without --resume
    other = run(inputs, out, "--resume", "--set", "seed=1")
    assert (other.exit_code, "settings was" in other.stderr) == (2, True)
    result = run(inputs, out, "--resume")
    assert result.exit_code == 0, result.output
    one, two = (load_file(folder / "model.safetensors") for folder in (whole, out))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_two_processes_distill_as_one(inputs: tuple[Path, list[Path]], tmp_path: Path) -> None:
    saved, folders = inputs
    options = ["--images", folders[0], "--budget", 0.6, "--steps", 4, "--set", "lr=1e-4", "--set", "batch_size=4"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    losses = []
    for name, before in (("one", []), ("two", launcher)):
        found = command("distill", saved, *options, "--set", "jitter=0", "--out", tmp_path / name)
        found["args"] = [sys.executable, "-m", *before, "msvit", *found["args"][3:]]
        done = subprocess.run(**found, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("written to") == 1
        losses += [json.loads((tmp_path / name / "metrics.jsonl").read_text())["divergence"]]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)  # distances of features are relative to those of a process


def test_a_folder_with_another_model_is_not_touched(inputs: tuple[Path, list[Path]]) -> None:
    before = (inputs[0] / "model.safetensors").read_bytes()
    assert run(inputs, inputs[0]).exit_code == 2
    assert (inputs[0] / "model.safetensors").read_bytes() == before
