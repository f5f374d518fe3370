"""What a model would cost, from all coarse to all fine, without weights or images."""

from dataclasses import dataclass

import timm

from msvit.conversion import convert
from msvit.gates.fixed import centre_distance
from msvit.gates.ranking import top_share
from msvit.saving.host import build_on_meta, check_name
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


def describe(name: str, coarse: int | None = None, size: int | None = None, merge_at: int | None = None) -> Info:
    """Build the model without memory for its weights, and count. Fine cells lie in the centre, where that matters."""
    check_name(name)
    model = build_on_meta(lambda: convert(timm.create_model(name), coarse, "learned", merge_at=merge_at))
    side = size or model.backbone.native_patches[0] * model.fine // model.coarse * model.coarse
    grid = ScaleGrid(side, side, fine=model.fine, coarse=model.coarse)
    gate = model.gate.num_macs(grid.num_cells)
    rows = []
    for share in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
        fine = top_share(-centre_distance(*grid.cells)[None], share) > 0.5  # (1, hc, wc)
        tokens = int(model.backbone.num_tokens(fine.sum(), grid))
        rows.append(Row(share, tokens, (int(model.backbone.num_macs(fine, grid)[0]) + gate) / 1e9))
    parameters, in_gate = (sum(p.numel() for p in part.parameters()) for part in (model.backbone, model.gate))
    return Info(
        name=name, size=side, fine=model.fine, coarse=model.coarse, parameters=parameters, gate_parameters=in_gate,
        gate_gmacs=gate / 1e9, dense_gmacs=model.backbone.dense_macs(grid) / 1e9, rows=rows,
    )  # fmt: skip
