"""msvit export: a run as a file."""

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

import msvit
from msvit_lab.cli import app


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)], terminal_width=200)
    return result.exit_code, result.output


def test_a_run_is_exported_with_its_classes(trained: Path, tmp_path: Path) -> None:
    code, output = call(trained / "gated", "--out", tmp_path / "model.pt2", "--batch", "dynamic", "--mode", "trimmed")
    assert code == 0, output
    assert "model.pt2: " in output
    extra = {"msvit.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    about, model = json.loads(extra["msvit.json"]), msvit.load(trained / "gated")
    assert about["msvit.classes"] == list(model.classes)
    side = model.preprocessing.size
    assert about["msvit.input_size"] == [3, side, side]
    image = torch.randn(3, 3, side, side)
    torch.testing.assert_close(program.module()(images=image)["logits"], model(image).logits, atol=1e-4, rtol=1e-4)
