"""Sums over rows, such as gradients of biases. In two stages and a fixed order: the same rows give the same bits."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 528  # in which rows are summed before the parts are; those of 384 columns fill an H200 once
TILE = 2048  # numbers of a tile of the first stage
PART_ROWS, PART_COLUMNS = 512, 8  # of a tile of the second: most parts are loaded at once


@triton.jit
@no_type_check
def _sum_rows_kernel(
    x, first, second, rows, WIDTH: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    # A program sums every num_programs(1)-th tile of rows in COLUMNS columns: SPLIT columns to `first`, others to
    # `second`.
    part = tl.program_id(1)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(part * ROWS, rows, tl.num_programs(1) * ROWS):
        i = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (i < rows) & (j < WIDTH)[None, :]
        total += tl.load(x + i * WIDTH + j[None, :], mask=inside, other=0.0).to(tl.float32)
    sums = tl.sum(total, 0)
    tl.store(first + part * SPLIT + j, sums.to(first.dtype.element_ty), mask=j < SPLIT)
    if SPLIT < WIDTH:
        place = second + part * (WIDTH - SPLIT) + j - SPLIT
        tl.store(place, sums.to(second.dtype.element_ty), mask=(j >= SPLIT) & (j < WIDTH))


def add_parts(parts: Tensor, first: Tensor, second: Tensor | None = None) -> None:
    """Write the sum of parts (n, ...) in float32 over n to first and second, one behind the other."""
    width = parts.numel() // parts.shape[0]
    _sum_rows_kernel[(triton.cdiv(width, PART_COLUMNS), 1)](
        parts, first, first if second is None else second, parts.shape[0],
        WIDTH=width, SPLIT=first.numel(), ROWS=PART_ROWS, COLUMNS=PART_COLUMNS, num_warps=4,
    )  # fmt: skip


def tile_of(width: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of TILE numbers. If possible, tiles divide the columns."""
    divides = width & -width
    columns = min(512, divides if divides >= 64 else triton.next_power_of_2(width))
    return TILE // columns, columns


@torch.library.custom_op("msvit::sum_rows", mutates_args=())
def sum_rows(x: Tensor) -> Tensor:
    """Sum rows in float32, (rows, d) -> (d,)."""
    x = x.contiguous()
    rows, width = x.shape
    parts, sums = x.new_empty(PARTS, width, dtype=torch.float32), x.new_empty(width)
    per_tile, columns = tile_of(width)
    with torch.cuda.device_of(x):
        _sum_rows_kernel[(triton.cdiv(width, columns), PARTS)](
            x, parts, parts, rows, WIDTH=width, SPLIT=width, ROWS=per_tile, COLUMNS=columns, num_warps=4
        )
        add_parts(parts, sums)
    return sums


sum_rows.register_fake(lambda x: x.new_empty(x.shape[1]))
