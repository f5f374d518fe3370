"""Layouts of a hierarchical host: whose fine tokens run, cell by cell, and where they lie at every scale.

    layout = CELL_MODES["packed"](gate, grid, coarse_stride=16)   # coarse tokens enter where a token covers 16 px
    places = layout.places(scale=8)                       # where the fine tokens of 8 px lie
    places.map                                            # (b, rows, columns): the slot of each token, -1: absent

The tokens of a cell lie together, and in it the four that will be merged lie side by side, at every scale: merging
patches is a reshape, whatever the mask, and never meets a token of another scale.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from msvit.caching import cache_by_size
from msvit.execution.layout import check_countable, take_rows
from msvit.shapes import Bool, Float, Int, Shaped
from msvit.tokens.patches import cut_patches
from msvit.types import GateOutput, ScaleGrid


@dataclass(frozen=True)
class Places:
    """The slots of the tokens of one scale: a cell has `side` x `side` consecutive slots, or is absent."""

    cell: Int[Tensor, "b hc wc"]  # the place of each cell among those that run, -1: absent
    side: int
    num_merges_left: int  # how often tokens of this scale will still be merged, four into one
    num_slots: int
    whole: bool  # every cell has a place, in order
    weight: Float[Tensor, "b hc wc"] | None = None  # w_j of Eq. 10; None: 1 for all that run, and no gradient

    @property
    def batch(self) -> int:
        return self.cell.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of tokens of the scale."""
        return self.cell.shape[1] * self.side, self.cell.shape[2] * self.side

    @property
    def rank(self) -> Int[Tensor, "side side"]:
        """Offsets of the tokens of a cell within its slots."""
        return rank_in_cell(self.side, self.num_merges_left, self.cell.device)

    @property
    def map(self) -> Int[Tensor, "b rows columns"]:
        """The slot of each token; -1: absent."""
        rows, columns = self.cell.shape[1:]
        cell = spread(self.cell, self.side)
        slot = cell * self.side**2 + self.rank.repeat(rows, columns)
        return slot if self.whole else torch.where(cell < 0, -1, slot)

    @property
    def image(self) -> Int[Tensor, " slots"]:
        """The image of the batch that each slot belongs to."""
        slot = torch.where((slot := self.map) < 0, self.num_slots, slot)
        image = torch.arange(self.batch, device=slot.device)[:, None, None].expand_as(slot)
        return image.new_zeros(self.num_slots + 1).scatter_(0, slot.flatten(), image.flatten())[:-1]


@dataclass(frozen=True)
class CellLayout:
    """The cells that run fine, and the coarse tokens that are embedded. Padding repeats the first cell."""

    grid: ScaleGrid
    coarse_stride: int  # px: the scale at which coarse tokens enter
    mask: Float[Tensor, "b hc wc"]  # 1 = fine; carries the gate's gradient
    fine: Int[Tensor, " cells"]  # cells whose fine tokens run: image * cells + cell
    coarse: Int[Tensor, " tokens"]  # coarse tokens that are embedded: image * tokens of that scale + token
    cell: Int[Tensor, "b hc wc"]  # the place of each cell among `fine`, -1: absent
    token: Int[Tensor, "b rows columns"]  # the place of each coarse token among `coarse`, -1: absent
    whole: bool  # all fine tokens run, in order

    @property
    def batch(self) -> int:
        return self.mask.shape[0]

    def places(self, scale: int) -> Places:
        """Return the slots of the fine tokens that cover `scale` px."""
        side = self.grid.coarse // scale
        needs_grad = self.mask.requires_grad and torch.is_grad_enabled()
        return Places(
            cell=self.cell, side=side, num_merges_left=(self.coarse_stride // scale).bit_length() - 1,
            num_slots=self.fine.shape[0] * side**2, whole=self.whole,
            weight=self.mask if self.whole or needs_grad else None,
        )  # fmt: skip


def spread(cells: Shaped[Tensor, "b hc wc"], side: int) -> Shaped[Tensor, "b rows columns"]:
    """Repeat each cell's value for its `side` x `side` tokens."""
    return cells.repeat_interleave(side, 1).repeat_interleave(side, 2)


@cache_by_size
def every_place(batch: int, rows: int, columns: int, device: torch.device) -> Places:
    """Return the places of tokens that are all present, in raster order."""
    place = torch.arange(batch * rows * columns, device=device).view(batch, rows, columns)
    return Places(cell=place, side=1, num_merges_left=0, num_slots=batch * rows * columns, whole=True)


@cache_by_size
def rank_in_cell(side: int, num_merges_left: int, device: torch.device) -> Int[Tensor, "side side"]:
    """Order blocks of 4^num_merges_left tokens by rows, with Z-order inside: four tokens to be merged are adjacent."""
    if num_merges_left == 0:
        return torch.arange(side**2, device=device).view(side, side)
    blocks = rank_in_cell(side // 2, num_merges_left - 1, device)
    quarter = torch.arange(4, device=device).view(2, 2).repeat(side // 2, side // 2)
    return 4 * blocks.repeat_interleave(2, 0).repeat_interleave(2, 1) + quarter


def masked_cells(gate: GateOutput, grid: ScaleGrid, coarse_stride: int) -> CellLayout:
    """Run everything, fine and coarse; keys of coarse cells have weight 0 (the definition)."""
    batch, (rows, columns) = gate.mask.shape[0], (grid.height // coarse_stride, grid.width // coarse_stride)
    cell, token = (every_place(batch, *size, gate.mask.device).cell for size in (grid.cells, (rows, columns)))
    return CellLayout(grid, coarse_stride, gate.mask, cell.flatten(), token.flatten(), cell, token, whole=True)


def packed_cells(
    gate: GateOutput, grid: ScaleGrid, coarse_stride: int, capacity: tuple[int, int] | None = None
) -> CellLayout:
    """Run fine tokens of fine cells, coarse tokens of the others. With `capacity` for so many of each nothing waits.

    If the gate is trained, the coarse tokens of fine cells are embedded too: its gradient needs both scales.
    """
    check_countable("mode 'packed'", gate.mask)
    fine = gate.mask.detach() > 0.5  # (b, hc, wc)
    needs_grad = gate.mask.requires_grad and torch.is_grad_enabled()
    coarse = spread(torch.ones_like(fine) if needs_grad else ~fine, grid.coarse // coarse_stride)
    num_fine, num_coarse = (None, None) if capacity is None else capacity
    cells, cell = compact_indices(fine, num_fine)
    tokens, token = compact_indices(coarse, num_coarse)
    return CellLayout(grid, coarse_stride, gate.mask, cells, tokens, cell, token, whole=False)


def compact_indices(
    which: Bool[Tensor, "b rows columns"], capacity: int | None = None
) -> tuple[Int[Tensor, " entries"], Int[Tensor, "b rows columns"]]:
    """Return flat indices of the true entries, in raster order, and each entry's index in that list, -1 if false."""
    flat = which.flatten()
    number = torch.where(flat, flat.cumsum(0) - 1, -1)
    if capacity is None:
        return flat.nonzero()[:, 0], number.view(which.shape)
    place = torch.where(flat, number, capacity)  # the others go to one entry past the end
    index = number.new_zeros(capacity + 1).scatter_(0, place, torch.arange(len(flat), device=flat.device))
    return index[:-1], number.view(which.shape)


CELL_MODES: dict[str, Callable[[GateOutput, ScaleGrid, int], CellLayout]] = {
    "packed": packed_cells,
    "masked": masked_cells,
}


def pixels_of(image: Float[Tensor, "b c h w"], which: Int[Tensor, " n"], side: int) -> Float[Tensor, "n c s s"]:
    """Return the squares of `side` px with these numbers, image after image in raster order."""
    return cut_patches(image, side).flatten(0, 1)[which].unflatten(1, (-1, side, side))


def join(
    fine: Float[Tensor, "slots d"], coarse: Float[Tensor, "tokens d"], layout: CellLayout
) -> Float[Tensor, "b rows columns d"]:
    """Return one token for every place of the scale at which coarse tokens enter.

    With w = 1 for fine, a token is w f + (1 - w) c. Where both are there the gate gets the gradient of the change;
    where one is absent it does not.
    """
    places = layout.places(layout.coarse_stride)
    slot = places.map  # (b, rows, columns)
    first = spread(layout.mask.detach(), places.side) > 0.5
    place = torch.where(first, slot, layout.token + fine.shape[0])
    both = torch.cat([fine, coarse])
    x = take_rows(both, place)
    if layout.mask.requires_grad and torch.is_grad_enabled():
        there = (slot >= 0) & (layout.token >= 0)
        change = fine[slot.clamp(min=0)] - coarse[layout.token.clamp(min=0)] if len(fine) else torch.zeros_like(x)
        weight = spread(layout.mask, places.side).to(x.dtype)[..., None]
        x = x + (weight - weight.detach()) * (change.detach() * there[..., None])
    return x
