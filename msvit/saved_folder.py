"""Folders with one safetensors file, described in its header: how they are written and read, and those of gates.

    save_gate(model.gate, "gate")          # gate/gate.safetensors; gate/gate.json is there for people to read
    gate = load_gate("gate", coarse=28, frozen=True)
    gate = load_gate("default")            # the trained gate that comes with msvit

The description lies in the header of the safetensors file, so that weights and settings are replaced in one step. The
JSON beside it holds the same; earlier versions had it there alone. Before anything is built, what is described is
compared with the sizes in the header: a few numbers in a JSON do not fill the memory.

A gate is read without timm, which takes longer to import than a gate to run.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from msvit.atomic import replacing
from msvit.checked_file import (
    CHECKSUM,
    Damaged,
    Header,
    check_text,
    read_header,
    read_tensors,
    with_checksum,
    write_tensors,
)
from msvit.checks import check_flag, check_path
from msvit.descriptions import build_gate, describe_gate
from msvit.gates import Gate
from msvit.renamed import current_names
from msvit.skip_init import skip_init

T = TypeVar("T")
FORMAT = 1
MAX_JSON = 1 << 26  # bytes
FEW = 64  # blocks that may be sketched whatever a file holds
DEFAULT_GATE = Path(__file__).parent / "gates/default"


@dataclass(frozen=True)
class Kind:
    """One kind of saved folder: its files, the function that writes it, and the fields of its description."""

    weights: str
    json: str
    writer: str
    fields: tuple[str, ...]  # that it must have
    unchecked: frozenset[str]  # all that it had before there were checksums


MODEL = Kind(
    "model.safetensors", "msvit.json", "msvit.save", ("host", "coarse", "mode", "gate"),
    frozenset(("format", "timm", "host", "coarse", "mode", "merge_at", "classes", "gate", "reducer", "decoder")),
)  # fmt: skip
GATE = Kind("gate.safetensors", "gate.json", "msvit.save_gate", ("gate",), frozenset(("format", "gate")))


@dataclass(frozen=True)
class Saved:
    """A folder that was read, its weights not yet."""

    path: Path  # of the weights
    about: dict[str, Any]
    header: Header
    prefix: str = ""  # of the weights that are wanted


def save_gate(gate: Gate, folder: str | os.PathLike[str]) -> Path:
    """Write a gate alone, to be used with another model, input size or task."""
    if not isinstance(gate, Gate):
        raise ValueError(f"save_gate takes a gate, got {type(gate).__name__}; pass model.gate")
    return write_folder(check_path("folder", folder), GATE, gate, {"format": FORMAT, "gate": describe_gate(gate)})


def load_gate(folder: str | os.PathLike[str], coarse: int | None = None, frozen: bool = False) -> Gate:
    """Read a gate: one that was saved, that of a saved model, or "default" (see msvit/gates/default).

    `coarse`: the cell size it shall serve, if another than it was trained for.
    """
    check_flag("frozen", frozen)
    path = DEFAULT_GATE if str(folder) == "default" else check_path("folder", folder)
    alone = any((path / name).is_file() for name in (GATE.weights, GATE.json))
    of_model = not alone and (path / MODEL.weights).is_file()
    saved = _gate_of(read_folder(path, MODEL)) if of_model else read_folder(path, GATE)
    gate: Gate = filled(saved, *[lambda: build_gate(saved.about["gate"])] * 2)
    gate = gate if coarse is None else gate.for_cells(coarse)
    return gate.requires_grad_(False) if frozen else gate


def filled(saved: Saved, sketch: Callable[[], Any], build: Callable[[], Any]) -> Any:
    """What is described, with its weights, once a sketch without memory has the sizes that are in the file."""
    with described_in(saved.path):
        for part, settings in (("host", "options"), ("gate", "config")):
            _check_depth(saved, (saved.about.get(part) or {}).get(settings) or {})
        with torch.device("meta"), skip_init():
            sketched = sketch()
        _check_shapes(saved.path, current_names(sketched, saved.header.shapes), sketched.state_dict())
        module = build()
    state = _part(read_tensors(saved.path), saved.prefix)
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:  # saved in one precision: come back in it
        module.to(dtypes.pop())
    module.load_state_dict(state)
    return module


def _gate_of(saved: Saved) -> Saved:
    """The gate's part of a saved model."""
    prefix = "encoder.gate." if "decoder" in saved.about else "gate."
    header = replace(saved.header, shapes=_part(saved.header.shapes, prefix))
    return Saved(saved.path, {"gate": saved.about["gate"]}, header, prefix)


def _part(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _check_depth(saved: Saved, settings: dict[str, Any]) -> None:
    """Every block has weights: where there are many more blocks than tensors, not one of them is built."""
    depths = [settings.get("depth", 0), *settings.get("depths", ())]
    if not all(type(depth) is int for depth in depths) or sum(depths) > max(FEW, len(saved.header.shapes)):
        raise ValueError(
            f"{saved.path} describes {settings.get('depths', settings.get('depth'))!r:.200} blocks, "
            f"but has {len(saved.header.shapes)} tensors; save it again"
        )


def _check_shapes(path: Path, found: dict[str, tuple[int, ...]], own: dict[str, Tensor]) -> None:
    """Raise ValueError unless the file holds the weights of this model."""
    missing, foreign = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys())
    if missing or foreign:
        raise ValueError(
            f"{path} belongs to another model: it lacks {len(missing)} weights ({', '.join(missing[:3])}) "
            f"and has {len(foreign)} unknown ones ({', '.join(foreign[:3])}); load it with the host it was saved from"
        )
    for name, shape in found.items():
        if shape != tuple(own[name].shape):
            raise ValueError(
                f"{path}: {name} is {shape}, but the model needs {tuple(own[name].shape)}; "
                f"load it with the host it was saved from"
            )


@contextmanager
def described_in(path: Path) -> Iterator[None]:
    """Turn errors of timm or a constructor about a description into a ValueError."""
    try:
        yield
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
    ) as error:  # fmt: skip
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} does not describe a model this msvit can build ({what}); save it again") from None


def write_folder(folder: Path, kind: Kind, module: nn.Module, about: dict[str, Any]) -> Path:
    text, inside = with_checksum(about), json.dumps(about)  # first: what cannot be described is not half saved
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / kind.weights, module.state_dict(), {"about": inside})  # the one step that counts
    with replacing(folder / kind.json) as part:
        part.write_text(text)
    return folder


def read_folder(folder: Path, kind: Kind) -> Saved:
    """The description in the header of the weights or, as earlier versions wrote it, in the JSON beside them.

    A valid JSON of another save was left by one that was killed: the header of the weights counts.
    """
    path, weights = folder / kind.json, folder / kind.weights
    beside = _read_json(path, kind) if path.is_file() else None
    if not weights.is_file():
        if beside is not None:
            raise ValueError(f"{folder} has no {kind.weights}; the folder is incomplete, save it again")
        state = "has no" if folder.is_dir() else "is a file and has no" if folder.exists() else "does not exist: no"
        raise ValueError(f"{folder} {state} {kind.json} and {kind.weights}; pass a folder written by {kind.writer}")
    header = read_header(weights)
    if "about" in header.about:
        return Saved(weights, _parse(weights, header.about["about"], kind), header)
    if beside is None:
        raise ValueError(f"{folder} has no {kind.json}; pass a folder written by {kind.writer}")
    if CHECKSUM in beside:
        raise Damaged(f"{weights} has no checksum, but {path} has: they were not written together; save it again")
    return Saved(weights, beside, header)


def _read_json(path: Path, kind: Kind) -> dict[str, Any]:
    if (num := path.stat().st_size) > MAX_JSON:
        raise ValueError(f"{path} has {num} bytes, but a description has at most {MAX_JSON}; save it again")
    text = path.read_bytes()
    about = _parse(path, text, kind)
    check_text(path, text, kind.unchecked)
    return about


def _parse(path: Path, text: str | bytes, kind: Kind) -> dict[str, Any]:
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as JSON ({error}); write it again with {kind.writer}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT or any(field not in about for field in kind.fields):
        found = about.get("format") if isinstance(about, dict) else type(about).__name__
        raise ValueError(
            f"{path} is of format {found!r:.200}, but this msvit reads format {FORMAT}; write it with {kind.writer}"
        )
    return about
