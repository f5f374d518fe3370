"""Mean and variance of the pixels of small squares."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def _moments_kernel(
    image, scale, shift, mean, variance, columns, stride_b, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK squares of one row of squares, of all channels.
    row, image_row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    across = first * SIDE + tl.arange(0, BLOCK * SIDE)[None, :]
    down = row * SIDE + tl.arange(0, SIDE)[:, None]
    place = image + image_row * stride_b + down * stride_h + across * stride_w
    column = first + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    rows = tl.num_programs(1)
    for channel in tl.static_range(CHANNELS):
        value = tl.load(place + channel * stride_c, mask=across < columns * SIDE, other=0.0).to(tl.float32)
        if SCALED:
            value = value * tl.load(scale + channel) + tl.load(shift + channel)
        square = tl.reshape(value, [SIDE, BLOCK, SIDE])
        average = tl.sum(tl.sum(square, 2), 0) / (SIDE * SIDE)
        deviation = square - average[None, :, None]
        total += tl.sum(tl.sum(deviation * deviation, 2), 0) / (SIDE * SIDE)
        tl.store(mean + ((image_row * CHANNELS + channel) * rows + row) * columns + column, average, mask=inside)
    tl.store(variance + (image_row * rows + row) * columns + column, total / CHANNELS, mask=inside)


@torch.library.custom_op("msvit::pool_moments", mutates_args=())
def pool_moments(image: Tensor, scale: Tensor | None, shift: Tensor | None, side: int) -> tuple[Tensor, Tensor]:
    """Mean (b, c, h/side, w/side) of squares of image * scale + shift, and their variance (b, 1, ...) over channels.

    `side` is a power of two. Nothing is differentiated.
    """
    mean, variance = _empty_moments(image, side)
    batch, channels, rows, columns = mean.shape
    block = min(64, triton.next_power_of_2(columns))
    with torch.cuda.device_of(image):
        _moments_kernel[(triton.cdiv(columns, block), rows, batch)](
            image, scale, shift, mean, variance, columns, *image.stride(),
            CHANNELS=channels, SIDE=side, BLOCK=block, SCALED=scale is not None, num_warps=2,
        )  # fmt: skip
    return mean, variance


@pool_moments.register_fake
def _(image: Tensor, scale: Tensor | None, shift: Tensor | None, side: int) -> tuple[Tensor, Tensor]:
    return _empty_moments(image, side)


def _empty_moments(image: Tensor, side: int) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = image.shape
    mean, variance = (
        image.new_empty(batch, planes, height // side, width // side, dtype=torch.float32) for planes in (channels, 1)
    )
    return mean, variance
