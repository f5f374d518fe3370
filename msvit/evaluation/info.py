"""What a model would cost, from all coarse to all fine, without weights or images."""

from dataclasses import dataclass

import timm
import torch

from msvit.conversion import convert
from msvit.host_config import check_name, without_weights
from msvit.model import MSViT
from msvit.types import ScaleGrid


@dataclass(frozen=True)
class Row:
    share: float  # of fine cells
    tokens: int  # prefix not counted
    gmacs: float  # gate included


@dataclass(frozen=True)
class Info:
    name: str
    size: int
    fine: int
    coarse: int
    parameters: int
    gate_parameters: int
    gate_gmacs: float
    dense_gmacs: float
    rows: list[Row]


def describe(name: str, coarse: int | None = None, size: int | None = None) -> Info:
    """Build the model without memory for its weights, and count."""
    check_name(name)
    model = without_weights(lambda: convert(timm.create_model(name, pretrained=False), coarse=coarse))
    side = size or model.backbone.native_patches[0] * model.fine // model.coarse * model.coarse
    grid = ScaleGrid(side, side, fine=model.fine, coarse=model.coarse)
    gate = model.gate.num_macs(grid.num_cells)
    rows = []
    for share in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
        tokens = grid.num_cells + (grid.k**2 - 1) * round(share * grid.num_cells)
        rows.append(Row(share, tokens, (_macs(model, tokens) + gate) / 1e9))
    return Info(
        name=name,
        size=side,
        fine=model.fine,
        coarse=model.coarse,
        parameters=sum(p.numel() for p in model.host.parameters()),
        gate_parameters=sum(p.numel() for p in model.gate.parameters()),
        gate_gmacs=gate / 1e9,
        dense_gmacs=_macs(model, grid.num_patches) / 1e9,
        rows=rows,
    )


def _macs(model: MSViT, tokens: int) -> int:
    return int(model.backbone.num_macs(torch.tensor([tokens]))[0])
