"""Saving and loading: one safetensors file with the weights and what rebuilds the model. Never a pickle.

    msvit.save(model, "run/best")          # run/best/model.safetensors; run/best/msvit.json is there for people to read
    model = msvit.load("run/best")
    model = msvit.load("runs/photos")      # the trained model of a run, with its class names and preprocessing
    msvit.save_gate(model.gate, "gate")    # a gate alone: gate/gate.safetensors, gate/gate.json
    gate = msvit.load_gate("gate", coarse=28, frozen=True)
    gate = msvit.load_gate("default")      # the trained gate that comes with msvit

The description lies in the header of the safetensors file, so that weights and settings are replaced in one step. The
JSON beside it holds the same; earlier versions had it there alone. Before anything is built, what is described is
compared with the sizes in the header: a few numbers in a JSON do not fill the memory.

A gate is read without timm, which takes longer to import than a gate to run: what builds hosts is imported where used.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
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
from msvit.descriptions import build_gate, build_part, describe, describe_gate
from msvit.gates import Gate
from msvit.preprocessing import Preprocessing
from msvit.renamed import current_names
from msvit.skip_init import skip_init

T = TypeVar("T")
FORMAT = 1
MAX_JSON = 1 << 26  # bytes
FEW = 64  # blocks that may be sketched whatever a file holds
RUN_MODEL = "model"  # in a run folder
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


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a model. It is replaced whole or not at all."""
    import timm

    from msvit.host_config import describe_host
    from msvit.model import MSViT
    from msvit.reduction import REDUCERS
    from msvit.segmenter import Segmenter

    if isinstance(getattr(model, "msvit", None), MSViT):
        raise ValueError(f"a {type(model).__name__} is saved as in transformers: model.save_pretrained(folder)")
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
        "gate": describe_gate(model.gate),
        "reducer": None if model.reducer is None else describe(model.reducer, REDUCERS, "reducer"),
    }
    if model._preprocessing is not None:
        about["preprocessing"] = asdict(model._preprocessing)
    if isinstance(model, Segmenter):
        about["decoder"] = model.describe_decoder()
    return _write(check_path("folder", folder), MODEL, model, about)


def load(folder: str | os.PathLike[str], host: nn.Module | None = None) -> Any:
    """Read an `MSViT` or a `Segmenter`: a folder written by `save`, or a run of `msvit train` that is finished.

    `host`: one you built yourself, if it could not be described when saving. Only what `save` writes is read. No code
    of the folder runs, and nothing is fetched from anywhere.
    """
    saved = _read(_model_folder(check_path("folder", folder)), MODEL)
    if host is not None:
        return _rebuild(saved, lambda: host, lambda: _on_meta(host))
    if saved.about["host"] is None:
        raise ValueError(
            f"{folder} holds weights of a host that msvit cannot build by itself; "
            f"build the same host and pass it: msvit.load(folder, host=my_vit), for a model of transformers "
            f"what its from_pretrained or its class makes"
        )
    return _rebuild(saved, lambda: _rebuild_host(saved.about["host"]))


def _model_folder(folder: Path) -> Path:
    """The folder itself or, of a run, the one inside it that `save` wrote."""
    if not (folder / "config.json").is_file() or (folder / MODEL.weights).is_file():
        return folder
    if not (folder / RUN_MODEL).is_dir():
        raise ValueError(
            f"{folder} is a run without a trained model yet; finish it with msvit train RECIPE --resume --out {folder}"
        )
    return folder / RUN_MODEL


def load_or_build(folder: Path, make_host: Callable[[], nn.Module]) -> Any:
    """As `load`; a host that could not be described when saving is made by `make_host`."""
    saved = _read(folder, MODEL)
    about = saved.about["host"]
    return _rebuild(saved, make_host if about is None else lambda: _rebuild_host(about))


def save_gate(gate: Gate, folder: str | os.PathLike[str]) -> Path:
    """Write a gate alone, to be used with another model, input size or task."""
    if not isinstance(gate, Gate):
        raise ValueError(f"save_gate takes a gate, got {type(gate).__name__}; pass model.gate")
    return _write(check_path("folder", folder), GATE, gate, {"format": FORMAT, "gate": describe_gate(gate)})


def load_gate(folder: str | os.PathLike[str], coarse: int | None = None, frozen: bool = False) -> Gate:
    """Read a gate: one that was saved, that of a saved model, or "default" (see msvit/gates/default).

    `coarse`: the cell size it shall serve, if another than it was trained for.
    """
    check_flag("frozen", frozen)
    path = DEFAULT_GATE if str(folder) == "default" else check_path("folder", folder)
    alone = any((path / name).is_file() for name in (GATE.weights, GATE.json))
    saved = _read(path, GATE) if alone or not (path / MODEL.weights).is_file() else _gate_of(_read(path, MODEL))
    gate: Gate = _filled(saved, *[lambda: build_gate(saved.about["gate"])] * 2)
    gate = gate if coarse is None else gate.for_cells(coarse)
    return gate.requires_grad_(False) if frozen else gate


def _rebuild(
    saved: Saved, make_host: Callable[[], nn.Module], sketch_host: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """`sketch_host`: a host of the same sizes on the device "meta", where `make_host` cannot make one."""
    from msvit.conversion import to_msvit
    from msvit.reduction import REDUCERS
    from msvit.segmenter import convert_segmenter

    about = saved.about

    def build(host: nn.Module) -> nn.Module:
        parts: dict[str, Any] = {name: about[name] for name in ("coarse", "mode", "merge_at") if about.get(name)}
        parts["gate"] = build_gate(about["gate"])
        parts["reducer"] = None if about.get("reducer") is None else build_part(about["reducer"], REDUCERS, "reducer")
        if "decoder" not in about:
            return with_gate(to_msvit(host, **parts), parts["gate"])
        if about["decoder"].keys() != {"decoder", "num_classes"}:
            raise ValueError(f"{saved.path}: the decoder is {about['decoder']!r:.200}, which is not what is saved")
        model = convert_segmenter(host, **about["decoder"], **parts)
        with_gate(model.encoder, parts["gate"])
        return model

    def with_gate(model: Any, gate: Gate) -> nn.Module:
        model.gate = gate  # as it was saved, whatever the host says of its images
        return model

    model = _filled(saved, lambda: build((sketch_host or make_host)()), lambda: build(make_host()))
    model.classes = about.get("classes")
    if "preprocessing" in about:
        with _described_in(saved.path):
            model.preprocessing = Preprocessing(**about["preprocessing"])
    return model.eval()


def _rebuild_host(about: dict[str, Any]) -> nn.Module:
    from msvit.host_config import rebuild_host

    return rebuild_host(about)


def _filled(saved: Saved, sketch: Callable[[], Any], build: Callable[[], Any]) -> Any:
    """What is described, with its weights, once a sketch without memory has the sizes that are in the file."""
    with _described_in(saved.path):
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


def _on_meta(host: nn.Module) -> nn.Module:
    """A copy without memory for its weights."""
    sketched: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in host.parameters()}
    return deepcopy(host, sketched | {id(buffer): buffer.to("meta") for buffer in host.buffers()})


@contextmanager
def _described_in(path: Path) -> Iterator[None]:
    """Turn errors of timm or a constructor about a description into a ValueError."""
    try:
        yield
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
    ) as error:  # fmt: skip
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} does not describe a model this msvit can build ({what}); save it again") from None


def _write(folder: Path, kind: Kind, module: nn.Module, about: dict[str, Any]) -> Path:
    text, inside = with_checksum(about), json.dumps(about)  # first: what cannot be described is not half saved
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / kind.weights, module.state_dict(), {"about": inside})  # the one step that counts
    with replacing(folder / kind.json) as part:
        part.write_text(text)
    return folder


def _read(folder: Path, kind: Kind) -> Saved:
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
