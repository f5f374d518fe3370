"""Layouts whose numbers of tokens stay symbols while a model is exported: no Python number is read from a tensor.

    packed_one(mask, grid, num_prefix)           # one image: one NonZero, and all slots are its tokens
    packed_rows(mask, grid, num_prefix)          # any batch: active tokens only; attention pads to the longest image
    padded_rows(mask, grid, num_prefix)          # any batch: every image has as many slots as the longest
    fixed_rows(mask, grid, num_prefix, length)   # static shapes: every image has `length` slots
    fine_rows(mask, grid, num_prefix)            # all fine patches of every image, to be merged

They have the tokens of `packed` and `trimmed` in the same order, and give the same numbers. They are made of operations
that inference engines have: no sort, no search and no scatter.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.shapes import Bool, Float, Int
from msvit.types import Layout, ScaleGrid, changed

MASKED = -1e30  # added to the scores of padding: its exponential is 0; unlike -inf it is a number in every engine


@dataclass(frozen=True, kw_only=True)
class ExportLayout(Layout):
    """Tokens of images whose attention is one call: one row of slots per image."""

    active: Bool[Tensor, "b ids"]  # which tokens run
    rows: Int[Tensor, "b n"] | None = None  # the slots of each image; None: the slots lie in rows of `max_len` already
    back: Int[Tensor, " slots"] | None = None  # where each slot lies in the flattened rows, if there are `rows`
    inside: Bool[Tensor, "b n"] | None = None  # which slots of a row are active tokens of its image; None: all

    @property
    def owner(self) -> Int[Tensor, "b patches"]:
        if self.patch_to_slot is not None:
            return self.patch_to_slot
        place = self.active.long().cumsum(1) - 1 + self.cu_seqlens[:-1, None]  # (b, ids): the slot of each token
        first = self.num_prefix + self.grid.num_cells
        coarse = spread(place[:, self.num_prefix : first].unflatten(1, self.grid.cells), self.grid.k)
        return torch.where(self.active[:, first:], place[:, first:], coarse)

    @property
    def count(self) -> Int[Tensor, " b"]:
        if self.patch_to_slot is not None:  # merged: as many in each image
            return torch.full((self.batch,), self.max_len - self.num_prefix)
        return self.active.sum(1) - self.num_prefix

    @property
    def area(self) -> Int[Tensor, " slots"]:
        if self.patch_to_slot is None:
            area = torch.where(self.token < self.num_prefix + self.grid.num_cells, self.grid.k**2, 1)
        else:
            assert self.size is not None, "of merged tokens the patches that each covers"
            area = self.size.long()
        return torch.where(self.token < self.num_prefix, 0, area)

    def sum_by_image(self, x: Float[Tensor, "slots d"]) -> Float[Tensor, "b d"]:
        rows = self.in_rows(x[:, None])[:, 0]  # (b, n, d)
        return (rows if self.rows is None or self.inside is None else rows * self.inside[..., None]).sum(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, num_queries: int | None) -> Tensor:
        """Attend inside each image by two products: torch writes SDPA to ONNX with reshapes that OpenVINO rejects."""
        q, k, v = self.in_rows(q, num_queries), self.in_rows(k), self.in_rows(v)
        score = (q * scale) @ k.transpose(2, 3)  # (b, heads, queries, n)
        score = score if self.added is None else score + self.added
        y = (score.softmax(-1) @ v).transpose(1, 2).flatten(0, 1)  # (b n, heads, head_dim)
        return y if self.back is None or num_queries else y.index_select(0, self.back)

    @cached_property
    def added(self) -> Float[Tensor, "b 1 1 n"] | None:
        """Numbers added to the scores of each key: the logarithm of its size, and MASKED for padding; None: nothing."""
        padding = None if self.inside is None else torch.where(self.inside, 0.0, MASKED)[:, None, None]
        if self.size is None:
            return padding
        size = self.in_rows(self.size.log()[:, None, None]).transpose(2, 3)
        return size if padding is None else size + padding

    def in_rows(self, t: Float[Tensor, "slots heads head_dim"], num_queries: int | None = None) -> Tensor:
        """Return tokens (or queries) in one row per image, (b, heads, n, head_dim)."""
        length = num_queries or self.max_len
        if self.rows is not None and not num_queries:
            t = t.index_select(0, self.rows.flatten())
        rows = t[None] if self.batch == 1 else t.reshape(self.batch, length, *t.shape[1:])
        return rows.transpose(1, 2)


def packed_one(mask: Bool[Tensor, "1 hc wc"], grid: ScaleGrid, num_prefix: int) -> ExportLayout:
    """Lay out the active tokens of one image."""
    active = active_tokens(mask, grid, num_prefix)
    token = active[0].nonzero()[:, 0]
    check_between(token.shape[0], num_prefix + grid.num_cells, num_prefix + grid.num_patches)
    return ExportLayout(
        grid=grid, num_prefix=num_prefix, batch=1, token=token, image=torch.zeros_like(token),
        weight=torch.ones_like(token, dtype=torch.float32), cu_seqlens=F.pad(active.sum(1), (1, 0)),
        max_len=token.shape[0], active=active,
    )  # fmt: skip


def packed_rows(mask: Bool[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int) -> ExportLayout:
    """Lay out the active tokens of all images, one after the other."""
    active = active_tokens(mask, grid, num_prefix)
    image, token = active.nonzero(as_tuple=True)
    check_between(token.shape[0], num_prefix + grid.num_cells, active.shape[0] * (num_prefix + grid.num_patches))
    num = active.sum(1)
    end = num.cumsum(0)
    step = longest(active, grid, num_prefix)  # (n,): 0, 1, ...
    first = torch.arange(active.shape[0]) * step.shape[0]  # where each image begins in the flattened rows
    return ExportLayout(
        grid=grid, num_prefix=num_prefix, batch=active.shape[0], token=token, image=image,
        weight=torch.ones_like(token, dtype=torch.float32), cu_seqlens=F.pad(end, (1, 0)), max_len=step.shape[0],
        active=active, inside=step < num[:, None], rows=torch.minimum((end - num)[:, None] + step, end[:, None] - 1),
        back=(first - end + num).index_select(0, image) + torch.arange(token.shape[0]),
    )  # fmt: skip


def padded_rows(mask: Bool[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int) -> ExportLayout:
    """Lay out as many slots for every image as the longest has; those past an image's end repeat its last token."""
    one = packed_rows(mask, grid, num_prefix)
    assert one.rows is not None, "of images side by side"
    return in_fixed_rows(one.token.index_select(0, one.rows.flatten()).view_as(one.rows), one.active, grid, num_prefix)


def fixed_rows(mask: Bool[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int, length: int) -> ExportLayout:
    """Lay out `length` slots for every image, in which all must fit; inactive tokens fill the rest."""
    active = active_tokens(mask, grid, num_prefix)
    num_ids = active.shape[1]
    order = torch.where(active, 2 * num_ids, num_ids) - torch.arange(num_ids)  # active ones first, each by id: no ties
    return in_fixed_rows(order.float().topk(length, dim=1).indices, active, grid, num_prefix)


def fine_rows(mask: Bool[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int) -> ExportLayout:
    """Lay out all fine patches of every image, whatever the mask."""
    fine = torch.arange(num_prefix + grid.num_cells, num_prefix + grid.num_ids)
    token = torch.cat([torch.arange(num_prefix), fine]).expand(mask.shape[0], -1)
    active = active_tokens(torch.ones_like(mask), grid, num_prefix)
    return changed(in_fixed_rows(token, active, grid, num_prefix), inside=None)


def in_fixed_rows(token: Int[Tensor, "b n"], active: Tensor, grid: ScaleGrid, num_prefix: int) -> ExportLayout:
    """Return a layout of these tokens, of which each image's active ones come first."""
    batch, length = token.shape
    inside = torch.arange(length) < active.sum(1, keepdim=True)
    start = torch.arange(batch + 1) * length
    return ExportLayout(
        grid=grid, num_prefix=num_prefix, batch=batch, token=token.flatten(),
        image=torch.arange(batch)[:, None].expand(batch, length).flatten(), weight=inside.flatten().float(),
        cu_seqlens=start, max_len=length, active=active, inside=inside,
    )  # fmt: skip


def active_tokens(mask: Bool[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int) -> Bool[Tensor, "b ids"]:
    """Return which of an image's possible tokens run: prefix tokens, then cells, then fine patches."""
    prefix = torch.ones(mask.shape[0], num_prefix, dtype=torch.bool)
    return torch.cat([prefix, ~mask.flatten(1), spread(mask, grid.k)], dim=1)


def ranks(scores: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """Return the rank of each score in its image, 0 for the highest; of equal ones the first. Without a sort."""
    flat = scores.flatten(1)
    mine, other = flat[:, :, None], flat[:, None, :]
    before = torch.ones(flat.shape[1], flat.shape[1], dtype=torch.bool).tril(-1)
    ahead = (other > mine) | ((other == mine) & before)
    return ahead.float().sum(2).view_as(scores)


def spread(cells: Tensor, k: int) -> Tensor:
    """Repeat each cell's value (b, hc, wc) for its patches, (b, patches)."""
    batch, rows, columns = cells.shape
    return cells[:, :, None, :, None].expand(batch, rows, k, columns, k).flatten(1)


def longest(active: Bool[Tensor, "b ids"], grid: ScaleGrid, num_prefix: int) -> Int[Tensor, " n"]:
    """Return 0, 1, ... up to the largest number of active tokens, by NonZero: its length is no Python number."""
    step = (torch.arange(active.shape[1]) < active.sum(1).max()).nonzero()[:, 0]
    check_between(step.shape[0], num_prefix + grid.num_cells, num_prefix + grid.num_patches)
    return step


def check_between(num: int, minimum: int, maximum: int) -> None:
    """Let torch.export assume these bounds of a number that depends on data."""
    torch._check(num >= minimum)
    torch._check(num <= maximum)
