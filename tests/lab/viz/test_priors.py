"""Priors over training: a row of maps for each run, the initial ones first."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from smoke_runs import smoke
from typer.testing import CliRunner

from msvit_lab.cli import app
from msvit_lab.runs import write_config


def make_run(folder: Path, steps: list[int]) -> Path:
    """A run that recorded theta at these steps: step / 100 everywhere."""
    folder.mkdir()
    write_config(folder, smoke(), "scenes", [])
    lines = [{"kind": "prior", "step": step, "theta": [[step / 100] * 2] * 2} for step in steps]
    lines.append({"kind": "prior", "step": 99, "theta": "torn"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_every_run_is_a_row(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "one", [0, 100]), make_run(tmp_path / "other", [0, 50, 100])
    result = CliRunner().invoke(app, ["viz", "--priors", str(one), str(other), "--out", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert result.output.replace("\n", "") == str(tmp_path / "new/priors.png")
    pixels = np.asarray(Image.open(tmp_path / "new/priors.png").convert("RGB")).astype(int)
    dark, bright = (np.abs(pixels - colour).max(-1) < 3 for colour in ((68, 1, 84), (253, 231, 37)))  # theta 0 and 1
    half = len(pixels) // 2
    for row in (slice(half), slice(half, None)):
        assert min(dark[row].sum(), bright[row].sum()) > 10_000
        left, right = (np.nonzero(mask[row])[1].mean() for mask in (dark, bright))
        assert left < right, "the initial values come first"


def test_a_run_without_priors_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    runs = [str(make_run(tmp_path / "one", [0])), str(make_run(tmp_path / "none", []))]
    for arguments, words in (
        (runs, "none has no theta in its metrics.jsonl"),
        ([runs[0], "--zoom", "3"], "--zoom is for images, but --priors draws what runs have recorded; leave it out"),
        ([runs[0], "--out", str(tmp_path / "x.jpg")], "written as PNG; call it"),
    ):
        result = CliRunner().invoke(app, ["viz", "--priors", *arguments], terminal_width=300)
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())
