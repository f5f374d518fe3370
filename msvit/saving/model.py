"""Saving and loading models: one safetensors file with the weights and what rebuilds the model. Never a pickle.

    msvit.save(model, "run/best")          # run/best/model.safetensors, and run/best/msvit.json for people to read
    model = msvit.load("run/best")
    model = msvit.load("runs/photos")      # of msvit train: runs/photos/model, with its class names and preprocessing
    model = msvit.load("folder")           # of save_pretrained, of a converted transformers model too

How such folders are written and checked is in `folder.py`, and so is what saves a gate alone.
"""

import json
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
from torch import nn

from msvit.backbones import Backbone, adapt
from msvit.checks import check_choice, check_kind, check_number, check_path
from msvit.gates import Gate
from msvit.host_settings import Budget
from msvit.model import MSViT, inner_msvit
from msvit.preprocessing import Preprocessing
from msvit.reduction import REDUCERS
from msvit.run_record import from_dict, read_record
from msvit.saving.folder import (
    FORMAT,
    MODEL,
    Saved,
    build_gate,
    build_part,
    describe_gate,
    describe_part,
    described_in,
    filled,
    read_folder,
    write_folder,
)
from msvit.saving.host import describe_host, rebuild_host
from msvit.segmenter import Segmenter, attach_decoder
from msvit.speed_report import SpeedReport

INNER = "model"  # where `msvit train` saves a model in its run folder
RECORD = "record.json"  # beside it: the model's `run_record`


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a model. It is replaced whole or not at all. One of transformers writes itself, by `save_pretrained`."""
    if inner_msvit(model) is not None:
        of_transformers: Any = model
        of_transformers.save_pretrained(check_path("folder", folder))
        return Path(folder)
    if isinstance(model, Gate):
        raise ValueError("save takes a converted model; a gate is saved by msvit.save_gate(gate, folder)")
    if not isinstance(model, MSViT | Segmenter):
        raise ValueError(f"save takes a converted model, got {type(model).__name__}; wrap it with msvit.convert first")
    metadata = {
        "format": FORMAT,
        "timm": timm.__version__,
        "host": describe_host(model.host),
        "merge_at": model.backbone.merge_at,
        "classes": None if model.classes is None else list(model.classes),
        **describe_parts(model),
    }
    records = {"preprocessing": model._preprocessing, "run": model.run_record}
    metadata |= {name: asdict(record) for name, record in records.items() if record is not None}
    metadata |= describe_budget(model)
    if isinstance(model, Segmenter):
        metadata["decoder"] = model.describe_decoder()
    return write_folder(check_path("folder", folder), MODEL, model, metadata)


def describe_parts(model: Any) -> dict[str, Any]:
    """Return what a model has besides its host, as JSON values."""
    return {
        "coarse": model.coarse,
        "mode": model.mode,
        "gate": describe_gate(model.gate),
        "reducer": None if model.reducer is None else describe_part(model.reducer, REDUCERS, "reducer"),
    }


def build_msvit(backbone: Backbone, metadata: Mapping[str, Any]) -> MSViT:
    """Build a model with the parts described by `describe_parts`."""
    if metadata.get("proportional_attention"):
        raise ValueError("the model has proportional attention, which msvit no longer has; convert its host again")
    reducer = metadata.get("reducer")
    return MSViT(
        backbone, build_gate(metadata["gate"]), metadata["coarse"], metadata["mode"],
        None if reducer is None else build_part(reducer, REDUCERS, "reducer"),
    )  # fmt: skip


def describe_budget(model: Any) -> dict[str, Any]:
    """Return a model's budget and speed report, where it has them, as JSON values."""
    found = {} if model.budget is None else {"budget": model.budget._asdict()}
    return found if model.speed_report is None else found | {"speed_report": asdict(model.speed_report)}


def restore_budget(model: Any, metadata: dict[str, Any]) -> None:
    """Set a new model's budget and speed report as described; raise an error for what was never saved."""
    if metadata.get("speed_report") is not None:
        model.speed_report = SpeedReport(**metadata["speed_report"])
    if metadata.get("budget") is not None:
        budget = Budget(**metadata["budget"])
        check_number("budget", budget.value, above=0)
        check_choice("unit", budget.unit, ("macs", "tokens", "ms"))
        model.with_budget(*budget)


def load(folder: str | os.PathLike[str], host: nn.Module | None = None) -> Any:
    """Read an `MSViT` or a `Segmenter` from a folder written by `save`, or from a finished run of `msvit train`.

    A folder of `save_pretrained` of a converted transformers model is read as its Auto class does. `host`: one you
    built yourself, if it could not be described when saving. Only what `save` writes is read. No code of the folder
    runs, and nothing is fetched from anywhere.
    """
    path = check_path("folder", folder)
    if host is not None:
        check_kind("host", host, nn.Module, "a model you built; to move what is loaded: msvit.load(folder).to(device)")
    if (config := _transformers_config(path)) is not None:
        if host is not None:
            raise ValueError(f"{folder} holds a transformers model, which describes its host; leave out host")
        return _load_transformers(path, config)
    inside = not (path / MODEL.weights).is_file() and (path / INNER / MODEL.weights).is_file()
    saved = read_folder(path / INNER if inside else path, MODEL)
    if inside and (record := read_record(path / RECORD)) is not None:
        saved.metadata["run"] = asdict(record)
    if host is not None:
        return _rebuild(saved, lambda: host, lambda: _on_meta(host))
    if saved.metadata["host"] is None:
        raise ValueError(
            f"{folder} holds weights of a host that msvit cannot build by itself; "
            f"build the same host and pass it: msvit.load(folder, host=my_vit), for a model of transformers "
            f"what its from_pretrained or its class makes"
        )
    return _rebuild(saved, lambda: rebuild_host(saved.metadata["host"]))


def _transformers_config(folder: Path) -> dict[str, Any] | None:
    """The configuration in a folder of a converted transformers model; None for any other folder."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) and config.get("model_type") == "msvit" else None


def _load_transformers(folder: Path, config: dict[str, Any]) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{folder} holds a transformers model, which needs transformers ({error}); "
            f"pip install 'msvit[transformers]'"
        ) from None
    classifies = "MSViTForImageClassification" in (config.get("architectures") or ())
    auto = transformers.AutoModelForImageClassification if classifies else transformers.AutoModel
    with described_in(folder):
        return auto.from_pretrained(folder, local_files_only=True, use_safetensors=True)


def load_or_build(folder: Path, make_host: Callable[[], nn.Module]) -> Any:
    """Read a model as `load` does; a host that could not be described when saving is made by `make_host`."""
    saved = read_folder(folder, MODEL)
    metadata = saved.metadata["host"]
    return _rebuild(saved, make_host if metadata is None else lambda: rebuild_host(metadata))


def _rebuild(
    saved: Saved, make_host: Callable[[], nn.Module], sketch_host: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """Build a model and load its weights. `sketch_host`: makes the host on "meta", where `make_host` cannot."""
    metadata = saved.metadata

    def build(host: nn.Module) -> nn.Module:
        model = build_msvit(adapt(host, metadata.get("merge_at")), metadata)
        if "decoder" not in metadata:
            return model
        if metadata["decoder"].keys() != {"decoder", "num_classes"}:
            raise ValueError(f"{saved.path}: the decoder is {metadata['decoder']!r:.200}, which is not what is saved")
        return attach_decoder(model, **metadata["decoder"])

    model: Any = filled(saved, lambda: build((sketch_host or make_host)()), lambda: build(make_host()))
    model.classes, model.run_record = metadata.get("classes"), from_dict(metadata.get("run"))
    with described_in(saved.path):
        if "preprocessing" in metadata:
            model.preprocessing = Preprocessing(**metadata["preprocessing"])
        restore_budget(model, metadata)
    return model.eval()


def _on_meta(host: nn.Module) -> nn.Module:
    sketched: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in host.parameters()}
    return deepcopy(host, sketched | {id(buffer): buffer.to("meta") for buffer in host.buffers()})
