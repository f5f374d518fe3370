"""Tokens as a map over the fine grid, and back."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from msvit.types import Layout, TokenBatch, id_table


def dense_map(tokens: TokenBatch) -> Float[Tensor, "b d hf wf"]:
    """Each fine patch gets the feature of the token that covers it; a coarse token is repeated k x k times."""
    layout = tokens.layout
    return tokens.x[_owner(layout)].unflatten(1, layout.grid.patches).permute(0, 3, 1, 2)


def from_dense(dense: Float[Tensor, "b d hf wf"], layout: Layout) -> Float[Tensor, "patches d"]:
    """The inverse: the map's value at each token that is not a prefix token, in the layout's order.

    A coarse token takes the value at the first fine patch of its cell (all k x k are the same in a dense map).
    """
    grid, slots = layout.grid, layout.patch_slots
    corner = torch.arange(grid.num_patches, device=dense.device).view(grid.patches)[:: grid.k, :: grid.k].flatten()
    place = torch.cat([corner, torch.arange(grid.num_patches, device=dense.device)])  # by id without prefix
    return dense.flatten(2).transpose(1, 2)[layout.image[slots], place[layout.token[slots] - layout.num_prefix]]


def _owner(layout: Layout) -> Int[Tensor, "b patches"]:
    """The slot of the active token that covers each fine patch."""
    grid, prefix = layout.grid, layout.num_prefix
    num_ids = prefix + grid.num_ids
    slot = torch.full((layout.batch * num_ids + 1,), -1, device=layout.token.device)
    slots = torch.arange(layout.token.shape[0], device=slot.device)
    place = layout.image * num_ids + layout.token
    slot[torch.where(layout.valid, place, layout.batch * num_ids)] = slots  # inactive ones go to the spare entry
    slot = slot[:-1].view(layout.batch, num_ids)
    cell, _ = id_table(grid, prefix, slot.device)
    fine, coarse = slot[:, prefix + grid.num_cells :], slot[:, prefix + cell[prefix + grid.num_cells :]]
    return torch.where(fine >= 0, fine, coarse)
