"""Models as files for other engines: ONNX for onnxruntime, browsers and servers, or torch.export's pt2.

    msvit.export(model, "model.onnx")                       # images -> logits, mask, tokens
    msvit.export(model, "model.onnx", split=True)           # model.gate.onnx and model.trunk.onnx
    msvit.export(model, "model.onnx", batch="dynamic")      # any number of images
    msvit.export(model, "model.onnx", max_tokens_per_image=128)       # static shapes
    msvit.export(model, "model.pt2")                        # runs in a process without msvit

The number of tokens follows the image inside the file: one NonZero, then Gather. Models that merge tokens, as
`msvit.speed_up` makes them, have static shapes.
"""

import json
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from msvit.checks import check_choice, check_flag, check_int, check_ints, check_path
from msvit.fast.base import CompiledMSViT
from msvit.gates import AllFine, RandomGate
from msvit.integrations.export import onnx_file
from msvit.integrations.export.graph import GateGraph, TrunkGraph, WholeGraph
from msvit.integrations.export.metadata import describe
from msvit.model import MSViT, inner_msvit
from msvit.reduction import ToMe
from msvit.saving.file import check_writable, replacing
from msvit.segmenter import Segmenter
from msvit.types import ScaleGrid

__all__ = ["export"]

FORMATS = ("onnx", "pt2")
DYNAMIC = "dynamic"
MAX_BATCH = 2**16


@dataclass(frozen=True)
class Part:
    """A part of the export in a file of its own: a module, its example inputs by name, and a suffix of the path."""

    module: nn.Module
    inputs: dict[str, Tensor]
    name: str = ""


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    split: bool = False,
    batch: int | str = 1,
    max_tokens_per_image: int | None = None,
    int8: bool = False,
    features: bool = False,
    opset: int = 20,
    classes: Sequence[str] | None = None,
    size: int | tuple[int, int] | None = None,
) -> list[Path]:
    """Write a converted model, or a Segmenter, to a file that needs no msvit; return the paths written.

    One file takes `images` (n, 3, h, w), float32 and normalised, and returns `logits`, `mask` (n, rows, columns), True
    where a cell is fine, and `tokens` (n,), prefix not counted. `split=True` writes two: PATH.gate.onnx from images to
    `scores`, positive where a cell is fine, and `mask`; PATH.trunk.onnx from images and mask to `logits` and `tokens`.

    `format`: "onnx" or "pt2" (torch.export), by default the path's suffix. `batch`: a number of images, or "dynamic".
    The model's mode counts for more than one image: "packed" runs active tokens only and pads in attention, "trimmed"
    pads all images to the longest. `max_tokens_per_image`: every image has so many slots, prefix included, and all
    shapes are static; where the gate asks for more, the cells with the lowest scores stay coarse. `int8`: weights in
    8 bits. `features`: not logits but `features`, the map (n, d, hf, wf) after the last norm, and `prefix` (n, p, d).
    `classes`: names, if the model has none. `size`: of the images in px, by default that of the preprocessing.

    Preprocessing, classes, scales and multiply-adds are in the metadata, as JSON. The model stays as it is.
    """
    path, kind = check_target(path, format)
    for name, value in (("split", split), ("int8", int8), ("features", features)):
        check_flag(name, value)
    model = inner_msvit(model) or model
    check_supported(model)
    if model.reducer is not None:
        check_merging(model, split, max_tokens_per_image)
    if kind == "onnx":
        onnx_file.check_packages()
        onnx_file.check_opset(opset)
        onnx_file.check_size(model)
    elif int8:
        raise ValueError("int8 is done by onnxruntime's quantizer, but the format is 'pt2'; write format='onnx'")
    num = None if batch == DYNAMIC else check_int("batch", batch, at_least=1, at_most=MAX_BATCH, example="'dynamic'")
    if max_tokens_per_image is not None:
        check_int("max_tokens_per_image", max_tokens_per_image, at_least=1, example=128)
    copy: Any = deepcopy(model).cpu().float().eval().requires_grad_(False)
    if classes is not None:
        copy.classes = classes
    height, width = image_size(copy, size)
    below, right = (-side % copy.coarse if isinstance(copy, Segmenter) else 0 for side in (height, width))
    grid = ScaleGrid(height + below, width + right, fine=copy.fine, coarse=copy.coarse)
    options = {"batch": batch, "max_tokens_per_image": max_tokens_per_image, "int8": int8, "features": features}
    metadata = describe(copy, grid, (height, width)) | {f"msvit.{name}": value for name, value in options.items()}
    written = []
    with torch.no_grad():
        gate = GateGraph(copy, grid, max_tokens_per_image)
        trunk = TrunkGraph(copy, grid, num, max_tokens_per_image, features)
        images = torch.zeros(num or 2, copy.backbone.in_chans, height, width)
        mask = torch.zeros(num or 2, *grid.cells, dtype=torch.bool)
        both = {"images": images, "mask": mask}
        parts = [Part(WholeGraph(gate, trunk), {"images": images})]
        if split:
            parts = [Part(gate, {"images": images}, ".gate"), Part(trunk, both, ".trunk")]
        for part in parts:
            target = path.with_name(f"{path.stem}{part.name}{path.suffix}")
            metadata["msvit.part"] = part.name.removeprefix(".") or "model"
            write_part(part, target, kind, num is None, opset, int8 and part.name != ".gate", metadata)
            written.append(target)
    return written


def write_part(
    part: Part, path: Path, kind: str, dynamic: bool, opset: int, int8: bool, metadata: dict[str, Any]
) -> None:
    """Trace a part and write its file."""
    outputs = list(part.module(**part.inputs))
    program = trace(part, dynamic)
    metadata = metadata | {"msvit.inputs": list(part.inputs), "msvit.outputs": outputs}
    if kind == "pt2":
        with replacing(path) as file:
            torch.export.save(program, file, extra_files={"msvit.json": json.dumps(metadata)})
        return
    proto = onnx_file.to_onnx(program, list(part.inputs), outputs, opset)
    onnx_file.write_onnx(onnx_file.to_int8(proto) if int8 else proto, path, metadata)


def trace(part: Part, dynamic: bool) -> ExportedProgram:
    """Export a part by torch.export; `dynamic`: for any number of images."""
    axis = {0: Dim("batch", min=1, max=MAX_BATCH)}
    shapes = dict.fromkeys(part.inputs, axis) if dynamic else None
    with onnx_file.quiet():
        return torch.export.export(part.module.eval(), (), part.inputs, dynamic_shapes=shapes, strict=False)


def check_target(path: str | os.PathLike[str], format: str | None) -> tuple[Path, str]:
    """Return the path and the format. Raise ValueError unless a file can be written there."""
    path = check_path("path", path)
    named = path.suffix.removeprefix(".").lower()
    if format is None and named not in FORMATS:
        raise ValueError(f"path is {path}, whose format is not known; call it NAME.onnx or NAME.pt2, or pass format=")
    kind = check_choice("format", named if format is None else format, FORMATS)
    if named in FORMATS and named != kind:
        raise ValueError(f"path is {path}, but format is {kind!r}; call it {path.stem}.{kind}, or leave out format")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; pass the path of a file in it, such as {path / f'model.{kind}'}")
    check_writable(path.parent, "choose another path")
    return path, kind


def check_supported(model: Any) -> None:
    """Raise ValueError with the part in the way unless the model can be exported."""
    if isinstance(model, CompiledMSViT):
        raise ValueError(f"the model is a {type(model).__name__}; pass model.uncompiled() to msvit.export")
    if not isinstance(model, MSViT | Segmenter):
        name = type(model).__name__
        raise ValueError(f"export takes a converted model, got {name}; wrap it with msvit.convert first")
    if model.backbone.merge_at is not None:
        raise ValueError(
            f"a {type(model.host).__name__} cannot be exported: which windows have tokens depends on the image; "
            f"export a ViT"
        )
    if isinstance(model.gate, RandomGate):
        raise ValueError("a RandomGate cannot be exported, as files hold no generator; use another gate")


def check_merging(model: Any, split: bool, max_tokens_per_image: int | None) -> None:
    """Raise ValueError unless the reducer leaves as many tokens in every image, and no option is of gates."""
    name = type(model.reducer).__name__
    if not isinstance(model.reducer, ToMe):
        raise ValueError(
            f"the reducer {name} cannot be exported, a ToMe with all cells fine can: msvit.convert(host, "
            f"method='auto', budget=0.6), or model.with_options(reducer=None), with more tokens"
        )
    if not isinstance(model.gate, AllFine):
        gate, coarse = type(model.gate).__name__, model.coarse
        raise ValueError(
            f"the reducer {name} beside a {gate} cannot be exported: how many tokens each block keeps depends on the "
            f"image; leave out one: model.with_options(reducer=None), or gate=msvit.AllFine(coarse={coarse})"
        )
    if split or max_tokens_per_image is not None:
        option = "split=True" if split else f"max_tokens_per_image={max_tokens_per_image}"
        raise ValueError(f"{option} is for gates, but the model merges tokens, as many in every image; leave it out")


def image_size(model: Any, size: int | tuple[int, int] | None) -> tuple[int, int]:
    """Return height and width: those given, of the preprocessing, or that the host was built for."""
    if isinstance(size, int) and not isinstance(size, bool):
        size = (size, size)
    if size is not None:
        height, width = check_ints("size", size, 2, example=(224, 224))
        return height, width
    if model._preprocessing is not None:
        return (model._preprocessing.size,) * 2
    height, width = (num * model.fine for num in model.backbone.native_patches)
    return height, width
