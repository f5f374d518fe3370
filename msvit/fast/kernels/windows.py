"""Attention inside windows of which tokens may be absent: one launch, nothing gathered, no scores in memory."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from msvit.fast.kernels.attending import LOG2_E
from msvit.fast.kernels.gates import has_shared_memory

LARGEST_TILE = 102_400  # bytes of shared memory for 64 queries and 256 keys; a consumer GPU has 101,376
SHIFTED = tl.constexpr(-100.0 * LOG2_E)  # for a key from the other side of the image, in units of log 2


@triton.jit
@no_type_check
def _part(place, LENGTH: tl.constexpr, SIDE: tl.constexpr, SHIFT: tl.constexpr):
    # Which part of the image a place comes from, after it has moved by SHIFT; only inside the last window it matters.
    return (place >= LENGTH - SIDE).to(tl.int32) + (place >= LENGTH - SHIFT).to(tl.int32)


@triton.jit
@no_type_check
def _find(
    p, window, cell, rank, padding, HIGH: tl.constexpr, WIDE: tl.constexpr, WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr, SHIFT_H: tl.constexpr, SHIFT_W: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    # Token p of a window: its slot, whether it is there, whether it is visible (padding is), and where it is from.
    ROWS: tl.constexpr = (HIGH + WINDOW_H - 1) // WINDOW_H
    COLUMNS: tl.constexpr = (WIDE + WINDOW_W - 1) // WINDOW_W
    y = window // COLUMNS % ROWS * WINDOW_H + p // WINDOW_W  # after the image has moved
    x = window % COLUMNS * WINDOW_W + p % WINDOW_W
    inside = p < WINDOW_H * WINDOW_W
    real = inside & (y < HIGH) & (x < WIDE)
    from_y, from_x = (y + SHIFT_H) % HIGH, (x + SHIFT_W) % WIDE
    where = (window // (ROWS * COLUMNS) * (HIGH // SIDE) + from_y // SIDE) * (WIDE // SIDE) + from_x // SIDE
    place = tl.load(cell + where, mask=real, other=-1)
    inner = tl.load(rank + (from_y % SIDE) * SIDE + from_x % SIDE, mask=real, other=0)
    there = real & (place >= 0)
    slot = tl.where(there, place * (SIDE * SIDE) + inner, padding).to(tl.int64)
    part = 3 * _part(y, ROWS * WINDOW_H, WINDOW_H, SHIFT_H) + _part(x, COLUMNS * WINDOW_W, WINDOW_W, SHIFT_W)
    return slot, there, there | (inside & (real == 0)), part


@triton.jit
@no_type_check
def _window_kernel(
    q, k, v, y, cell, rank, bias, padding, scale, q_row, q_head, k_row, k_head, v_row, v_head,
    HIGH: tl.constexpr, WIDE: tl.constexpr, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr,
    SHIFT_H: tl.constexpr, SHIFT_W: tl.constexpr, SIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    # A program takes one head of one window, or BLOCK_Q of its queries; all its keys at once. Empty windows end early.
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    AREA: tl.constexpr = WINDOW_H * WINDOW_W
    window, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    here, has_q, _visible, part_q = _find(
        i, window, cell, rank, padding, HIGH, WIDE, WINDOW_H, WINDOW_W, SHIFT_H, SHIFT_W, SIDE
    )
    if tl.max(has_q.to(tl.int32), 0) > 0:
        there, _has, visible, part_k = _find(
            j, window, cell, rank, padding, HIGH, WIDE, WINDOW_H, WINDOW_W, SHIFT_H, SHIFT_W, SIDE
        )
        d = tl.arange(0, DIM)[None, :]
        queries = tl.load(q + here[:, None] * q_row + head * q_head + d, mask=has_q[:, None], other=0.0)
        keys = tl.load(k + there[:, None] * k_row + head * k_head + d, mask=visible[:, None], other=0.0)
        values = tl.load(v + there[:, None] * v_row + head * v_head + d, mask=visible[:, None], other=0.0)
        pairs = (head * AREA + i[:, None]) * AREA + j[None, :]
        added = tl.load(bias + pairs, mask=(i < AREA)[:, None] & (j < AREA)[None, :], other=0.0).to(tl.float32)
        score = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale + added * 1.4426950408889634
        if SHIFT_H + SHIFT_W > 0:
            score += tl.where(part_q[:, None] != part_k[None, :], SHIFTED, 0.0)
        score = tl.where(visible[None, :], score, -float("inf"))
        p = tl.exp2(score - tl.max(score, 1)[:, None])
        mixed = tl.dot(p.to(values.dtype), values, input_precision=precision) / tl.sum(p, 1)[:, None]
        tl.store(y + (here[:, None] * HEADS + head) * DIM + d, mixed.to(y.dtype.element_ty), mask=has_q[:, None])


@torch.library.custom_op("msvit::window_attention", mutates_args=())
def window_attention(
    q: Tensor, k: Tensor, v: Tensor, cell: Tensor, rank: Tensor, bias: Tensor, slots: int, side: int,
    window: list[int], shift: list[int], scale: float,
) -> Tensor:  # fmt: skip
    """Attend inside windows: q, k, v (slots, heads, head_dim), one more row for padding; bias (heads, area, area).

    `cell` (b, hc, wc) is the place of each cell of `side` x `side` tokens, -1 if absent, and `rank` that of a token in
    its cell. Slots that no token has are left as they are.
    """
    y = q.new_empty(slots, *q.shape[1:])
    cell, rank, bias = cell.contiguous(), rank.contiguous(), bias.contiguous()
    batch, cell_rows, columns = cell.shape
    high, wide = cell_rows * side, columns * side
    num_windows = batch * triton.cdiv(high, window[0]) * triton.cdiv(wide, window[1])
    heads, dim = q.shape[1:]
    area = window[0] * window[1]
    block_k = max(16, triton.next_power_of_2(area))
    block_q = min(block_k, 64 if has_shared_memory(q.device, LARGEST_TILE) else 32)
    strides = [t.stride(axis) for t in (q, k, v) for axis in (0, 1)]
    with torch.cuda.device_of(q):
        _window_kernel[(num_windows, heads, triton.cdiv(area, block_q))](
            q, k, v, y, cell, rank, bias, slots, scale * LOG2_E, *strides, HIGH=high, WIDE=wide,
            WINDOW_H=window[0], WINDOW_W=window[1], SHIFT_H=shift[0], SHIFT_W=shift[1], SIDE=side, HEADS=heads,
            DIM=dim, BLOCK_Q=block_q, BLOCK_K=block_k, EXACT=q.dtype is torch.float32,
            num_warps=4 if block_k <= 64 else 8,
        )  # fmt: skip
    return y


@window_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cell: Tensor, rank: Tensor, bias: Tensor, slots: int, *_: Any
) -> Tensor:
    return q.new_empty(slots, *q.shape[1:])
