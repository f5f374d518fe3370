"""Smaller batches of the tokens that are left after a reduction. Packed: the others are gone; padded: weight 0."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.shapes import Bool, Int
from msvit.types import Layout, PackedLayout, PaddedLayout, TokenBatch, changed


class Rows:
    """The slots of each image in a row of its own, all rows equally wide."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.batch = layout.batch
        self.width = width(layout)
        self.place: Tensor | None = None  # of each slot among all rows; None where they lie there already
        if isinstance(layout, PackedLayout) and not layout.is_full:
            slots = torch.arange(layout.token.shape[0], device=layout.token.device)
            place = layout.image * self.width + slots - layout.cu_seqlens[layout.image]
            # Padding goes to one entry past the end.
            self.place = torch.where(slots < layout.cu_seqlens[-1], place, self.batch * self.width)

    def spread(self, values: Tensor, fill: bool | int | float) -> Tensor:
        """Spread (slots, ...) to (b, n, ...), with `fill` where an image has no slot."""
        if self.place is None:
            return values.unflatten(0, (self.batch, -1))
        rows = values.new_full((self.batch * self.width + 1, *values.shape[1:]), fill)
        return rows.index_copy(0, self.place, values)[:-1].unflatten(0, (self.batch, -1))

    def collect(self, rows: Tensor) -> Tensor:
        """Collect (b, n, ...) to (slots, ...), the inverse of `spread`; padding gets any values."""
        flat = rows.flatten(0, 1)
        return flat if self.place is None else flat[self.place.clamp(max=flat.shape[0] - 1)]

    def slot(self, position: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        """Convert positions in an image to slots."""
        last = self.layout.token.shape[0] - 1
        return (self.layout.cu_seqlens[:-1, None] + position).clamp(max=last)


def width(layout: Layout) -> int:
    """Return the slots of the longest image; on a GPU, which would have to be waited for, an upper bound."""
    if not isinstance(layout, PackedLayout) or layout.has_padding or layout.token.is_cuda or layout.is_full:
        return layout.max_len
    return max(layout.lengths)


def rank(score: Tensor) -> Int[Tensor, "b n"]:
    """Return each entry's rank in its row, 0 for the highest; of equal ones the earlier is higher."""
    order = score.argsort(dim=1, descending=True, stable=True)
    return torch.empty_like(order).scatter(1, order, torch.arange(score.shape[1], device=score.device).expand_as(order))


def with_owners(tokens: TokenBatch) -> TokenBatch:
    """Set `patch_to_slot`, as after any reduction, so that the first reduction is like the others."""
    layout = tokens.layout
    return changed(tokens, layout=changed(layout, patch_to_slot=layout.owner))


def candidates(rows: Rows) -> Bool[Tensor, "b n"]:
    """Return which tokens may be taken away: active ones, except prefix tokens."""
    active = rows.spread(rows.layout.valid, False)
    return active & (torch.arange(rows.width, device=active.device) >= rows.layout.num_prefix)


def compact(
    tokens: TokenBatch,
    keep: Bool[Tensor, " slots"],
    into: Int[Tensor, " slots"],
    max_len: int,
    max_kept: int,
    position: Int[Tensor, " slots"] | None = None,
) -> TokenBatch:
    """Return the batch with only those tokens active that are kept; inactive ones of a padded layout stay inactive.

    `into`: the slot that takes over what a slot covered: itself if it is kept, -1 if none does. `max_len`,
    `max_kept`: the most slots of an image, and of the batch. `position`: the new order inside an image, if it changes.
    """
    layout = tokens.layout
    if isinstance(layout, PaddedLayout):
        return _compact_padded(tokens, keep, into, position)
    assert isinstance(layout, PackedLayout)
    slots = torch.arange(layout.token.shape[0], device=layout.token.device)
    keep = keep & layout.valid
    before = F.pad(keep.cumsum(0), (1, 0))  # kept tokens in front of each slot
    cu_seqlens = before[layout.cu_seqlens.long()].to(layout.cu_seqlens.dtype)
    if not layout.has_padding and not layout.token.is_cuda and not torch.compiler.is_compiling():
        total, has_padding = int(keep.sum()), False
    else:  # nothing waits for a GPU
        total, has_padding = max_slots(layout, max_len, max_kept)
    place = before[:-1] if position is None else cu_seqlens[layout.image] + position
    place = torch.where(keep, place, total)  # the others to one slot past the end
    index = slots.new_full((total + 1,), layout.token.shape[0] - 1)  # padding repeats the last slot
    index = index.scatter(0, place, slots)[:-1]
    weight = layout.weight[index]
    if has_padding:
        weight = weight * (torch.arange(total, device=slots.device) < cu_seqlens[-1])
    smaller = changed(layout, cu_seqlens=cu_seqlens, max_len=max_len, has_padding=has_padding)
    return _gather(tokens, smaller, index, weight, _moved(layout, into, place))


def max_slots(layout: PackedLayout, max_len: int, max_kept: int) -> tuple[int, bool]:
    """Return slots enough for images of `max_len` and batches of `max_kept`, and whether some may be left over."""
    if layout.is_full:
        return layout.batch * max_len, False
    num_slots: Any = torch.sym_min(max_kept, layout.batch * max_len)  # `min` would be specialised on
    return num_slots, True


def _compact_padded(tokens: TokenBatch, keep: Tensor, into: Tensor, position: Tensor | None) -> TokenBatch:
    layout = tokens.layout
    weight = torch.where(keep | ~layout.valid, layout.weight, 0)
    if position is None:
        place = torch.arange(layout.token.shape[0], device=keep.device)
        return changed(tokens, layout=changed(layout, weight=weight, patch_to_slot=_moved(layout, into, place)))
    rest = (~keep).view(layout.batch, -1)
    behind = keep.view(layout.batch, -1).sum(1, keepdim=True) + rest.long().cumsum(1) - 1
    place = layout.cu_seqlens[layout.image] + torch.where(keep, position, behind.flatten())
    index = torch.empty_like(place).scatter(0, place, torch.arange(len(place), device=place.device))
    return _gather(tokens, layout, index, weight[index], _moved(layout, into, place))


def _gather(tokens: TokenBatch, layout: Layout, index: Tensor, weight: Tensor, patch_to_slot: Tensor) -> TokenBatch:
    """Return the tokens at these slots, which have the new weights, in a layout that has the old slots."""
    size = None if layout.size is None else layout.size[index]
    token, image = layout.token[index], layout.image[index]
    moved = changed(layout, token=token, image=image, weight=weight, size=size, patch_to_slot=patch_to_slot)
    return changed(tokens, x=tokens.x[index], layout=moved)


def _moved(layout: Layout, into: Tensor, place: Tensor) -> Int[Tensor, "b patches"]:
    """Where each fine patch is now: what covered it went into another slot, and that one has moved."""
    owner = layout.owner
    taker = torch.where(owner >= 0, into[owner.clamp(min=0)], -1)
    return torch.where(taker >= 0, place[taker.clamp(min=0)], -1)
