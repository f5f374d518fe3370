"""Tokens as a map over the fine grid, and back."""

import torch
from torch import Tensor

from msvit.checks import check_kind, check_tensor
from msvit.execution.layout import take_rows
from msvit.shapes import Float
from msvit.types import Layout, TokenBatch


def dense_map(tokens: TokenBatch) -> Float[Tensor, "b d hf wf"]:
    """Map features to the fine grid: each patch gets those of the token that covers it.

    As in Eq. 10 a token counts with its weight, w x + (1 - w) x', where x' is the inactive token of the other scale.
    With w = 1 that is x, and its gradient is what the other scale would have changed. Where that token did not run,
    as in packed mode, the gate gets no gradient from the map.

    Merged and fused tokens are repeated over all they cover. Patches that a reducer has dropped are 0. With a reducer
    the map has no gradient for the gate, and an average over patches none for inactive tokens.
    """
    check_kind("tokens", tokens, TokenBatch, "a TokenBatch, such as model(images).tokens")
    layout, owner = tokens.layout, tokens.layout.owner
    x = take_rows(tokens.x, owner.clamp(min=0))  # (b, patches, d)
    if layout.patch_to_slot is not None:
        x = x.masked_fill((owner < 0)[..., None], 0)
    elif layout.has_inactive and layout.weight.requires_grad and torch.is_grad_enabled():
        other = layout.covering(~layout.valid & ~layout.padding)
        change = (x - tokens.x[other]).detach() * (other >= 0)[..., None]
        weight = take_rows(layout.weight, owner.clamp(min=0))[..., None].to(x.dtype)
        x = x + (weight - weight.detach()) * change
    return x.unflatten(1, layout.grid.patches).permute(0, 3, 1, 2)


def from_dense(dense: Float[Tensor, "b d hf wf"], layout: Layout) -> Float[Tensor, "patches d"]:
    """Return the map's value at each token (the first patch it covers) except prefix tokens: inverts `dense_map`."""
    check_kind("layout", layout, Layout, "a Layout, such as model(images).tokens.layout")
    check_tensor("dense", dense, (layout.batch, None, *layout.grid.patches), "b, d, hf, wf of the layout", kind="real")
    grid, slots = layout.grid, layout.patch_slots
    patches = torch.arange(grid.num_patches, device=slots.device)
    if layout.patch_to_slot is None:  # inactive tokens have a first patch, too
        corner = patches.view(grid.patches)[:: grid.k, :: grid.k].flatten()
        first = torch.cat([patches.new_zeros(layout.num_prefix), corner, patches])[layout.token]  # by id
    else:
        num = layout.token.shape[0]
        slot = torch.where(layout.patch_to_slot >= 0, layout.patch_to_slot, num).flatten()
        last = torch.full((num + 1,), grid.num_patches - 1, device=slots.device)
        first = last.scatter_reduce(0, slot, patches.repeat(layout.batch), "amin")[:-1]
    return dense.flatten(2).transpose(1, 2)[layout.image[slots], first[slots]]
