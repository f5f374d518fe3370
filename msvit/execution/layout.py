"""Layouts: which tokens run for a given mask, and in what order.

    masked(gate, grid, num_prefix)    # every token there could be; inactive ones have weight 0 (the definition)
    trimmed(gate, grid, num_prefix)   # as many as the longest image of the batch has (the paper's adaptive trimming)
    packed(gate, grid, num_prefix)    # active tokens only, images one after the other
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from msvit.types import GateOutput, Layout, ScaleGrid, id_table


@runtime_checkable
class Mode(Protocol):
    def __call__(self, gate: GateOutput, grid: ScaleGrid, num_prefix: int) -> Layout: ...


def per_token(cells: Float[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int) -> Float[Tensor, "b ids"]:
    """Spread a value in [0, 1] per cell over all token ids: 1 for prefix, 1 - value for coarse, value for fine."""
    value = cells.flatten(1)  # (b, cells)
    cell, _ = id_table(grid, num_prefix, value.device)
    fine = value[:, cell[num_prefix + grid.num_cells :]]  # (b, patches)
    return torch.cat([value.new_ones(value.shape[0], num_prefix), 1 - value, fine], dim=1)


def masked(gate: GateOutput, grid: ScaleGrid, num_prefix: int) -> Layout:
    weight = per_token(gate.mask, grid, num_prefix)  # (b, ids)
    token = torch.arange(weight.shape[1], device=weight.device).expand_as(weight)
    return _padded(token, weight, grid, num_prefix)


def trimmed(gate: GateOutput, grid: ScaleGrid, num_prefix: int) -> Layout:
    weight = per_token(gate.mask, grid, num_prefix)  # (b, ids)
    active = weight.detach() > 0.5
    longest = int(active.sum(1).max())
    # Active tokens first, then the inactive ones nearest to being active (section 2.3 sorts by the soft m).
    score = active + per_token(gate.sample.detach(), grid, num_prefix)
    score[:, :num_prefix] = torch.inf
    kept = score.argsort(dim=1, descending=True, stable=True)[:, :longest]
    kept = kept.sort(dim=1).values  # prefix first, then raster order
    return _padded(kept, weight.gather(1, kept), grid, num_prefix)


def packed(gate: GateOutput, grid: ScaleGrid, num_prefix: int) -> Layout:
    weight = per_token(gate.mask, grid, num_prefix)  # (b, ids)
    active = weight.detach() > 0.5
    image, token = active.nonzero(as_tuple=True)
    return Layout(
        grid=grid,
        num_prefix=num_prefix,
        batch=weight.shape[0],
        token=token,
        image=image,
        weight=weight[image, token],
        cu_seqlens=torch.nn.functional.pad(active.sum(1).cumsum(0), (1, 0)).int(),
        max_len=num_prefix + grid.num_patches,  # a bound known without asking the device
        padded=False,
    )


def _padded(token: Tensor, weight: Tensor, grid: ScaleGrid, num_prefix: int) -> Layout:
    batch, length = token.shape
    rows = torch.arange(batch + 1, device=token.device)
    return Layout(
        grid=grid,
        num_prefix=num_prefix,
        batch=batch,
        token=token.flatten(),
        image=rows[:-1].repeat_interleave(length),
        weight=weight.flatten(),
        cu_seqlens=(rows * length).int(),
        max_len=length,
        padded=True,
    )


MODES: dict[str, Mode] = {"packed": packed, "trimmed": trimmed, "masked": masked}
