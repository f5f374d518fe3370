"""A linear layer whose bias gets its gradient by a kernel: a sum over rows, as fast as memory."""

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

PARTS = 220  # in which rows are summed before the parts are; those of 384 columns fill an H200 once
ROWS, COLUMNS = 64, 128  # of a tile


@triton.jit
@no_type_check
def _sum_rows_kernel(x, sums, rows, per_part, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # A program sums the rows of one part in COLUMNS columns.
    part = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, per_part, ROWS):
        i = part * per_part + start + tl.arange(0, ROWS)
        inside = (i < rows)[:, None] & (j < WIDTH)[None, :]
        total += tl.load(x + i[:, None] * WIDTH + j[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + part * WIDTH + j, tl.sum(total, 0), mask=j < WIDTH)


@torch.library.custom_op("msvit::partial_sums", mutates_args=())
def partial_sums(x: Tensor) -> Tensor:
    """(rows, d) -> (PARTS, d) in float32, whose sum over the first axis is that of x."""
    x = x.contiguous()
    rows, width = x.shape
    sums = x.new_empty(PARTS, width, dtype=torch.float32)
    per_part = triton.cdiv(triton.cdiv(rows, PARTS), ROWS) * ROWS
    with torch.cuda.device_of(x):
        _sum_rows_kernel[(PARTS, triton.cdiv(width, COLUMNS))](
            x, sums, rows, per_part, WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
        )
    return sums


@torch.library.custom_op("msvit::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(rows, d) -> (rows, e), all of one dtype."""
    return F.linear(x, weight, bias)


@partial_sums.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(PARTS, x.shape[1], dtype=torch.float32)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate_linear(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    return (
        dy @ weight if of_x else None,
        dy.t() @ x if of_weight else None,
        partial_sums(dy).sum(0).to(dy.dtype) if of_bias else None,
    )


linear.register_autograd(_differentiate_linear, setup_context=_save)
