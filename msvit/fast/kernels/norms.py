"""Layer normalisation of rows, beside which a vector is added to them."""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from msvit.fast.kernels.sums import add_parts


@triton.jit
@no_type_check
def _norm_kernel(
    x, shift, weight, bias, y, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr, ADD_TO_X: tl.constexpr,
):  # fmt: skip
    # A program takes ROWS rows. Without SCALED only the shift is added; with ADD_TO_X it is added to x, after the norm.
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    inside = (i < rows) & (j < WIDTH)
    value = tl.load(x + i * WIDTH + j, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(shift + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    if ADD_TO_X:
        tl.store(x + i * WIDTH + j, (value + added).to(x.dtype.element_ty), mask=inside)
    else:
        value += added
    if SCALED:
        centred = tl.where(j < WIDTH, value - tl.sum(value, 1)[:, None] / WIDTH, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
        value = centred * scale[:, None] * tl.load(weight + j, mask=j < WIDTH, other=0.0).to(tl.float32)
        value += tl.load(bias + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    tl.store(y + i * WIDTH + j, value.to(y.dtype.element_ty), mask=inside)


@torch.library.custom_op("msvit::normalize_into", mutates_args=("y",))
def normalize_into(x: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, y: Tensor) -> None:
    """Write y = LayerNorm(x + shift) for x, y (rows, d) and shift (d,) in float32; without a weight y = x + shift."""
    _normalize(x, shift, weight, bias, eps, y, add_to_x=False)


@torch.library.custom_op("msvit::normalize_then_add", mutates_args=("x", "y"))
def normalize_then_add(x: Tensor, weight: Tensor, bias: Tensor, eps: float, added: Tensor, y: Tensor) -> None:
    """Write y = LayerNorm(x), then x += added, for x, y (rows, d) and added (d,)."""
    _normalize(x, added, weight, bias, eps, y, add_to_x=True)


def _normalize(
    x: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, y: Tensor, add_to_x: bool
) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    per_program, warps = max(1, 2048 // block), 1 if block <= 512 else 4  # what was fastest on an H200
    with torch.cuda.device_of(x):
        _norm_kernel[(triton.cdiv(rows, per_program),)](
            x, shift, weight, bias, y, rows, eps,
            WIDTH=width, BLOCK=block, ROWS=per_program, SCALED=weight is not None, ADD_TO_X=add_to_x, num_warps=warps,
        )  # fmt: skip


@triton.jit
@no_type_check
def _add_norm_kernel(
    x, u, added, weight, bias, total, y, centre, scale, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)[None, :]
    inside = (i < rows)[:, None] & (j < WIDTH)
    at = i[:, None] * WIDTH + j
    value = tl.load(x + at, mask=inside, other=0.0) + tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        value += tl.load(added + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    tl.store(total + at, value, mask=inside)
    mean = tl.sum(value, 1) / WIDTH
    centred = tl.where(j < WIDTH, value - mean[:, None], 0.0)
    unit = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    tl.store(centre + i, mean, mask=i < rows)
    tl.store(scale + i, unit, mask=i < rows)
    factor = tl.load(weight + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    shift = tl.load(bias + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    tl.store(y + at, (centred * unit[:, None] * factor + shift).to(y.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _add_norm_backward_kernel(
    dtotal, dy, total, centre, scale, weight, dx, du, sums, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    # A program takes every num_programs(0)-th tile of ROWS rows, and sums over its rows what weight and bias get and,
    # with SUMS = 3, what is added to all rows of u.
    part = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    has = (j < WIDTH)[None, :]
    factor = tl.load(weight + j, mask=j < WIDTH, other=0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    of_added = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * ROWS, rows, tl.num_programs(0) * ROWS):
        i = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (i < rows)[:, None] & has
        at = i[:, None] * WIDTH + j[None, :]
        wanted = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + at, mask=inside, other=0.0)
        if dtotal is not None:
            kept = tl.load(dtotal + at, mask=inside, other=0.0)
        mean = tl.load(centre + i, mask=i < rows, other=0.0)[:, None]
        unit = tl.load(scale + i, mask=i < rows, other=0.0)[:, None]
        normal = tl.where(has, (value - mean) * unit, 0.0)
        of_weight += tl.sum(wanted * normal, 0)
        of_bias += tl.sum(wanted, 0)
        slope = wanted * factor
        along = tl.sum(slope * normal, 1)[:, None] / WIDTH
        grad = unit * (slope - tl.sum(slope, 1)[:, None] / WIDTH - normal * along)
        if dtotal is not None:
            grad += kept
        tl.store(dx + at, grad, mask=inside)
        tl.store(du + at, grad.to(du.dtype.element_ty), mask=inside)
        if SUMS == 3:
            of_added += tl.sum(grad, 0)
    place = sums + part.to(tl.int64) * SUMS * WIDTH + j
    tl.store(place, of_weight, mask=j < WIDTH)
    tl.store(place + WIDTH, of_bias, mask=j < WIDTH)
    if SUMS == 3:
        tl.store(place + 2 * WIDTH, of_added, mask=j < WIDTH)


class Tiles(NamedTuple):
    """The division of rows among programs."""

    rows: int  # of a tile
    warps: int
    parts: int  # in which rows are summed before the parts are


def _tiles_backward(block: int) -> Tiles:
    """As many programs as an H200 holds at a time, or fewer: what was fastest there. A warp has a row to itself."""
    return Tiles(rows=2, warps=2, parts=1056) if block <= 512 else Tiles(rows=1, warps=4, parts=792)


@torch.library.custom_op("msvit::add_norm", mutates_args=())
def add_norm(
    x: Tensor, u: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return total = x + u + added (x in float32), LayerNorm(total) in `dtype`, and the rows' mean and 1 / deviation.

    `added` (d,), the bias of the layer that computed u, gets its gradient by the kernel that computes that of x.
    """
    x, u = x.contiguous(), u.contiguous()
    rows, width = x.shape
    total, y, centre, scale = _empty_add_norm(x, dtype)
    block = triton.next_power_of_2(width)
    per_program = max(1, 1024 // block)
    with torch.cuda.device_of(x):
        _add_norm_kernel[(triton.cdiv(rows, per_program),)](
            x, u, added, weight, bias, total, y, centre, scale, rows, eps,
            WIDTH=width, BLOCK=block, ROWS=per_program, num_warps=1 if block <= 512 else 4,
        )  # fmt: skip
    return total, y, centre, scale


@torch.library.custom_op("msvit::add_norm_backward", mutates_args=())
def _add_norm_backward(
    dtotal: Tensor | None, dy: Tensor, total: Tensor, centre: Tensor, scale: Tensor, weight: Tensor,
    dtype: torch.dtype, of_added: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx; du in `dtype`; gradients of weight and bias (2, d); that of `added` in `of_added`, empty if None."""
    dtotal, dy = None if dtotal is None else dtotal.contiguous(), dy.contiguous()
    rows, width = total.shape
    dx, du, of_norm, added = _empty_add_norm_backward(total, weight, dtype, of_added)
    block = triton.next_power_of_2(width)
    tiles, num_sums = _tiles_backward(block), 2 if of_added is None else 3
    sums = total.new_empty(tiles.parts, num_sums, width)
    with torch.cuda.device_of(total):
        _add_norm_backward_kernel[(tiles.parts,)](
            dtotal, dy, total, centre, scale, weight, dx, du, sums, rows,
            WIDTH=width, BLOCK=block, ROWS=tiles.rows, SUMS=num_sums, num_warps=tiles.warps,
        )  # fmt: skip
        add_parts(sums, of_norm, added)
    return dx, du, of_norm, added


def _empty_add_norm(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    per_row = x.new_empty(x.shape[0]), x.new_empty(x.shape[0])
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype), *per_row


def _empty_add_norm_backward(
    total: Tensor, weight: Tensor, dtype: torch.dtype, of_added: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = total.shape[1]
    added = total.new_empty(0 if of_added is None else width, dtype=of_added)
    return total.new_empty(total.shape), total.new_empty(total.shape, dtype=dtype), weight.new_empty(2, width), added


add_norm.register_fake(lambda x, u, added, weight, bias, eps, dtype: _empty_add_norm(x, dtype))


_add_norm_backward.register_fake(
    lambda dtotal, dy, total, centre, scale, weight, dtype, of_added: (
        _empty_add_norm_backward(total, weight, dtype, of_added)
    )
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, u, added, weight, *_ = inputs
    total, _, centre, scale = output
    ctx.dtype, ctx.of_added = u.dtype, None if added is None else added.dtype
    ctx.set_materialize_grads(False)  # nothing may follow the total: no zeros are written and read for it
    ctx.save_for_backward(total, centre, scale, weight)


def _differentiate_add_norm(ctx: Any, dtotal: Tensor | None, dy: Tensor | None, *others: Any) -> tuple[Any, ...]:
    total, centre, scale, weight = ctx.saved_tensors
    dy = torch.zeros_like(total) if dy is None else dy
    given = (dtotal, dy, total, centre, scale, weight, ctx.dtype, ctx.of_added)
    dx, du, of_norm, of_added = _add_norm_backward(*given)
    return dx, du, None if ctx.of_added is None else of_added, *of_norm, None, None


add_norm.register_autograd(_differentiate_add_norm, setup_context=_save)
