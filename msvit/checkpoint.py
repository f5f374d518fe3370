"""Saving and loading: safetensors for the weights, a JSON beside them that rebuilds the model. Never a pickle.

    msvit.save(model, "run/best")          # run/best/model.safetensors, run/best/msvit.json
    model = msvit.load("run/best")
    msvit.save_gate(model.gate, "gate")    # a gate alone: gate/gate.safetensors, gate/gate.json
    gate = msvit.load_gate("gate", coarse=28, frozen=True)
    gate = msvit.load_gate("default")      # the trained gate that comes with msvit
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from msvit.atomic import replacing
from msvit.checks import check_flag, check_path
from msvit.conversion import convert
from msvit.gates import GATES, Gate
from msvit.host_config import describe_host, rebuild_host
from msvit.model import MSViT
from msvit.reduction import REDUCERS
from msvit.segmenter import Segmenter, convert_segmenter

FORMAT = 1
MODEL_FIELDS = ("host", "coarse", "mode", "gate")
DEFAULT_GATE = Path(__file__).parent / "gates/default"


def save(model: MSViT | Segmenter, folder: str | os.PathLike[str]) -> Path:
    """Write a model. Files are replaced whole or not at all."""
    if not isinstance(model, MSViT | Segmenter):
        raise ValueError(f"save takes a converted model, got {type(model).__name__}; wrap it with msvit.convert first")
    about = {
        "format": FORMAT,
        "timm": timm.__version__,
        "host": describe_host(model.host),
        "coarse": model.coarse,
        "mode": model.mode,
        "merge_at": model.backbone.merge_at,
        "classes": None if model.classes is None else list(model.classes),
        "gate": _describe(model.gate, GATES, "gate"),
        "reducer": None if model.reducer is None else _describe(model.reducer, REDUCERS, "reducer"),
    }
    if isinstance(model, Segmenter):
        about["decoder"] = model.describe_decoder()
    return _write(check_path("folder", folder), "model.safetensors", model, "msvit.json", about)


def load(folder: str | os.PathLike[str], host: nn.Module | None = None) -> Any:
    """Read an `MSViT` or a `Segmenter`. `host`: one you built yourself, if it could not be described when saving."""
    folder = check_path("folder", folder)
    about = _read_json(folder, "msvit.json", "msvit.save", MODEL_FIELDS)
    if host is None and about["host"] is None:
        raise ValueError(
            f"{folder} holds weights of a host that msvit cannot build by itself; "
            f"build the same host and pass it: msvit.load(folder, host=my_vit)"
        )
    with _described_in(folder / "msvit.json"):
        host = rebuild_host(about["host"]) if host is None else host
        parts: dict[str, Any] = {name: about[name] for name in ("coarse", "mode", "merge_at") if about.get(name)}
        parts["gate"] = _build(about["gate"], GATES, "gate")
        parts["reducer"] = None if about.get("reducer") is None else _build(about["reducer"], REDUCERS, "reducer")
        if "decoder" in about:
            model: MSViT | Segmenter = convert_segmenter(host, **about["decoder"], **parts)
        else:
            model = convert(host, **parts)
        model.classes = about.get("classes")
    _fill(model, folder / "model.safetensors")
    return model.eval()


def rebuilds(folder: Path) -> bool:
    """Whether a saved model can be loaded without a host given."""
    return _read_json(folder, "msvit.json", "msvit.save", MODEL_FIELDS)["host"] is not None


def save_gate(gate: Gate, folder: str | os.PathLike[str]) -> Path:
    """Write a gate alone, to be used with another model, input size or task."""
    if not isinstance(gate, Gate):
        raise ValueError(f"save_gate takes a gate, got {type(gate).__name__}; pass model.gate")
    about = {"format": FORMAT, "gate": _describe(gate, GATES, "gate")}
    return _write(check_path("folder", folder), "gate.safetensors", gate, "gate.json", about)


def load_gate(folder: str | os.PathLike[str], coarse: int | None = None, frozen: bool = False) -> Gate:
    """Read a gate: one that was saved, or "default", which comes with msvit (msvit/gates/default says what it is).

    `coarse`: the cell size it shall serve, if another than it was trained for.
    """
    check_flag("frozen", frozen)
    folder = DEFAULT_GATE if str(folder) == "default" else check_path("folder", folder)
    about = _read_json(folder, "gate.json", "msvit.save_gate", ("gate",))["gate"]
    with _described_in(folder / "gate.json"):
        gate: Gate = _build(about, GATES, "gate")
    _fill(gate, folder / "gate.safetensors")
    gate = gate if coarse is None else gate.for_cells(coarse)
    return gate.requires_grad_(False) if frozen else gate


@contextmanager
def _described_in(path: Path) -> Iterator[None]:
    """What timm or a constructor says of a description that is not one of ours, as a sentence."""
    try:
        yield
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} does not describe a model this msvit can build ({what}); save it again") from None


def _describe(part: Any, known: Mapping[str, type[Any]], word: str) -> dict[str, Any]:
    names = [name for name, kind in known.items() if kind is type(part)]
    if not names:
        kind = type(part).__name__
        raise ValueError(
            f"{kind} is not among the known {word}s ({', '.join(known)}); "
            f"add it first: msvit.{'gates.GATES' if word == 'gate' else 'reduction.REDUCERS'}['my-{word}'] = {kind}"
        )
    return {"name": names[0], "config": part.config}


def _build(about: dict[str, Any], known: Mapping[str, type[Any]], word: str) -> Any:
    if about["name"] not in known:
        raise ValueError(f"unknown {word} {about['name']!r}; known: {', '.join(known)}")
    config = {key: tuple(v) if isinstance(v, list) else v for key, v in about["config"].items()}  # JSON has no tuples
    return known[about["name"]](**config)


def _write(folder: Path, weights_name: str, module: nn.Module, about_name: str, about: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    text = json.dumps(about, indent=2)  # before anything is written: what cannot be described is not half saved
    with replacing(folder / about_name) as about_part, replacing(folder / weights_name) as weights_part:
        about_part.write_text(text)
        save_file(state, weights_part)
    return folder


def _read_json(folder: Path, name: str, writer: str, fields: tuple[str, ...]) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        state = "has no" if folder.is_dir() else "is a file and has no" if folder.exists() else "does not exist: no"
        raise ValueError(f"{folder} {state} {name}; pass a folder written by {writer}")
    try:
        about = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable as JSON ({error}); write the folder again with {writer}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT or any(field not in about for field in fields):
        found = about.get("format") if isinstance(about, dict) else type(about).__name__
        raise ValueError(f"{path} is of format {found}, but this msvit reads format {FORMAT}; write it with {writer}")
    return about


def _fill(module: nn.Module, path: Path) -> None:
    """Load weights, refusing a file that is damaged or belongs to something else."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; the folder is incomplete, save it again")
    try:
        state = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is truncated or is no safetensors file ({error}); save or copy it again") from None
    own: dict[str, Tensor] = module.state_dict()
    missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or foreign:
        raise ValueError(
            f"{path} belongs to another model: it lacks {len(missing)} weights ({', '.join(missing[:3])}) "
            f"and has {len(foreign)} unknown ones ({', '.join(foreign[:3])}); load it with the host it was saved from"
        )
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{path}: {name} is {tuple(tensor.shape)}, but the model needs {tuple(own[name].shape)}; "
                f"load it with the host it was saved from"
            )
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:  # saved in one precision: come back in it
        module.to(dtypes.pop())
    module.load_state_dict(state)
