"""msvit distill: a folder for msvit.load, whatever happens on the way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from smoke_runs import call, command, done, refused

import msvit
from msvit.budget import distillation
from msvit_lab.interrupts import RESUME_CODE

STEPS = 6


def arguments(saved: Path, photos: Path, out: Path) -> list[object]:
    """Of a model and two folders of images, of which one cannot be read."""
    folders = [part for name in ("ant", "bee") for part in ("--images", photos / name)]
    sets = [part for text in ("lr=1e-4", "batch_size=4", "ema=0.5", "jitter=1") for part in ("--set", text)]
    options = ["--budget", 0.6, "--steps", STEPS, "--checkpoint-every", 2, "--out", out]
    return ["distill", saved, *folders, *options, *sets]


@pytest.fixture(scope="module")
def whole(saved: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "model"
    assert "divergence from the dense model" in done(*arguments(saved, photos, out))
    return out


def test_a_folder_for_load_is_written_and_nothing_else_is_left(saved: Path, photos: Path, whole: Path) -> None:
    model, given, image = msvit.load(whole), msvit.load(saved), torch.zeros(2, 3, 64, 64)
    assert not torch.equal(model.host.blocks[0].mlp.fc1.weight, given.host.blocks[0].mlp.fc1.weight)
    assert model.macs(image)[0] / model.backbone.dense_macs(model.grid(image)) == pytest.approx(0.6, abs=0.05)
    record = json.loads((whole / "distillation.json").read_text())["result"]
    assert record["steps"] == STEPS
    assert record["num_images"] + record["num_held_back"] == 9
    assert {path.name for path in whole.iterdir()} == {
        "model.safetensors", "msvit.json", "metrics.jsonl", "distillation.json"
    }  # fmt: skip
    done(*arguments(saved, photos, whole), "--resume")  # nothing is left to do


@pytest.mark.parametrize("end", ["killed", "signal"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(
    saved: Path, photos: Path, whole: Path, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, step = tmp_path / "model", distillation.Distiller.step
    given = arguments(saved, photos, out)

    def stop(self: Any, index: int, *args: Any) -> Any:
        if index == 4 and end == "killed":
            raise RuntimeError("killed")
        if index == 2 and end == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, index, *args)

    with monkeypatch.context() as patch:
        patch.setattr(distillation.Distiller, "step", stop)
        result = call(*given)
    assert result.exit_code == (RESUME_CODE if end == "signal" else 1), result.output
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        msvit.load(out)
    assert "go on with --resume" in refused(*given)
    assert "settings was" in refused(*given, "--resume", "--set", "seed=1")
    done(*given, "--resume")
    one, two = (load_file(folder / "model.safetensors") for folder in (whole, out))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_two_processes_distill_as_one(saved: Path, photos: Path, tmp_path: Path) -> None:
    options = ["--images", photos, "--budget", 0.6, "--steps", 4, "--set", "lr=1e-4", "--set", "batch_size=4"]
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
