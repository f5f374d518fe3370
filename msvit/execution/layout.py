"""Layouts: which tokens run for a given mask, and in what order.

    masked(gate, grid, num_prefix)    # every token there could be; inactive ones have weight 0 (the definition)
    trimmed(gate, grid, num_prefix)   # as many as the longest image of the batch has (the paper's adaptive trimming)
    packed(gate, grid, num_prefix)    # active tokens only, images one after the other
    packed(limit_tokens(gate, grid, 1600, 3, 4096), grid, num_prefix, slots=4096)   # never waits for the device
    stop_cut_gradients(gate.mask, layout)      # after trimming: cells whose fine tokens were cut have no gradient
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.checks import is_vmapped
from msvit.fast.find_kernels import kernels
from msvit.shapes import Bool, Float, Int, Shaped
from msvit.types import GateOutput, Layout, PackedLayout, PaddedLayout, ScaleGrid, changed, id_table, unchecked

AnyLayout = TypeVar("AnyLayout", bound=Layout)
Mode = Callable[[GateOutput, ScaleGrid, int], Layout]


def per_token(cells: Float[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int) -> Float[Tensor, "b ids"]:
    """Spread a value in [0, 1] per cell over all token ids: 1 for prefix, 1 - value for coarse, value for fine.

    NaN counts as 0: a cell without a decision is coarse in every layout, and `tokenize` marks its image.
    """
    value = cells.flatten(1).nan_to_num()  # (b, cells)
    cell, _ = id_table(grid, num_prefix, value.device)
    fine = value[:, cell[num_prefix + grid.num_cells :]]  # (b, patches)
    return torch.cat([value.new_ones(value.shape[0], num_prefix), 1 - value, fine], dim=1)


def masked(gate: GateOutput, grid: ScaleGrid, num_prefix: int) -> PaddedLayout:
    """Lay out every token there could be; inactive ones have weight 0 (the definition)."""
    weight = per_token(gate.mask, grid, num_prefix)  # (b, ids)
    token = torch.arange(weight.shape[1], device=weight.device).expand_as(weight)
    return _padded(token, weight, grid, num_prefix)


def trimmed(gate: GateOutput, grid: ScaleGrid, num_prefix: int) -> PaddedLayout:
    """Lay out as many tokens as the longest image has (the paper's adaptive trimming)."""
    check_countable("mode 'trimmed'", gate.mask)
    weight = per_token(gate.mask, grid, num_prefix)  # (b, ids)
    order, longest = _by_activity(gate.mask, gate.sample, grid, num_prefix)
    kept = order[:, : int(longest)].sort(dim=1).values  # prefix first, then raster order
    return _padded(kept, weight.gather(1, kept), grid, num_prefix)


def _by_activity(
    mask: Float[Tensor, "b hc wc"], sample: Float[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int
) -> tuple[Int[Tensor, "b ids"], Int[Tensor, ""]]:
    """Return each image's ids, active first, then by the soft m (section 2.3), and the most active of any image."""
    active = per_token(mask.detach(), grid, num_prefix) > 0.5  # (b, ids)
    score = active + per_token(sample.detach(), grid, num_prefix)
    score[:, :num_prefix] = torch.inf
    return score.argsort(dim=1, descending=True, stable=True), active.sum(1).max()


def stop_cut_gradients(mask: Float[Tensor, "b hc wc"], layout: Layout) -> None:
    """Let no gradient pass to a mask in cells whose fine tokens did not all run: coarse ones that were trimmed.

    What reaches such a cell comes from its coarse token alone: nothing says what fine ones would have been worth.
    """
    grid, device = layout.grid, mask.device
    cell, _ = id_table(grid, layout.num_prefix, device)
    fine = layout.token >= layout.num_prefix + grid.num_cells  # (slots,)
    place = layout.image * grid.num_cells + cell[layout.token].clamp(min=0)  # prefix tokens add nothing, anywhere
    num_fine = torch.zeros(mask.numel(), device=device).index_add_(0, place, fine.float())
    cut = (num_fine < grid.k**2).view_as(mask)
    mask.register_hook(lambda grad: grad.masked_fill(cut, 0))


def packed(gate: GateOutput, grid: ScaleGrid, num_prefix: int, slots: int | None = None) -> PackedLayout:
    """Lay out active tokens only. With `slots`, in which all must fit, padded to that length: no device sync."""
    check_countable("mode 'packed'", gate.mask)
    token, image, cu_seqlens = pack_indices(gate.mask.detach(), grid, num_prefix, slots)
    weight = slot_weights(gate.mask, grid, num_prefix, token, image, None if slots is None else cu_seqlens)
    return packed_layout(grid, num_prefix, token, image, weight, cu_seqlens, has_padding=slots is not None)


def packed_layout(
    grid: ScaleGrid,
    num_prefix: int,
    token: Tensor,
    image: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    has_padding: bool,
    has_inactive: bool = False,
    size: Tensor | None = None,
) -> PackedLayout:
    """Make a packed layout of its arrays."""
    max_tokens = grid.num_ids if has_inactive else grid.num_patches
    return unchecked(
        PackedLayout,
        grid=grid,
        num_prefix=num_prefix,
        batch=cu_seqlens.shape[0] - 1,
        token=token,
        image=image,
        weight=weight,
        cu_seqlens=cu_seqlens,
        max_len=num_prefix + max_tokens,  # a bound known without waiting for the device
        size=size,
        has_padding=has_padding,
        has_inactive=has_inactive,
    )


def num_tokens(batch: int, num_fine: int, grid: ScaleGrid, num_prefix: int) -> int:
    """Return the tokens of a batch in which `num_fine` cells are fine, prefix tokens included."""
    return batch * (num_prefix + grid.num_cells) + num_fine * (grid.k**2 - 1)


def pack_indices(
    mask: Float[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int, slots: int | None = None
) -> tuple[Int[Tensor, " slots"], Int[Tensor, " slots"], Int[Tensor, " b1"]]:
    """Return token id and image of each slot, and where images begin. Padding holds the last image's first cell.

    Without `slots` there is no padding; on a GPU the number of tokens is then waited for.
    """
    if mask.is_cuda and kernels is not None:
        if slots is None:
            slots = num_tokens(mask.shape[0], int((mask > 0.5).sum()), grid, num_prefix)
        return kernels.pack_indices(mask, num_prefix, *grid.cells, grid.k, slots)
    active = per_token(mask, grid, num_prefix) > 0.5  # (b, ids)
    if slots is not None:
        return _place(active, num_prefix, slots)
    image, token = active.nonzero(as_tuple=True)
    return token, image, F.pad(active.sum(1).cumsum(0), (1, 0)).int()


def pack_with_inactive(
    mode: str, mask: Float[Tensor, "b hc wc"], sample: Float[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int,
    slots: int,
) -> tuple[Int[Tensor, " slots"], Int[Tensor, " slots"], Int[Tensor, " b1"]]:  # fmt: skip
    """Pack indices for mode trimmed or masked, whose tokens are not all active. Nothing waits for the device."""
    runs = torch.ones(mask.shape[0], num_prefix + grid.num_ids, dtype=torch.bool, device=mask.device)
    if mode == "trimmed":
        order, longest = _by_activity(mask, sample, grid, num_prefix)
        kept = torch.arange(runs.shape[1], device=mask.device) < longest
        runs = runs.scatter(1, order, kept.expand_as(runs))
    return _place(runs, num_prefix, slots)


def _place(
    runs: Bool[Tensor, "b ids"], num_prefix: int, slots: int
) -> tuple[Int[Tensor, " slots"], Int[Tensor, " slots"], Int[Tensor, " b1"]]:
    """Token id and image of each slot, and where images begin, for the tokens that run."""
    place = runs.flatten().cumsum(0) - 1
    place = torch.where(runs.flatten() & (place < slots), place, slots)  # the others to one slot past the end
    image, token = (torch.arange(n, device=runs.device) for n in runs.shape)
    token = place.new_full((slots + 1,), num_prefix).scatter_(0, place, token.repeat(len(image)))[:-1]
    image = place.new_full((slots + 1,), len(image) - 1).scatter_(0, place, image.repeat_interleave(runs.shape[1]))
    return token, image[:-1], F.pad(runs.sum(1).cumsum(0), (1, 0)).int().clamp(max=slots)


def slot_weights(
    mask: Float[Tensor, "b hc wc"], grid: ScaleGrid, num_prefix: int,
    token: Int[Tensor, " slots"], image: Int[Tensor, " slots"], cu_seqlens: Int[Tensor, " b1"] | None,
    all_active: bool = True,
) -> Float[Tensor, " slots"]:  # fmt: skip
    """Return the weight of each slot, with the mask's gradient; 0 for padding, if `cu_seqlens` is given."""
    if not all_active or (mask.requires_grad and torch.is_grad_enabled()):
        weight = per_token(mask, grid, num_prefix)
        weight = weight.flatten().index_select(0, image * weight.shape[1] + token)
    else:
        weight = torch.ones(token.shape[0], dtype=mask.dtype, device=token.device)
    if cu_seqlens is None:
        return weight
    return weight * (torch.arange(token.shape[0], device=token.device) < cu_seqlens[-1])


def limit_tokens(gate: GateOutput, grid: ScaleGrid, min_tokens: int, per_cell: int, max_tokens: int) -> GateOutput:
    """Limit a batch to `max_tokens` by its scores; all coarse it has `min_tokens`, `per_cell` more for a fine cell."""
    batch = gate.mask.shape[0]
    if max_tokens < min_tokens:
        max_needed = min_tokens + batch * grid.num_cells * per_cell
        raise ValueError(
            f"max_tokens is {max_tokens}, but {batch} images of {grid.height}x{grid.width}px have {min_tokens} tokens "
            f"with all cells coarse; pass at least that ({max_needed} always suffice)"
        )
    if not per_cell:  # cells are patches
        return gate
    capacity = (max_tokens - min_tokens) // per_cell
    sure = gate.mask.detach() + gate.sample.detach()  # all fine cells before all coarse ones
    sure = sure.nan_to_num(nan=-1).flatten(1).T  # (cells, b): of cells that are equally sure, each image keeps as many
    order = sure.flatten().argsort(descending=True, stable=True)
    kept = torch.zeros_like(sure).flatten().scatter(0, order[:capacity], 1.0).view_as(sure).T
    return changed(gate, mask=gate.mask * kept.reshape(gate.mask.shape))


def check_not_traced(what: str, remedy: str = "use model.with_options(mode='masked')") -> None:
    """Raise ValueError inside torch.jit.trace, which records the example's numbers of tokens as constants."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise ValueError(
            f"torch.jit.trace would keep what {what} decides for its example; call msvit.export(model, 'model.onnx'), "
            f"or 'model.pt2', or {remedy} first"
        )


def check_countable(what: str, mask: Tensor) -> None:
    """Raise ValueError where the fine cells cannot be counted: in torch.jit.trace, torch.vmap, on the device "meta"."""
    check_not_traced(what)
    if mask.is_meta or is_vmapped(mask):
        where = "tensors on the device 'meta' have no values" if mask.is_meta else "torch.vmap lets no value be read"
        raise ValueError(
            f"{what} counts the fine cells of each batch, but {where}; use model.with_options(mode='masked')"
        )


def _padded(token: Tensor, weight: Tensor, grid: ScaleGrid, num_prefix: int) -> PaddedLayout:
    batch, length = token.shape
    rows = torch.arange(batch + 1, device=token.device)
    return unchecked(
        PaddedLayout,
        grid=grid,
        num_prefix=num_prefix,
        batch=batch,
        token=token.flatten(),
        image=rows[:-1].repeat_interleave(length),
        weight=weight.flatten(),
        cu_seqlens=(rows * length).int(),
        max_len=length,
    )


MODES: dict[str, Mode] = {"packed": packed, "trimmed": trimmed, "masked": masked}


def take_rows(x: Shaped[Tensor, "n ..."], index: Int[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return `x[index]`, for indices >= 0 that may repeat, with the same gradient in every run.

    On a CPU the threads of the gradient of `x[index]` add in any order, and wait for each other; on a GPU it is that of
    `index_select` which does.
    """
    return x.index_select(0, index.flatten()).unflatten(0, index.shape) if x.is_cpu else x[index]
