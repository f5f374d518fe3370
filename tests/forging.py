"""Saved folders as an earlier version wrote them, or as somebody who means harm would."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def forge(
    folder: Path, change: dict[str, Any] | None = None, stem: str = "model", beside: str = "msvit.json",
    without: str = "",
) -> None:  # fmt: skip
    """The description beside the weights alone and without checksums, some of its values changed, one left out."""
    weights = folder / f"{stem}.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    save_file(state, weights)
    about = json.loads((folder / beside).read_text())
    about = {name: value for name, value in about.items() if name not in ("checksum", without)}
    (folder / beside).write_text(json.dumps(about | (change or {})))


def forge_gate(folder: Path, **config: Any) -> None:
    """A saved gate with other settings."""
    gate = json.loads((folder / "gate.json").read_text())["gate"]
    forge(folder, {"gate": {**gate, "config": gate["config"] | config}}, stem="gate", beside="gate.json")


def forge_host(folder: Path, name: str | None = None, **options: Any) -> None:
    """A saved model whose host has another name or other options."""
    host = json.loads((folder / "msvit.json").read_text())["host"]
    forge(folder, {"host": host | {"name": name or host["name"], "options": host["options"] | options}})
