"""Tokens as a map over the fine grid, and back."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from msvit.types import Layout, TokenBatch, id_table


def dense_map(tokens: TokenBatch) -> Float[Tensor, "b d hf wf"]:
    """Each fine patch gets the feature of the token that covers it; a coarse token is repeated k x k times.

    As in Eq. 10 a token counts with its weight, w x + (1 - w) x', where x' is its inactive twin of the other scale.
    With w = 1 that is x, and the gate learns what the other choice would have changed here. Where the twin did not run,
    as in packed mode, the gate gets no gradient from the map.
    """
    layout = tokens.layout
    fine, coarse = _slots(layout)  # (b, patches) each: -1 where there is none
    valid = layout.valid
    own = torch.where((fine >= 0) & valid[fine], fine, coarse)
    x = tokens.x[own]  # (b, patches, d)
    if layout.padded and layout.weight.requires_grad and torch.is_grad_enabled():
        twin = torch.where(own == fine, coarse, fine)
        change = (x - tokens.x[twin]).detach() * (twin >= 0)[..., None]
        weight = layout.weight[own][..., None].to(x.dtype)
        x = x + (weight - weight.detach()) * change
    return x.unflatten(1, layout.grid.patches).permute(0, 3, 1, 2)


def from_dense(dense: Float[Tensor, "b d hf wf"], layout: Layout) -> Float[Tensor, "patches d"]:
    """The inverse: the map's value at each token that is not a prefix token, in the layout's order.

    A coarse token takes the value at the first fine patch of its cell (all k x k are the same in a dense map).
    """
    grid, slots = layout.grid, layout.patch_slots
    corner = torch.arange(grid.num_patches, device=dense.device).view(grid.patches)[:: grid.k, :: grid.k].flatten()
    place = torch.cat([corner, torch.arange(grid.num_patches, device=dense.device)])  # by id without prefix
    return dense.flatten(2).transpose(1, 2)[layout.image[slots], place[layout.token[slots] - layout.num_prefix]]


def _slots(layout: Layout) -> tuple[Int[Tensor, "b patches"], Int[Tensor, "b patches"]]:
    """For each fine patch the slots of its own token and of its cell's, -1 where that did not run."""
    grid, prefix = layout.grid, layout.num_prefix
    num_ids = prefix + grid.num_ids
    slot = torch.full((layout.batch * num_ids + 1,), -1, device=layout.token.device)
    slots = torch.arange(layout.token.shape[0], device=slot.device)
    place = layout.image * num_ids + layout.token
    if layout.spare:
        place = torch.where(layout.valid, place, layout.batch * num_ids)  # they belong to no image
    slot[place] = slots
    slot = slot[:-1].view(layout.batch, num_ids)
    cell, _ = id_table(grid, prefix, slot.device)
    return slot[:, prefix + grid.num_cells :], slot[:, prefix + cell[prefix + grid.num_cells :]]
