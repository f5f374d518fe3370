"""The metadata of an exported file: what a server or a web page needs besides the graph.

    describe(model, grid, size=(224, 224))["msvit.classes"]
"""

from typing import Any

import torch

import msvit
from msvit.segmenter import Segmenter
from msvit.types import ScaleGrid


def describe(model: Any, grid: ScaleGrid, size: tuple[int, int]) -> dict[str, Any]:
    """Values for JSON. `size`: of the images; the grid is that of whole cells."""
    prepare = model.preprocessing
    return {
        "msvit.version": msvit.__version__,
        "msvit.task": "segmentation" if isinstance(model, Segmenter) else "classification",
        "msvit.input_size": [model.backbone.in_chans, *size],
        "msvit.resize": list(size),  # the crop is resized to these px, height and width
        "msvit.mean": None if prepare is None else list(prepare.mean),
        "msvit.std": None if prepare is None else list(prepare.std),
        "msvit.interpolation": None if prepare is None else prepare.interpolation,
        "msvit.crop": None if prepare is None else prepare.crop,
        "msvit.crop_mode": None if prepare is None else prepare.crop_mode,
        "msvit.classes": None if model.classes is None else list(model.classes),
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
    """GMACs of the dense host, of the gate, and of a forward by its number of tokens, gate included."""
    segments = isinstance(model, Segmenter)
    backbone, num_cells = model.backbone, grid.num_cells
    num_fine = torch.arange(num_cells + 1)
    fine = torch.arange(num_cells) < num_fine[:, None]
    macs = backbone.num_macs(fine.view(-1, *grid.cells), grid, None, not segments)
    macs = macs + (model.decoder_macs(grid) if segments else 0)
    gate = model.gate.num_macs(num_cells)
    tokens = backbone.num_tokens(num_fine, grid).tolist()
    by_tokens = {str(num): (value + gate) / 1e9 for num, value in zip(tokens, macs.tolist(), strict=True)}
    return {"dense": int(macs[-1]) / 1e9, "gate": gate / 1e9, "by_tokens": by_tokens}
