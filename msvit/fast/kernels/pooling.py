"""Mean and variance of the pixels of small squares."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from msvit.fast.kernels.addresses import _image_at

PIXELS = 1024  # of one channel that a warp takes


@triton.jit
@no_type_check
def _moments_kernel(
    image, address, scale, shift, mean, variance, rows, columns, stride_b, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK squares of a row of squares, of all channels: whole lines of pixels are read.
    which, row = (tl.program_id(0) // rows).to(tl.int64), tl.program_id(0) % rows
    first = tl.program_id(1) * BLOCK
    i, j = tl.arange(0, SIDE)[:, None], first * SIDE + tl.arange(0, BLOCK * SIDE)[None, :]
    inside = (i < SIDE) & (j < columns * SIDE)
    pixel = _image_at(image, address) + which * stride_b + (row * SIDE + i) * stride_h + j * stride_w
    square = first + tl.arange(0, BLOCK)
    real, place = square < columns, row * columns + square
    spread = tl.zeros([BLOCK], tl.float32)
    for channel in tl.static_range(CHANNELS):
        value = tl.load(pixel + channel * stride_c, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            value = value * tl.load(scale + channel) + tl.load(shift + channel)
        value = tl.reshape(value, [SIDE, BLOCK, SIDE])
        average = tl.sum(tl.sum(value, 2), 0) / (SIDE * SIDE)
        away = value - average[None, :, None]
        spread += tl.sum(tl.sum(away * away, 2), 0) / (SIDE * SIDE)
        tl.store(mean + (which * CHANNELS + channel) * rows * columns + place, average, mask=real)
    tl.store(variance + which * rows * columns + place, spread / CHANNELS, mask=real)


@torch.library.custom_op("msvit::pool_moments", mutates_args=())
def pool_moments(
    image: Tensor, scale: Tensor | None, shift: Tensor | None, side: int, address: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the mean of squares of image * scale + shift, (b, c, h/side, w/side), and their variance (b, 1, ...).

    The variance is averaged over channels. `side` is a power of two. Nothing is differentiated.
    """
    mean, variance = _empty_moments(image, side)
    batch, channels, rows, columns = mean.shape
    block = max(16, PIXELS // side**2)
    with torch.cuda.device_of(image):
        _moments_kernel[(batch * rows, triton.cdiv(columns, block))](
            image, address, scale, shift, mean, variance, rows, columns, *image.stride(),
            CHANNELS=channels, SIDE=side, BLOCK=block, SCALED=scale is not None,
            num_warps=max(1, block * side**2 // PIXELS),
        )  # fmt: skip
    return mean, variance


pool_moments.register_fake(lambda image, scale, shift, side, *_: _empty_moments(image, side))


def _empty_moments(image: Tensor, side: int) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = image.shape
    mean, variance = (
        image.new_empty(batch, planes, height // side, width // side, dtype=torch.float32) for planes in (channels, 1)
    )
    return mean, variance
