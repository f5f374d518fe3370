"""GELU of a sum with a bias, and its derivative, as fast as memory."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from msvit.fast.kernels.sums import add_parts, tile_of


@triton.jit
@no_type_check
def _normal(x):
    # Phi(x) and exp(-x^2 / 2). With t = 1 / (1 + p |x|), Phi(-|x|) is (a1 t + ... + a5 t^5) exp(-x^2 / 2) / 2 to 1e-7:
    # Abramowitz and Stegun 7.1.26.
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
    bell = tl.exp2(-0.7213475204444817 * x * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * poly * bell
    return tl.where(x >= 0, 1.0 - tail, tail), bell


@triton.jit
@no_type_check
def _gelu_of(x):
    share, _ = _normal(x)
    return x * share


@triton.jit
@no_type_check
def _gelu_kernel(x, bias, y, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS  # tiles beside each other run at a time
    i = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (i < rows) & (j < WIDTH)
    value = tl.load(x + i * WIDTH + j, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:  # each row loads it: handing it from thread to thread would take longer
        value += tl.load(tl.broadcast_to(bias + j, (ROWS, COLUMNS)), mask=inside, other=0.0).to(tl.float32)
    tl.store(y + i * WIDTH + j, _gelu_of(value).to(y.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _gelu_backward_kernel(dy, x, bias, dx, sums, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # A program takes every num_programs(1)-th tile of rows in COLUMNS columns, and sums its dx: what the bias gets.
    part = tl.program_id(1)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has = (j < WIDTH)[None, :]
    if bias is not None:
        added = tl.load(bias + j, mask=j < WIDTH, other=0.0).to(tl.float32)[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(part * ROWS, rows, tl.num_programs(1) * ROWS):
        i = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        at, inside = i * WIDTH + j[None, :], (i < rows) & has
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        wanted = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += added
        share, bell = _normal(value)
        grad = wanted * (share + 0.3989422804014327 * value * bell)
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=inside)
        if bias is not None:
            total += grad
    if bias is not None:
        tl.store(sums + part * WIDTH + j, tl.sum(total, 0), mask=j < WIDTH)


PARTS = 352  # in which rows are summed before the parts are: what was fastest for 1536 columns on an H200
MAX_TILES = 65535  # that a grid can have in its second axis


@torch.library.custom_op("msvit::gelu", mutates_args=())
def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute z Phi(z) for z = x + bias, not its tanh approximation, to 3e-7 of z. x (..., d), bias (d,).

    The bias, of the layer that computed x, gets its gradient by the kernel that computes that of x.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, width = _matrix(x)
    per_tile, columns = tile_of(width)
    with torch.cuda.device_of(x):
        _gelu_kernel[(triton.cdiv(rows, per_tile) * triton.cdiv(width, columns),)](
            x, bias, y, rows, WIDTH=width, ROWS=per_tile, COLUMNS=columns, num_warps=4
        )
    return y


@torch.library.custom_op("msvit::gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of x and bias, the latter empty without one."""
    dy, x = dy.contiguous(), x.contiguous()
    dx, of_bias = _empty_gelu_backward(x, bias)
    rows, width = _matrix(x)
    per_tile, columns = tile_of(width)
    parts = min(triton.cdiv(rows, per_tile), MAX_TILES) if bias is None else PARTS
    sums = None if bias is None else x.new_empty(parts, width, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _gelu_backward_kernel[(triton.cdiv(width, columns), parts)](
            dy, x, bias, dx, sums, rows, WIDTH=width, ROWS=per_tile, COLUMNS=columns, num_warps=4
        )
        if sums is not None:
            add_parts(sums, of_bias)
    return dx, of_bias


def _matrix(x: Tensor) -> tuple[int, int]:
    """Rows and columns of (..., d)."""
    return x.numel() // max(1, x.shape[-1]), x.shape[-1]


def _empty_gelu_backward(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    of_bias = x.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return torch.empty_like(x, memory_format=torch.contiguous_format), of_bias


gelu.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
_gelu_backward.register_fake(lambda dy, x, bias: _empty_gelu_backward(x, bias))


def _save_input(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_gelu(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    dx, of_bias = _gelu_backward(dy, x, bias)
    return dx, None if bias is None else of_bias


gelu.register_autograd(_differentiate_gelu, setup_context=_save_input)
