"""A run that can go on: everything in one safetensors file, replaced whole.

    write_state(path, parts, step=120)       # model, gate loss, optimizer, running mean, random state
    step = read_state(path, parts)

A process killed at any moment leaves the last complete file. Nothing is pickled.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from msvit.atomic import replacing


@dataclass(frozen=True)
class Parts:
    """What changes in training."""

    model: nn.Module
    gate_loss: nn.Module | None
    optimizer: torch.optim.Optimizer
    ema: nn.Module | None


def write_state(path: Path, parts: Parts, step: int) -> None:
    tensors = {f"model.{name}": value for name, value in parts.model.state_dict().items()}
    if parts.gate_loss is not None:
        tensors |= {f"gate_loss.{name}": value for name, value in parts.gate_loss.state_dict().items()}
    if parts.ema is not None:
        tensors |= {f"ema.{name}": value for name, value in parts.ema.state_dict().items()}
    for number, state in parts.optimizer.state_dict()["state"].items():
        known = {name: torch.as_tensor(value) for name, value in state.items() if value is not None}
        tensors |= {f"optim.{number}.{name}": value for name, value in known.items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    tensors = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    with replacing(path) as part:
        save_file(tensors, part, metadata={"step": json.dumps(step)})


def read_step(path: Path) -> int:
    """How many steps a saved state had done."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["step"])


def read_state(path: Path, parts: Parts) -> int:
    """Put a saved state back; returns the number of steps it had done."""
    try:
        step = read_step(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no checkpoint that can be read ({error}); delete it and start anew") from None
    try:
        parts.model.load_state_dict(_under("model.", tensors))
        if parts.gate_loss is not None:
            parts.gate_loss.load_state_dict(_under("gate_loss.", tensors))
        if parts.ema is not None:
            parts.ema.load_state_dict(_under("ema.", tensors))
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()  # the line before only names the class
        raise ValueError(f"{path} does not fit this configuration ({first}); choose another --out") from None
    state: dict[int, dict[str, Any]] = {}
    for name, value in _under("optim.", tensors).items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = value
    parts.optimizer.load_state_dict({**parts.optimizer.state_dict(), "state": state})
    torch.set_rng_state(tensors["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"])
    return step


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
