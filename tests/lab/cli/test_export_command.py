"""msvit export: a run as a file."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import msvit
from msvit.integrations import export
from msvit_lab.cli import app


def test_a_run_is_exported_with_its_classes_and_size(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the file holds: tests/library/integrations."""
    asked: dict[str, Any] = {}

    def write(model: msvit.MSViT, out: Path, **options: Any) -> list[Path]:
        out.write_text("")
        asked.update(options, model=model)
        return [out]

    monkeypatch.setattr(export, "export", write)
    options = ["--out", tmp_path / "model.pt2", "--batch", "dynamic"]
    result = CliRunner().invoke(app, ["export", *map(str, [trained / "gated", *options])], terminal_width=200)
    assert result.exit_code == 0, result.output
    assert "model.pt2: " in result.output
    assert (asked["batch"], asked["size"]) == ("dynamic", 64)
    assert asked["model"].classes == msvit.load(trained / "gated").classes
