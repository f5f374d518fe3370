"""Layer normalisation of rows, beside which a vector is added to them."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    """y = LayerNorm(x + shift) for x, y (rows, d) and shift (d,) in float32; without a weight y = x + shift."""
    _normalize(x, shift, weight, bias, eps, y, add_to_x=False)


@torch.library.custom_op("msvit::normalize_then_add", mutates_args=("x", "y"))
def normalize_then_add(x: Tensor, weight: Tensor, bias: Tensor, eps: float, added: Tensor, y: Tensor) -> None:
    """y = LayerNorm(x), then x += added, for x, y (rows, d) and added (d,)."""
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
    x, u, weight, bias, total, y, centre, scale, rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)[None, :]
    inside = (i < rows)[:, None] & (j < WIDTH)
    at = i[:, None] * WIDTH + j
    value = tl.load(x + at, mask=inside, other=0.0) + tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
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
    dtotal, dy, total, centre, scale, weight, dx, du, sums, rows, per_part, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # A program takes the rows of one part, one by one, and sums the gradients of weight and bias over them.
    part = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    factor = tl.load(weight + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    for i in range(part * per_part, tl.minimum((part + 1) * per_part, rows)):
        at = i * WIDTH + j
        wanted = tl.load(dy + at, mask=j < WIDTH, other=0.0).to(tl.float32)
        value = tl.load(total + at, mask=j < WIDTH, other=0.0)
        kept = tl.load(dtotal + at, mask=j < WIDTH, other=0.0)
        unit = tl.load(scale + i)
        normal = tl.where(j < WIDTH, (value - tl.load(centre + i)) * unit, 0.0)
        of_weight += wanted * normal
        of_bias += wanted
        slope = wanted * factor
        along = tl.sum(slope * normal, 0) / WIDTH
        grad = kept + unit * (slope - tl.sum(slope, 0) / WIDTH - normal * along)
        tl.store(dx + at, grad, mask=j < WIDTH)
        tl.store(du + at, grad.to(du.dtype.element_ty), mask=j < WIDTH)
    place = sums + part * 2 * WIDTH + j
    tl.store(place, of_weight, mask=j < WIDTH)
    tl.store(place + WIDTH, of_bias, mask=j < WIDTH)


PARTS = 1584  # in which rows are summed before the parts are: 12 for each multiprocessor of an H200


@torch.library.custom_op("msvit::add_norm", mutates_args=())
def add_norm(x: Tensor, u: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """total = x + u and LayerNorm(total) in the dtype of u, for x, u (rows, d), x in float32; mean, 1 / deviation."""
    x, u = x.contiguous(), u.contiguous()
    rows, width = x.shape
    total, y, centre, scale = torch.empty_like(x), torch.empty_like(u), x.new_empty(rows), x.new_empty(rows)
    block = triton.next_power_of_2(width)
    per_program = max(1, 1024 // block)
    with torch.cuda.device_of(x):
        _add_norm_kernel[(triton.cdiv(rows, per_program),)](
            x, u, weight, bias, total, y, centre, scale, rows, eps,
            WIDTH=width, BLOCK=block, ROWS=per_program, num_warps=1 if block <= 512 else 4,
        )  # fmt: skip
    return total, y, centre, scale


@torch.library.custom_op("msvit::add_norm_backward", mutates_args=())
def _add_norm_backward(
    dtotal: Tensor, dy: Tensor, total: Tensor, centre: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, du and (PARTS, 2, d), whose sum over the first axis is the gradient of weight and bias."""
    dtotal, dy = dtotal.contiguous(), dy.contiguous()
    rows, width = total.shape
    dx, du, sums = torch.empty_like(total), torch.empty_like(dy), total.new_empty(PARTS, 2, width)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(total):
        _add_norm_backward_kernel[(PARTS,)](
            dtotal, dy, total, centre, scale, weight, dx, du, sums, rows, triton.cdiv(rows, PARTS),
            WIDTH=width, BLOCK=block, num_warps=1 if block <= 512 else 4,
        )  # fmt: skip
    return dx, du, sums


@add_norm.register_fake
def _(x: Tensor, u: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, y = x.new_empty(x.shape), u.new_empty(u.shape)
    return total, y, x.new_empty(x.shape[0]), x.new_empty(x.shape[0])


@_add_norm_backward.register_fake
def _(
    dtotal: Tensor, dy: Tensor, total: Tensor, centre: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return total.new_empty(total.shape), dy.new_empty(dy.shape), total.new_empty(PARTS, 2, total.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    total, _, centre, scale = output
    ctx.save_for_backward(total, centre, scale, inputs[2])


def _differentiate_add_norm(ctx: Any, dtotal: Tensor, dy: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
    total, centre, scale, weight = ctx.saved_tensors
    dx, du, sums = _add_norm_backward(dtotal, dy, total, centre, scale, weight)
    of_weight, of_bias = sums.sum(0).to(weight.dtype)
    return dx, du, of_weight, of_bias, None


add_norm.register_autograd(_differentiate_add_norm, setup_context=_save)
