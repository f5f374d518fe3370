"""Layer normalisation of rows, beside which a vector is added to them."""

from typing import no_type_check

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
