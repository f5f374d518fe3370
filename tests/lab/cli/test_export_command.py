"""msvit export: a run as a file."""

from pathlib import Path
from typing import Any

import pytest
from smoke_runs import done

import msvit
from msvit.integrations import export


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
    said = done("export", trained / "gated", "--out", tmp_path / "model.pt2", "--batch", "dynamic")
    assert "model.pt2: " in said
    assert (asked["batch"], asked["size"]) == ("dynamic", 64)
    assert asked["model"].classes == msvit.load(trained / "gated").classes
