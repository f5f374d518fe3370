"""LayerNorm and GELU whose results are rows in FP8 (e4m3), each with a scale of its own.

    normalize_fp8_into(x, added, shift, weight, bias, eps, y, scale)    # x += added, LayerNorm(x + shift) is y * scale
    gelu_fp8_into(x, y, scale)                                          # GELU(x) is y * scale

A row's scale is its largest absolute value over 448, the largest number of e4m3. A row with NaN or Inf has NaN in y.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def _store_scaled(value, y, scale, i, at, rows, inside):
    # The largest number of e4m3 is 448. A row of zeros gets a scale above 0, so that it stays zeros. With Inf the scale
    # is Inf, and Inf * (1 / Inf) is NaN.
    unit = tl.maximum(tl.max(tl.abs(value), 1) / 448.0, 1e-12)
    tl.store(scale + i, unit, mask=i < rows)
    tl.store(y + at, (value * (1.0 / unit)[:, None]).to(y.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _norm_fp8_kernel(
    x, added, shift, weight, bias, y, scale, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    # A program takes ROWS rows.
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)[None, :]
    inside = (i < rows)[:, None] & (j < WIDTH)
    at = i[:, None] * WIDTH + j
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)
    value += tl.load(shift + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    centred = tl.where(j < WIDTH, value - tl.sum(value, 1)[:, None] / WIDTH, 0.0)
    unit = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    value = centred * unit[:, None] * tl.load(weight + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    value += tl.load(bias + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    _store_scaled(value, y, scale, i, at, rows, inside)


@triton.jit
@no_type_check
def _gelu_fp8_kernel(x, y, scale, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)[None, :]
    inside = (i < rows)[:, None] & (j < WIDTH)
    at = i[:, None] * WIDTH + j
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), and 2 sqrt(2 / pi) log2(e) is 2.302208.
    value = value / (1.0 + tl.exp2(-2.302208198 * (value + 0.044715 * value * value * value)))
    _store_scaled(value, y, scale, i, at, rows, inside)


@torch.library.custom_op("msvit::normalize_fp8_into", mutates_args=("x", "y", "scale"))
def normalize_fp8_into(
    x: Tensor, added: Tensor | None, shift: Tensor, weight: Tensor, bias: Tensor, eps: float, y: Tensor, scale: Tensor
) -> None:
    """Add to x, then write y * scale = LayerNorm(x + shift): x, added, y (rows, d), shift (d,), scale (rows, 1)."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    per_program, warps = max(1, 2048 // block), 1 if block <= 512 else 4  # as `normalize_into`
    with torch.cuda.device_of(x):
        _norm_fp8_kernel[(triton.cdiv(rows, per_program),)](
            x, added, shift, weight, bias, y, scale, rows, eps,
            WIDTH=width, BLOCK=block, ROWS=per_program, ADDS=added is not None, num_warps=warps,
        )  # fmt: skip


@torch.library.custom_op("msvit::gelu_fp8_into", mutates_args=("y", "scale"))
def gelu_fp8_into(x: Tensor, y: Tensor, scale: Tensor) -> None:
    """Write y * scale = GELU(x), its tanh approximation, for x, y (rows, d) and scale (rows, 1)."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    per_program, warps = max(1, 2048 // block), min(16, max(4, block // 512))  # 16 numbers per thread
    with torch.cuda.device_of(x):
        _gelu_fp8_kernel[(triton.cdiv(rows, per_program),)](
            x, y, scale, rows, WIDTH=width, BLOCK=block, ROWS=per_program, num_warps=warps
        )
