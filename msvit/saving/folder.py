"""Folders with one safetensors file that describes itself, and gates saved in them.

    save_gate(model.gate, "gate")          # gate/gate.safetensors, and gate/gate.json for people to read
    gate = load_gate("gate", coarse=28, frozen=True)
    gate = load_gate("default")            # the trained gate that comes with msvit
    gate = named_gate("disc", share=0.5)   # or one of the classes in `gates.GATES`

The description is JSON in the header of the safetensors file, so that weights and settings are replaced in one step;
the JSON file beside it is never read. Gates and reducers are described by a name and arguments. Before anything is
built, the sizes described are compared with those in the header: a few numbers in a JSON do not fill the memory.

A gate is read without importing timm, which takes longer than running a gate.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from msvit.checks import check_choice, check_flag, check_path
from msvit.gates import GATES, Gate, LogitGate, Normalization
from msvit.gates.curve import Curve
from msvit.saving.file import Header, read_header, read_tensors, replacing, write_tensors

T = TypeVar("T")
FORMAT = 1
FEW = 64  # blocks that may be built on "meta" whatever a file holds
DEFAULT = "default"  # the name of the trained gate that comes with msvit
DEFAULT_GATE = Path(__file__).parents[1] / "gates/default"
COARSE = 32  # px: cells of a gate without weights, where none are given
SHARE = 0.3  # of fine cells, of gates that need one


@dataclass(frozen=True)
class Kind:
    """One kind of saved folder: its files, the function that writes it, and the fields its description must have."""

    weights: str
    json: str
    writer: str
    fields: tuple[str, ...]


MODEL = Kind("model.safetensors", "msvit.json", "msvit.save", ("host", "coarse", "mode", "gate"))
GATE = Kind("gate.safetensors", "gate.json", "msvit.save_gate", ("gate",))


@dataclass(frozen=True)
class Saved:
    """A folder whose description was read, but not its weights."""

    path: Path  # of the weights
    metadata: dict[str, Any]
    header: Header
    prefix: str = ""  # of the weights that are wanted


def save_gate(gate: Gate, folder: str | os.PathLike[str]) -> Path:
    """Write a gate alone, to be used with another model, input size or task."""
    if not isinstance(gate, Gate):
        raise ValueError(f"save_gate takes a gate, got {type(gate).__name__}; pass model.gate")
    return write_folder(check_path("folder", folder), GATE, gate, {"format": FORMAT, "gate": describe_gate(gate)})


def load_gate(folder: str | os.PathLike[str], coarse: int | None = None, frozen: bool = False) -> Gate:
    """Read a saved gate, that of a saved model, or "default". `coarse`: cells to serve, if not those of training."""
    check_flag("frozen", frozen)
    path = DEFAULT_GATE if str(folder) == DEFAULT else check_path("folder", folder)
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: no {GATE.weights}; pass a folder written by {GATE.writer}, "
            f'or "default", the gate that comes with msvit'
        )
    if not (path / GATE.weights).is_file() and (path / MODEL.weights).is_file():
        saved = read_folder(path, MODEL)
        prefix = "encoder.gate." if "decoder" in saved.metadata else "gate."
        header = replace(saved.header, shapes=_part(saved.header.shapes, prefix))
        saved = Saved(saved.path, {"gate": saved.metadata["gate"]}, header, prefix)
    else:
        saved = read_folder(path, GATE)
    gate: Gate = filled(saved, *[lambda: build_gate(saved.metadata["gate"])] * 2)
    gate = gate if coarse is None else gate.for_cells(coarse)
    return gate.requires_grad_(False) if frozen else gate


def named_gate(name: str, coarse: int | None = None, share: float | None = None) -> Gate:
    """Return a gate by its name. `coarse`: the side of a cell in px; `share`: of fine cells, if the gate takes one."""
    check_choice("gate", name, (DEFAULT, *GATES))
    if name == DEFAULT:
        return load_gate(DEFAULT, coarse=coarse)
    kind: Any = GATES[name]
    options = {"share": SHARE if share is None else share} if "share" in signature(kind).parameters else {}
    return kind(coarse=COARSE if coarse is None else coarse, **options)


def filled(saved: Saved, sketch: Callable[[], Any], build: Callable[[], Any]) -> Any:
    """Build what is described and load its weights, once `sketch`, on "meta", has the sizes that are in the file."""
    with described_in(saved.path):
        for part, settings in (("host", "options"), ("gate", "config")):
            _check_depth(saved, (saved.metadata.get(part) or {}).get(settings) or {})
        with torch.device("meta"):
            sketched = sketch()
        _check_shapes(saved.path, saved.header.shapes, sketched.state_dict())
        module = build()
    state = _part(read_tensors(saved.path), saved.prefix)
    dtypes = Counter(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    for dtype, _ in dtypes.most_common(1):  # what is not in the file, such as tables, has the usual one
        module.to(dtype)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in state and tensor.is_floating_point():  # each comes back in the precision it was saved in
            tensor.data = tensor.data.to(state[name].dtype)
    module.load_state_dict(state)
    return module


def _part(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _check_depth(saved: Saved, settings: dict[str, Any]) -> None:
    """Raise ValueError for many more blocks than tensors: every block has weights."""
    depths = [settings.get("depth", 0), *settings.get("depths", ())]
    if not all(type(depth) is int for depth in depths) or sum(depths) > max(FEW, len(saved.header.shapes)):
        raise ValueError(
            f"{saved.path} describes {settings.get('depths', settings.get('depth'))!r:.200} blocks, "
            f"but has {len(saved.header.shapes)} tensors; save it again"
        )


def _check_shapes(path: Path, shapes: dict[str, tuple[int, ...]], weights: dict[str, Tensor]) -> None:
    """Raise ValueError unless the file holds the weights of this model."""
    missing, unknown = sorted(weights.keys() - shapes.keys()), sorted(shapes.keys() - weights.keys())
    if missing or unknown:
        raise ValueError(
            f"{path} belongs to another model: it lacks {len(missing)} weights ({', '.join(missing[:3])}) "
            f"and has {len(unknown)} unknown ones ({', '.join(unknown[:3])}); load it with the host it was saved from"
        )
    for name, shape in shapes.items():
        if shape != tuple(weights[name].shape):
            raise ValueError(
                f"{path}: {name} is {shape}, but the model needs {tuple(weights[name].shape)}; "
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


def write_folder(folder: Path, kind: Kind, module: nn.Module, metadata: dict[str, Any]) -> Path:
    """Write weights and description. Replacing the safetensors file is the one step that counts."""
    inside, text = json.dumps(metadata), json.dumps(metadata, indent=2)  # first: what is no JSON is not half saved
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the path of a folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / kind.weights, module.state_dict(), {"about": inside})
    with replacing(folder / kind.json) as part:
        part.write_text(text)
    return folder


def read_folder(folder: Path, kind: Kind) -> Saved:
    """Read the description in the header of the weights."""
    path = folder / kind.weights
    if folder.is_file():
        raise ValueError(f"{folder} is a file; pass the folder written by {kind.writer}, such as {folder.parent}")
    if not path.is_file():
        state = "has no" if folder.is_dir() else "does not exist: no"
        raise ValueError(f"{folder} {state} {kind.weights}; pass a folder written by {kind.writer}")
    header = read_header(path)
    try:
        metadata = json.loads(header.metadata.get("about", ""))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has no readable description ({error}); write it with {kind.writer}") from None
    version = metadata.get("format") if isinstance(metadata, dict) else type(metadata).__name__
    if version != FORMAT or any(field not in metadata for field in kind.fields):
        raise ValueError(
            f"{path} is of format {version!r:.200}, but this msvit reads format {FORMAT}; write it with {kind.writer}"
        )
    return Saved(path, metadata, header)


def describe_gate(gate: Gate) -> dict[str, Any]:
    """Return name, arguments and records: {"name": "disc", "config": {"coarse": 32, "share": 0.3}}."""
    metadata = describe_part(gate, GATES, "gate")
    if gate.normalization is not None:
        metadata["normalization"] = asdict(gate.normalization)
    if gate.input_normalization != gate.normalization:
        metadata["input_normalization"] = asdict(gate.input_normalization)  # type: ignore[arg-type]
    if gate.curves:
        metadata["curves"] = [asdict(curve) for curve in gate.curves]
    return metadata


def build_gate(metadata: dict[str, Any]) -> Gate:
    """Build a gate as described; its weights are loaded by the caller."""
    gate: Gate = build_part(metadata, GATES, "gate")
    given = (metadata.get(name) for name in ("normalization", "input_normalization"))
    trained, images = (None if each is None else Normalization(**each) for each in given)
    if isinstance(gate, LogitGate):
        gate.set_normalization(trained, images)
    gate.curves = tuple(Curve(**as_tuples(each)) for each in metadata.get("curves", ()))
    return gate


def describe_part(part: Any, known: Mapping[str, type[Any]], word: str) -> dict[str, Any]:
    """Return name and arguments of a gate or reducer; raise ValueError if its class is not a known one."""
    names = [name for name, kind in known.items() if kind is type(part)]
    if not names:
        kind = type(part).__name__
        raise ValueError(
            f"{kind} is not among the known {word}s ({', '.join(known)}); "
            f"add it first: msvit.{'gates.GATES' if word == 'gate' else 'reduction.REDUCERS'}['my-{word}'] = {kind}"
        )
    return {"name": names[0], "config": dict(part.config)}


def build_part(metadata: dict[str, Any], known: Mapping[str, type[Any]], word: str) -> Any:
    """Build a gate or reducer as described, without its weights."""
    if metadata["name"] not in known:
        raise ValueError(f"unknown {word} {metadata['name']!r}; known: {', '.join(known)}")
    return known[metadata["name"]](**as_tuples(metadata["config"]))


def as_tuples(value: Any) -> Any:
    """Return JSON values with tuples in place of lists."""
    if isinstance(value, dict):
        return {key: as_tuples(v) for key, v in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value
