"""Tiny trainings for the tests: seconds or less, on the built-in scenes."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

import msvit
from msvit_lab.cli import app
from msvit_lab.config import Config, override
from msvit_lab.recipes import recipe

SEGMENT = {"task": "segment", "data.scales": "1,1.2", "data.max_share": "1", "model.mode": "packed"}
EDGES = SEGMENT | {"gate.loss": "edges"}  # a gate that learns from label maps


def smoke(name: str = "scenes", /, **changes: Any) -> Config:
    """The smoke version of a recipe: two steps. Settings by dotted name, dots also as two underscores."""
    return override(recipe(name, smoke=True), {name.replace("__", "."): str(v) for name, v in changes.items()})


def lines(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """metrics.jsonl without the one thing that may differ between two equal runs."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key != "seconds"} for line in found if kind in (None, line["kind"])]


def write_images(folder: Path, classes: tuple[str, ...] = ("ant", "bee", "cat"), each: int = 4) -> Path:
    """FOLDER/CLASS/i.png; a class's brightness comes from its first letter."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        level = 80 * (ord(name[0]) % 3)
        for i in range(each):
            pixels = np.random.default_rng(i).integers(level, level + 50, (40, 36, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def call(*arguments: object) -> Result:
    """`msvit ...` in this process."""
    return CliRunner().invoke(app, [*map(str, arguments)], terminal_width=400)


def done(*arguments: object) -> str:
    """What a command printed, which succeeded."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    """The sentence for a mistake: exit code 2 and no traceback."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result.output


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wait_for(happens: Callable[[], object], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.01)


def num_lines(run: Path) -> int:
    """Of metrics.jsonl, so far."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def command(*arguments: object) -> dict[str, Any]:
    """Arguments of subprocess.Popen that run `msvit ...` from this checkout, on one thread as the tests are."""
    path = os.pathsep.join([str(Path(msvit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return {"args": [sys.executable, "-m", "msvit", *map(str, arguments)], "env": env, "text": True}
