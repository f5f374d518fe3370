"""The metadata of an exported file: what a server or a web page needs besides the graph."""

from dataclasses import asdict
from typing import Any

import torch

import msvit
from msvit.prediction import class_names
from msvit.segmenter import Segmenter
from msvit.types import ScaleGrid


def describe(model: Any, grid: ScaleGrid, size: tuple[int, int]) -> dict[str, Any]:
    """Return values for JSON. `size`: of the images; the grid is that of whole cells."""
    prepare = model.preprocessing
    prepared = {} if prepare is None else asdict(prepare)
    return {
        "msvit.version": msvit.__version__,
        "msvit.task": "segmentation" if isinstance(model, Segmenter) else "classification",
        "msvit.input_size": [model.backbone.in_chans, *size],
        "msvit.resize": list(size),  # the crop is resized to these px, height and width
        **{f"msvit.{name}": prepared.get(name) for name in ("mean", "std", "interpolation", "crop", "crop_mode")},
        "msvit.classes": list(class_names(model)),
        "msvit.num_classes": model.num_classes,
        "msvit.coarse": model.coarse,
        "msvit.fine": model.fine,
        "msvit.cells": list(grid.cells),
        "msvit.num_prefix": model.backbone.num_prefix,
        "msvit.gate": type(model.gate).__name__,
        "msvit.threshold": model.gate.config.get("threshold"),
        "msvit.mode": model.mode,
        "msvit.macs": count_macs(model, grid),
    }


def count_macs(model: Any, grid: ScaleGrid) -> dict[str, Any]:
    """Return GMACs of the dense host, of the gate, and of a forward by its number of tokens, gate included."""
    tokens, macs = costs_by_num_fine(model, grid)
    gate, dense = model.gate.num_macs(grid.num_cells), macs[-1]
    if (reducer := model.reducer) is not None:  # all cells are fine, and tokens are merged
        saved = model.backbone.dense_macs(grid) - model.backbone.dense_macs(grid, reducer)
        tokens, macs = [reducer.max_left(len(model.host.blocks) - 1, grid)], [dense - saved]
    by_tokens = {str(num): value / 1e9 for num, value in zip(tokens, macs, strict=True)}
    return {"dense": (dense - gate) / 1e9, "gate": gate / 1e9, "by_tokens": by_tokens}


def costs_by_num_fine(model: Any, grid: ScaleGrid) -> tuple[list[int], list[int]]:
    """Return tokens and multiply-adds, gate included, of a ViT's image with 0, 1, ... fine cells."""
    segments, num_cells = isinstance(model, Segmenter), grid.num_cells
    num_fine = torch.arange(num_cells + 1)
    fine = (torch.arange(num_cells) < num_fine[:, None]).view(-1, *grid.cells)
    macs = model.backbone.num_macs(fine, grid, None, not segments) + model.gate.num_macs(num_cells)
    macs = macs + (model.decoder_macs(grid) if segments else 0)
    return model.backbone.num_tokens(num_fine, grid).tolist(), macs.tolist()
