"""Saved folders as somebody who means harm would write them: other settings, with a checksum that is right."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from msvit.saving.file import read_header, write_tensors


def described(weights: Path) -> dict[str, Any]:
    """The description in the header of a safetensors file."""
    return json.loads(read_header(weights).metadata["about"])


def forge(folder: Path, change: dict[str, Any], stem: str = "model", without: str = "") -> None:
    """Change some values of the description, and leave one out."""
    weights = folder / f"{stem}.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    about = {name: value for name, value in described(weights).items() if name != without}
    write_tensors(weights, state, {"about": json.dumps(about | change)})


def forge_gate(folder: Path, normalization: Any = None, **config: Any) -> None:
    """A saved gate with other settings, and another record of its images."""
    gate = described(folder / "gate.safetensors")["gate"]
    record = {} if normalization is None else {"normalization": normalization}
    forge(folder, {"gate": gate | record | {"config": gate["config"] | config}}, stem="gate")


def forge_host(folder: Path, name: str | None = None, **options: Any) -> None:
    """A saved model whose host has another name or other options."""
    host = described(folder / "model.safetensors")["host"]
    forge(folder, {"host": host | {"name": name or host["name"], "options": host["options"] | options}})
