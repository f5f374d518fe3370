"""The layers of gates, for inference in 16 bits. Activations lie channels last, (b, rows, columns, channels).

    cell_mlp(image, ...)            # an MLP on the pixels of each cell, from the image to logits
    stem(mean, variance, weight)    # a convolution of normalised means, and normalised deviations
    downsample(x, ...)              # a 3 x 3 convolution with stride 2
    mix_cells(x, ...)               # a depthwise convolution over cells, a norm and an MLP, one program per image
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from msvit.execution.kernels.activation import _gelu_of

MOST_MIXED = 64  # cells of an image that one program takes
MOST_WIDTH = 256
LEAST_CELLS = 4096  # cells of a batch
SMALLEST_UNIT = 1e-6
DOT = 16  # the smallest side of a product


def fits_width(*widths: int) -> bool:
    return all(DOT <= width <= MOST_WIDTH and width & (width - 1) == 0 for width in widths)


@triton.jit
@no_type_check
def _cell_mlp_kernel(
    image, scale, shift, stem, stem_bias, position, first, first_bias, second, second_bias, head, head_bias, logits,
    total, rows, columns, stride_b, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, LAST: tl.constexpr,
    PADDED: tl.constexpr, PADDED_LAST: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK cells. A step of the first layer takes CHUNK pixels, some rows of a cell in one channel.
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < total
    place = cell % (rows * columns)
    corner = image + cell // (rows * columns) * stride_b
    corner += place // columns * SIDE * stride_h + place % columns * SIDE * stride_w
    n = tl.arange(0, PADDED)
    k = tl.arange(0, CHUNK)
    pixel = corner[:, None] + k[None, :] // SIDE * stride_h + k[None, :] % SIDE * stride_w
    value = tl.zeros([BLOCK, PADDED], tl.float32)
    for start in range(0, CHANNELS * SIDE * SIDE, CHUNK):
        channel = start // (SIDE * SIDE)
        first_row = start % (SIDE * SIDE) // SIDE
        seen = tl.load(pixel + channel * stride_c + first_row * stride_h, mask=inside[:, None], other=0.0)
        if SCALED:
            seen = seen.to(tl.float32) * tl.load(scale + channel) + tl.load(shift + channel)
        layer = stem + n[None, :] * (CHANNELS * SIDE * SIDE) + start + k[:, None]
        layer = tl.load(layer, mask=n[None, :] < WIDTH, other=0.0)
        value += tl.dot(seen.to(layer.dtype), layer)
    value += tl.load(stem_bias + n, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
    where = position + n[None, :] * rows * columns + place[:, None]
    value += tl.load(where, mask=inside[:, None] & (n[None, :] < WIDTH), other=0.0).to(tl.float32)
    value = _gelu_of(value).to(first.dtype.element_ty)
    m = tl.arange(0, PADDED_LAST)
    result = tl.zeros([BLOCK, PADDED_LAST], tl.float32)
    for begin in tl.range(0, HIDDEN, CHUNK, num_stages=1):  # no memory for prefetching: two programs per processor
        real = begin + k < HIDDEN
        layer = first + (begin + k)[None, :] * WIDTH + n[:, None]
        layer = tl.load(layer, mask=real[None, :] & (n < WIDTH)[:, None], other=0.0)
        hidden = tl.dot(value, layer) + tl.load(first_bias + begin + k, mask=real, other=0.0).to(tl.float32)[None, :]
        layer = second + m[None, :] * HIDDEN + (begin + k)[:, None]
        layer = tl.load(layer, mask=(m < LAST)[None, :] & real[:, None], other=0.0)
        result += tl.dot(_gelu_of(hidden).to(layer.dtype), layer)
    result += tl.load(second_bias + m, mask=m < LAST, other=0.0).to(tl.float32)[None, :]
    last = tl.load(head + m, mask=m < LAST, other=0.0).to(tl.float32)
    found = tl.sum(_gelu_of(result) * last[None, :], 1) + tl.load(head_bias).to(tl.float32)
    tl.store(logits + cell, found, mask=inside)


def fits_cell_mlp(side: int, widths: tuple[int, int, int], cells: int) -> bool:
    """Of few `cells` the pixels are better shared among more programs."""
    fits = side >= 8 and side & (side - 1) == 0 and max(widths[0], widths[2]) <= MOST_WIDTH
    return fits and cells >= LEAST_CELLS


@torch.library.custom_op("msvit::cell_mlp_into", mutates_args=("logits",))
def cell_mlp_into(
    image: Tensor, scale: Tensor | None, shift: Tensor | None, position: Tensor, layers: list[Tensor], side: int,
    logits: Tensor,
) -> None:  # fmt: skip
    """`logits` (b, hc, wc), in float32, of the pixels * scale + shift of each cell, in the order channel, row, column.

    `layers`: weights and biases of four linear layers with a GELU between them. `position` (1, d, hc, wc) is added
    after the first.
    """
    batch, rows, columns = logits.shape
    total, block = batch * rows * columns, 64
    (width, _), (hidden, _), (last, _), _ = (layer.shape for layer in layers[::2])
    padded, padded_last = (max(DOT, triton.next_power_of_2(each)) for each in (width, last))
    with torch.cuda.device_of(image):
        _cell_mlp_kernel[(triton.cdiv(total, block),)](
            image, scale, shift, *layers[:2], position.contiguous(), *layers[2:], logits, total, rows, columns,
            *image.stride(), CHANNELS=image.shape[1], SIDE=side, WIDTH=width, HIDDEN=hidden, LAST=last, PADDED=padded,
            PADDED_LAST=padded_last, SCALED=scale is not None, BLOCK=block, CHUNK=64, num_warps=4, num_stages=4,
        )  # fmt: skip


@triton.jit
@no_type_check
def _units_kernel(mean, units, pixels, CHANNELS: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    # Of each image the mean of every channel, and 1 / deviation of all.
    image = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for channel in tl.static_range(CHANNELS):
        start = mean + (image * CHANNELS + channel) * pixels + place
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, pixels, BLOCK):
            total += tl.load(start + first, mask=first + place < pixels, other=0.0)
        centre = tl.sum(total, 0) / pixels
        tl.store(units + image * (CHANNELS + 1) + channel, centre)
        for first in range(0, pixels, BLOCK):
            inside = first + place < pixels
            away = tl.load(start + first, mask=inside, other=0.0) - centre
            squares += tl.where(inside, away * away, 0.0)
    unit = tl.maximum(tl.sum(squares, 0) / (pixels * CHANNELS), SMALLEST)
    tl.store(units + image * (CHANNELS + 1) + CHANNELS, 1.0 / tl.sqrt(unit))


@triton.jit
@no_type_check
def _stem_kernel(
    mean, variance, units, weight, out, deviation, rows, columns,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK places of the output of one image, which has half of the rows and columns.
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    half_columns = columns // 2
    places = rows // 2 * half_columns
    inside = place < places
    y, x = place // half_columns * 2, place % half_columns * 2
    own = units + image * (CHANNELS + 1)
    scale = tl.load(own + CHANNELS)
    tap = tl.arange(0, TAPS)
    channel = tap // 9
    i = y[:, None] + (tap % 9 // 3)[None, :] - 1
    j = x[:, None] + (tap % 3)[None, :] - 1
    real = inside[:, None] & (tap < 9 * CHANNELS)[None, :] & (i >= 0) & (i < rows) & (j >= 0) & (j < columns)
    value = tl.load(mean + ((image * CHANNELS + channel)[None, :] * rows + i) * columns + j, mask=real, other=0.0)
    centre = tl.load(own + channel, mask=tap < 9 * CHANNELS, other=0.0)
    value = tl.where(real, (value - centre[None, :]) * scale, 0.0).to(weight.dtype.element_ty)
    n = tl.arange(0, WIDTH)
    filters = weight + n[None, :] * (9 * CHANNELS) + tap[:, None]
    filters = tl.load(filters, mask=(tap < 9 * CHANNELS)[:, None], other=0.0)
    result = tl.abs(tl.dot(value, filters))
    where = out + (image * places + place)[:, None] * WIDTH + n[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=inside[:, None])
    total = tl.zeros([BLOCK], tl.float32)
    for corner in tl.static_range(4):
        at = variance + (image * rows + y + corner // 2) * columns + x + corner % 2
        total += tl.sqrt(tl.maximum(tl.load(at, mask=inside, other=0.0) * scale * scale, SMALLEST))
    tl.store(deviation + image * places + place, (total / 4).to(deviation.dtype.element_ty), mask=inside)


@torch.library.custom_op("msvit::stem", mutates_args=())
def stem(mean: Tensor, variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """|conv(mean)| (b, h/2, w/2, d), and deviations (b, h/2, w/2), the mean of four; with stride 2 and padding 1.

    Of mean (b, c, h, w) the image's mean is subtracted, both are divided by its deviation; h and w are even.
    """
    out, deviation = _empty_stem(mean, weight)
    batch, channels, rows, columns = mean.shape
    units = mean.new_empty(batch, channels + 1)
    block, taps = 128, max(DOT, triton.next_power_of_2(9 * channels))
    with torch.cuda.device_of(mean):
        _units_kernel[(batch,)](
            mean, units, rows * columns, CHANNELS=channels, SMALLEST=SMALLEST_UNIT, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        _stem_kernel[(triton.cdiv(out[0, ..., 0].numel(), block), batch)](
            mean, variance, units, weight.contiguous(), out, deviation, rows, columns,
            CHANNELS=channels, TAPS=taps, WIDTH=weight.shape[0], SMALLEST=SMALLEST_UNIT, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out, deviation


@stem.register_fake
def _(mean: Tensor, variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_stem(mean, weight)


def _empty_stem(mean: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    size = (mean.shape[0], mean.shape[2] // 2, mean.shape[3] // 2)
    return weight.new_empty(*size, weight.shape[0]), weight.new_empty(size)


@triton.jit
@no_type_check
def _downsample_kernel(
    x, plane, weight, bias, position, out, total, rows, columns,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, HAS_PLANE: tl.constexpr, GELU: tl.constexpr,
    HAS_POSITION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK places of the output, of any image. STRIDE: channels of the weight, the plane's included.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    half_columns = columns // 2
    places = rows // 2 * half_columns
    place, first_row = i % places, i // places * rows
    y, z = place // half_columns * 2 - 1, place % half_columns * 2 - 1
    c, n = tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    result = tl.zeros([BLOCK, WIDTH], tl.float32)
    for tap in range(9):
        row, column = y + tap // 3, z + tap % 3
        real = inside & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        at = x + ((first_row + row) * columns + column)[:, None] * CHANNELS + c[None, :]
        filters = tl.load(weight + (tap * STRIDE + c[:, None]) * WIDTH + n[None, :])
        result += tl.dot(tl.load(at, mask=real[:, None], other=0.0), filters)
    if HAS_PLANE:
        tap = tl.arange(0, 16)
        row, column = y[:, None] + tap[None, :] // 3, z[:, None] + tap[None, :] % 3
        real = inside[:, None] & (tap < 9)[None, :]
        real = real & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        value = tl.load(plane + (first_row[:, None] + row) * columns + column, mask=real, other=0.0)
        at = weight + (tap[:, None] * STRIDE + CHANNELS) * WIDTH + n[None, :]
        result += tl.dot(value, tl.load(at, mask=(tap < 9)[:, None], other=0.0))
    result += tl.load(bias + n).to(tl.float32)[None, :]
    if HAS_POSITION:
        at = position + n[None, :] * places + place[:, None]
        result += tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
    if GELU:
        result = _gelu_of(result)
    tl.store(out + i[:, None] * WIDTH + n[None, :], result.to(out.dtype.element_ty), mask=inside[:, None])


@torch.library.custom_op("msvit::downsample", mutates_args=())
def downsample(
    x: Tensor, plane: Tensor | None, weight: Tensor, bias: Tensor, position: Tensor | None, gelu: bool
) -> Tensor:
    """x (b, h, w, c), and a `plane` (b, h, w) as a further channel -> (b, h/2, w/2, d): stride 2, padding 1.

    `weight` is (3, 3, c, d), with one more channel for the plane; `position` (1, d, h/2, w/2) is added.
    """
    out = _empty_half(x, weight)
    batch, rows, columns, channels = x.shape
    total, block = batch * (rows // 2) * (columns // 2), 64
    with torch.cuda.device_of(x):
        _downsample_kernel[(triton.cdiv(total, block),)](
            x, plane, weight.contiguous(), bias, None if position is None else position.contiguous(), out, total,
            rows, columns, CHANNELS=channels, WIDTH=weight.shape[3], STRIDE=weight.shape[2],
            HAS_PLANE=plane is not None, GELU=gelu, HAS_POSITION=position is not None, BLOCK=block,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@downsample.register_fake
def _(
    x: Tensor, plane: Tensor | None, weight: Tensor, bias: Tensor, position: Tensor | None, gelu: bool
) -> Tensor:
    return _empty_half(x, weight)


def _empty_half(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2, x.shape[2] // 2, weight.shape[3])


@triton.jit
@no_type_check
def _mix_kernel(
    x, depthwise, depthwise_bias, norm_weight, norm_bias, first, first_bias, second, second_bias, out,
    rows, columns, eps,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # A program takes an image. The norm is over all channels and cells.
    cells = rows * columns
    start = tl.program_id(0).to(tl.int64) * cells * WIDTH
    cell, n, h = tl.arange(0, BLOCK), tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    inside = (cell < cells)[:, None]
    y, z = cell // columns - SIDE // 2, cell % columns - SIDE // 2
    total = tl.zeros([BLOCK, WIDTH], tl.float32) + tl.load(depthwise_bias + n).to(tl.float32)[None, :]
    for down in range(SIDE):
        row = y + down
        for across in tl.static_range(SIDE):
            column = z + across
            real = inside & ((row >= 0) & (row < rows) & (column >= 0) & (column < columns))[:, None]
            at = x + start + (row * columns + column)[:, None] * WIDTH + n[None, :]
            weight = tl.load(depthwise + (down * SIDE + across) * WIDTH + n).to(tl.float32)
            total += tl.load(at, mask=real, other=0.0).to(tl.float32) * weight[None, :]
    total = tl.where(inside, total, 0.0)
    centred = tl.where(inside, total - tl.sum(tl.sum(total, 1), 0) / (cells * WIDTH), 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(tl.sum(centred * centred, 1), 0) / (cells * WIDTH) + eps)
    centred = centred * scale * tl.load(norm_weight + n).to(tl.float32)[None, :]
    normed = (centred + tl.load(norm_bias + n).to(tl.float32)[None, :]).to(first.dtype.element_ty)
    result = tl.zeros([BLOCK, WIDTH], tl.float32) + tl.load(second_bias + n).to(tl.float32)[None, :]
    for begin in range(0, HIDDEN, CHUNK):
        layer = tl.load(first + (begin + h)[None, :] * WIDTH + n[:, None])
        hidden = tl.dot(normed, layer) + tl.load(first_bias + begin + h).to(tl.float32)[None, :]
        layer = tl.load(second + n[None, :] * HIDDEN + (begin + h)[:, None])
        result += tl.dot(_gelu_of(hidden).to(layer.dtype), layer)
    at = start + cell[:, None] * WIDTH + n[None, :]
    result += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("msvit::mix_cells", mutates_args=())
def mix_cells(
    x: Tensor, depthwise: Tensor, depthwise_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float,
    first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor,
) -> Tensor:  # fmt: skip
    """x (b, hc, wc, d) + MLP(GroupNorm(depthwise convolution of x)), for images of at most MOST_MIXED cells.

    `depthwise` is (side, side, d).
    """
    batch, rows, columns, width = x.shape
    out = torch.empty_like(x)
    hidden, block = first.shape[0], max(DOT, triton.next_power_of_2(rows * columns))
    with torch.cuda.device_of(x):
        _mix_kernel[(batch,)](
            x, depthwise.contiguous(), depthwise_bias, norm_weight, norm_bias, first, first_bias, second, second_bias,
            out, rows, columns, eps,
            SIDE=depthwise.shape[0], WIDTH=width, HIDDEN=hidden, BLOCK=block, CHUNK=min(hidden, 64),
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


@mix_cells.register_fake
def _(
    x: Tensor, depthwise: Tensor, depthwise_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float,
    first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor,
) -> Tensor:  # fmt: skip
    return torch.empty_like(x)
