"""Mean and variance of the pixels of small squares."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS = 1024  # of one channel that a program takes

@triton.jit
@no_type_check
def _moments_kernel(
    image, scale, shift, mean, variance, total, rows, columns, stride_b, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK squares, of all channels.
    square = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = square < total
    which, place = square // (rows * columns), square % (rows * columns)
    corner = image + which * stride_b + place // columns * SIDE * stride_h + place % columns * SIDE * stride_w
    k = tl.arange(0, SIDE * SIDE)
    pixel = corner[:, None] + k[None, :] // SIDE * stride_h + k[None, :] % SIDE * stride_w
    spread = tl.zeros([BLOCK], tl.float32)
    for channel in tl.static_range(CHANNELS):
        value = tl.load(pixel + channel * stride_c, mask=inside[:, None], other=0.0).to(tl.float32)
        if SCALED:
            value = value * tl.load(scale + channel) + tl.load(shift + channel)
        average = tl.sum(value, 1) / (SIDE * SIDE)
        away = value - average[:, None]
        spread += tl.sum(away * away, 1) / (SIDE * SIDE)
        tl.store(mean + (which * CHANNELS + channel) * rows * columns + place, average, mask=inside)
    tl.store(variance + square, spread / CHANNELS, mask=inside)


@torch.library.custom_op("msvit::pool_moments", mutates_args=())
def pool_moments(image: Tensor, scale: Tensor | None, shift: Tensor | None, side: int) -> tuple[Tensor, Tensor]:
    """Mean (b, c, h/side, w/side) of squares of image * scale + shift, and their variance (b, 1, ...) over channels.

    `side` is a power of two. Nothing is differentiated.
    """
    mean, variance = _empty_moments(image, side)
    _pool(image, scale, shift, side, mean, variance)
    return mean, variance


@torch.library.custom_op("msvit::pool_moments_into", mutates_args=("mean", "variance"))
def pool_moments_into(
    image: Tensor, scale: Tensor | None, shift: Tensor | None, side: int, mean: Tensor, variance: Tensor
) -> None:
    """The same into memory that is given."""
    _pool(image, scale, shift, side, mean, variance)


def _pool(
    image: Tensor, scale: Tensor | None, shift: Tensor | None, side: int, mean: Tensor, variance: Tensor
) -> None:
    channels, rows, columns = mean.shape[1:]
    total, block = variance.numel(), max(16, PIXELS // side**2)
    with torch.cuda.device_of(image):
        _moments_kernel[(triton.cdiv(total, block),)](
            image, scale, shift, mean, variance, total, rows, columns, *image.stride(),
            CHANNELS=channels, SIDE=side, BLOCK=block, SCALED=scale is not None, num_warps=2,
        )  # fmt: skip


@pool_moments.register_fake
def _(image: Tensor, scale: Tensor | None, shift: Tensor | None, side: int) -> tuple[Tensor, Tensor]:
    return _empty_moments(image, side)


def _empty_moments(image: Tensor, side: int) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = image.shape
    mean, variance = (
        image.new_empty(batch, planes, height // side, width // side, dtype=torch.float32) for planes in (channels, 1)
    )
    return mean, variance
