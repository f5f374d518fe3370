"""Saving and loading models: one safetensors file with the weights and what rebuilds the model. Never a pickle.

    msvit.save(model, "run/best")          # run/best/model.safetensors; run/best/msvit.json is there for people to read
    model = msvit.load("run/best")
    model = msvit.load("runs/photos")      # the trained model of a run, with its class names and preprocessing

How such folders are written and checked is in `saved_folder.py`, and so is what saves a gate alone. What builds hosts
is imported where used: timm takes long to import.
"""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from msvit.checks import check_path
from msvit.descriptions import build_gate, build_part, describe_gate, describe_part
from msvit.gates import Gate
from msvit.preprocessing import Preprocessing
from msvit.run_record import from_dict, read_run_record, to_dict
from msvit.saved_folder import (
    FORMAT,
    MODEL,
    Saved,
    described_in,
    filled,
    load_gate,
    read_folder,
    save_gate,
    write_folder,
)

__all__ = ["load", "load_gate", "load_or_build", "save", "save_gate"]

RUN_MODEL = "model"  # in a run folder


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a model. It is replaced whole or not at all."""
    import timm

    from msvit.host_config import describe_host
    from msvit.model import MSViT, inner_msvit
    from msvit.reduction import REDUCERS
    from msvit.segmenter import Segmenter

    if inner_msvit(model) is not None:
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
        "reducer": None if model.reducer is None else describe_part(model.reducer, REDUCERS, "reducer"),
    }
    if model.proportional_attention:
        about["proportional_attention"] = model.proportional_attention
    if model._preprocessing is not None:
        about["preprocessing"] = asdict(model._preprocessing)
    if model.run_record is not None:
        about["run"] = to_dict(model.run_record)
    if isinstance(model, Segmenter):
        about["decoder"] = model.describe_decoder()
    return write_folder(check_path("folder", folder), MODEL, model, about)


def load(folder: str | os.PathLike[str], host: nn.Module | None = None) -> Any:
    """Read an `MSViT` or a `Segmenter`: a folder written by `save`, or a run of `msvit train` that is finished.

    `host`: one you built yourself, if it could not be described when saving. Only what `save` writes is read. No code
    of the folder runs, and nothing is fetched from anywhere.
    """
    path = check_path("folder", folder)
    saved = read_folder(inside := _model_folder(path), MODEL)
    if inside != path:  # a run
        saved.about["run"] = None if (record := read_run_record(path)) is None else to_dict(record)
    if host is not None:
        return _rebuild(saved, lambda: host, lambda: _on_meta(host))
    if saved.about["host"] is None:
        raise ValueError(
            f"{folder} holds weights of a host that msvit cannot build by itself; "
            f"build the same host and pass it: msvit.load(folder, host=my_vit), for a model of transformers "
            f"what its from_pretrained or its class makes"
        )
    return _rebuild(saved, lambda: _rebuild_host(saved.about["host"]))


def is_run(folder: Path) -> bool:
    """Whether a folder is a run of `msvit train`; `save_pretrained` writes a config.json too, beside the weights."""
    return (folder / "config.json").is_file() and not (folder / MODEL.weights).is_file()


def _model_folder(folder: Path) -> Path:
    """The folder itself or, of a run, the one inside it that `save` wrote."""
    if not is_run(folder):
        return folder
    if not (folder / RUN_MODEL).is_dir():
        raise ValueError(
            f"{folder} is a run without a trained model yet; finish it with msvit train RECIPE --resume --out {folder}"
        )
    return folder / RUN_MODEL


def load_or_build(folder: Path, make_host: Callable[[], nn.Module]) -> Any:
    """As `load`; a host that could not be described when saving is made by `make_host`."""
    saved = read_folder(folder, MODEL)
    about = saved.about["host"]
    return _rebuild(saved, make_host if about is None else lambda: _rebuild_host(about))


def _rebuild(
    saved: Saved, make_host: Callable[[], nn.Module], sketch_host: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """`sketch_host`: a host of the same sizes on the device "meta", where `make_host` cannot make one."""
    from msvit.conversion import to_msvit
    from msvit.reduction import REDUCERS
    from msvit.segmenter import convert_segmenter

    about = saved.about

    def build(host: nn.Module) -> nn.Module:
        options = ("coarse", "mode", "merge_at", "proportional_attention")
        parts: dict[str, Any] = {name: about[name] for name in options if about.get(name)}
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

    model = filled(saved, lambda: build((sketch_host or make_host)()), lambda: build(make_host()))
    model.classes, model.run_record = about.get("classes"), from_dict(about.get("run"))
    if "preprocessing" in about:
        with described_in(saved.path):
            model.preprocessing = Preprocessing(**about["preprocessing"])
    return model.eval()


def _rebuild_host(about: dict[str, Any]) -> nn.Module:
    from msvit.host_config import rebuild_host

    return rebuild_host(about)


def _on_meta(host: nn.Module) -> nn.Module:
    """A copy without memory for its weights."""
    sketched: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in host.parameters()}
    return deepcopy(host, sketched | {id(buffer): buffer.to("meta") for buffer in host.buffers()})
