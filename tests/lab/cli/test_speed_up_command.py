"""msvit speed-up: a faster model by a folder of images."""

from pathlib import Path

import pytest
import torch
from smoke_runs import call, done

import msvit

pytestmark = pytest.mark.filterwarnings("ignore:1 of 13 images were left out")


def test_three_lines_are_printed_and_the_model_is_written(photos: Path, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    result = call("speed-up", saved, "--images", photos, "--out", out, "--budget", 0.8)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [
        "same class as the dense model", "multiply-adds", "ms per image"
    ]  # fmt: skip
    assert lines[3] == f"written to {out}"
    assert "\n1 of 40 schedules: " in result.stderr, "from the start"
    model, image = msvit.load(out), torch.zeros(2, 3, 64, 64)
    assert type(model) is msvit.MSViT
    assert model.classes == ("cat", "dog")
    share = model.macs(image).double().mean().item() / model.backbone.dense_macs(model.grid(image))
    assert share == pytest.approx(0.8, abs=0.05)


def test_a_folder_of_save_pretrained_is_read_and_written_as_such(photos: Path, tmp_path: Path) -> None:
    tiny = pytest.importorskip("tiny_transformers")
    host = tiny.tiny_transformers("ViTForImageClassification", torch.float32, image_size=32, num_hidden_layers=4)
    msvit.convert(host.eval(), gate="gradient").save_pretrained(tmp_path / "given")
    done("speed-up", tmp_path / "given", "--images", photos, "--out", tmp_path / "model", "--budget", 0.8)
    model = msvit.load(tmp_path / "model")
    assert type(model).__name__ == "MSViTForImageClassification"
    assert (model.budget, model.speed_report.num_images) == ((0.8, "macs"), 3)
