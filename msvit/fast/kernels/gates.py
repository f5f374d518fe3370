"""The layers of gates, for inference in 16 bits. Activations lie channels last, (b, rows, columns, channels).

    cell_mlp(image, ...)            # an MLP on the pixels of each cell, from the image to logits
    stem(mean, variance, weight)    # a convolution of normalised means, and normalised deviations
    downsample(x, ...)              # a 3 x 3 convolution with stride 2
    mix_cells(x, ...)               # a depthwise convolution over cells, a norm and an MLP, and perhaps the last layers
"""

from itertools import pairwise
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from msvit.fast.kernels.activation import _gelu_of
from msvit.fast.kernels.addresses import _image_at

MAX_WIDTH = 128
MAX_FILTERS = 64 * 128  # input times output channels of a convolution
MAX_CHANNELS = 7  # of images
MIN_CELLS = 4096  # of a batch
FEW_PLACES = 2048  # of a batch: programs take fewer of them, so that there are more programs
SHARED_MEMORY = 98_400  # bytes that the largest kernel needs for what is allowed above; a consumer GPU has 101,376
MIN_UNIT = 1e-6
DOT = 16  # the smallest side of a product
PIXELS = 64  # of a cell that the first layer takes in a step: whole rows


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_shared_memory(device: torch.device, needed: int = SHARED_MEMORY) -> bool:
    """Return whether the device has so many bytes of shared memory for a block of threads."""
    return device.type != "cuda" or torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= needed


def fits_context_gate(image: Tensor, widths: tuple[int, ...]) -> bool:
    """Return whether `stem`, `downsample` and `mix_cells` take such images and layers of these widths, in order."""
    powers = all(DOT <= width <= MAX_WIDTH and width & (width - 1) == 0 for width in widths)
    filters = max(before * after for before, after in pairwise(widths))
    return powers and filters <= MAX_FILTERS and image.shape[1] <= MAX_CHANNELS and has_shared_memory(image.device)


@triton.jit
@no_type_check
def _cell_mlp_kernel(
    image, address, scale, shift, stem, stem_bias, position, first, first_bias, second, second_bias, head, head_bias,
    logits, total, rows, columns, stride_b, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, LAST: tl.constexpr,
    PADDED: tl.constexpr, PADDED_LAST: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK cells. A step of the first layer takes CHUNK pixels, some rows of a cell in one channel.
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < total
    place = cell % (rows * columns)
    corner = _image_at(image, address) + (cell // (rows * columns)).to(tl.int64) * stride_b
    corner += place // columns * SIDE * stride_h + place % columns * SIDE * stride_w
    n = tl.arange(0, PADDED)
    k = tl.arange(0, CHUNK)
    pixel = corner[:, None] + k[None, :] // SIDE * stride_h + k[None, :] % SIDE * stride_w
    value = tl.zeros([BLOCK, PADDED], tl.float32)
    for start in range(0, CHANNELS * SIDE * SIDE, CHUNK):
        channel = start // (SIDE * SIDE)
        first_row = start % (SIDE * SIDE) // SIDE
        pixels = tl.load(pixel + channel * stride_c + first_row * stride_h, mask=inside[:, None], other=0.0)
        if SCALED:
            pixels = pixels.to(tl.float32) * tl.load(scale + channel) + tl.load(shift + channel)
        layer = stem + n[None, :] * (CHANNELS * SIDE * SIDE) + start + k[:, None]
        layer = tl.load(layer, mask=n[None, :] < WIDTH, other=0.0)
        value += tl.dot(pixels.to(layer.dtype), layer)
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
    logit = tl.sum(_gelu_of(result) * last[None, :], 1) + tl.load(head_bias).to(tl.float32)
    tl.store(logits + cell, logit, mask=inside)


def fits_cell_mlp(image: Tensor, side: int, widths: tuple[int, ...]) -> bool:
    """Return whether `cell_mlp` takes such images. Of few cells the pixels are better shared among more programs."""
    fits = 8 <= side <= PIXELS and side & (side - 1) == 0 and max(widths[0], widths[2]) <= MAX_WIDTH
    cells = len(image) * (image.shape[2] // side) * (image.shape[3] // side)
    return fits and cells >= MIN_CELLS and has_shared_memory(image.device)


@torch.library.custom_op("msvit::cell_mlp", mutates_args=())
def cell_mlp(
    image: Tensor, scale: Tensor | None, shift: Tensor | None, position: Tensor, layers: list[Tensor], side: int,
    address: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return logits (b, hc, wc), in float32, of the pixels * scale + shift of each cell (channel, row, column).

    `layers`: weights and biases of four linear layers with GELU between; `position` (1, d, hc, wc) follows the first.
    """
    logits = _empty_logits(image, side)
    batch, rows, columns = logits.shape
    total, block = batch * rows * columns, 64
    (width, _), (hidden, _), (last, _), _ = (layer.shape for layer in layers[::2])
    padded, padded_last = (max(DOT, triton.next_power_of_2(each)) for each in (width, last))
    with torch.cuda.device_of(image):
        _cell_mlp_kernel[(triton.cdiv(total, block),)](
            image, address, scale, shift, *layers[:2], position.contiguous(), *layers[2:], logits, total, rows, columns,
            *image.stride(), CHANNELS=image.shape[1], SIDE=side, WIDTH=width, HIDDEN=hidden, LAST=last, PADDED=padded,
            PADDED_LAST=padded_last, SCALED=scale is not None, BLOCK=block, CHUNK=PIXELS, num_warps=4, num_stages=4,
        )  # fmt: skip
    return logits


@cell_mlp.register_fake
def _(image: Tensor, scale: Any, shift: Any, position: Tensor, layers: list[Tensor], side: int, *_: Any) -> Tensor:
    return _empty_logits(image, side)


def _empty_logits(image: Tensor, side: int) -> Tensor:
    return image.new_empty(len(image), image.shape[2] // side, image.shape[3] // side, dtype=torch.float32)


@triton.jit
@no_type_check
def _units_kernel(
    mean, units, pixels, CHANNELS: tl.constexpr, PADDED: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # Of each image the mean of every channel, and 1 / deviation of all.
    image = tl.program_id(0).to(tl.int64)
    channel, place = tl.arange(0, PADDED), tl.arange(0, BLOCK)[None, :]
    start = mean + (image * CHANNELS + channel[:, None]) * pixels + place
    total = tl.zeros([PADDED, BLOCK], tl.float32)
    for first in range(0, pixels, BLOCK):
        inside = (channel < CHANNELS)[:, None] & (first + place < pixels)
        total += tl.load(start + first, mask=inside, other=0.0)
    centre = tl.sum(total, 1) / pixels
    squares = tl.zeros([PADDED, BLOCK], tl.float32)
    for first in range(0, pixels, BLOCK):
        inside = (channel < CHANNELS)[:, None] & (first + place < pixels)
        away = tl.load(start + first, mask=inside, other=0.0) - centre[:, None]
        squares += tl.where(inside, away * away, 0.0)
    unit = tl.maximum(tl.sum(tl.sum(squares, 1), 0) / (pixels * CHANNELS), SMALLEST)
    tl.store(units + image * (CHANNELS + 1) + channel, centre, mask=channel < CHANNELS)
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
    image_units = units + image * (CHANNELS + 1)
    scale = tl.load(image_units + CHANNELS)
    tap = tl.arange(0, TAPS)
    channel = tap // 9
    i = y[:, None] + (tap % 9 // 3)[None, :] - 1
    j = x[:, None] + (tap % 3)[None, :] - 1
    real = inside[:, None] & (tap < 9 * CHANNELS)[None, :] & (i >= 0) & (i < rows) & (j >= 0) & (j < columns)
    value = tl.load(mean + ((image * CHANNELS + channel)[None, :] * rows + i) * columns + j, mask=real, other=0.0)
    centre = tl.load(image_units + channel, mask=tap < 9 * CHANNELS, other=0.0)
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
    """Return |conv(mean)| (b, h/2, w/2, d), and deviations (b, h/2, w/2), the mean of four; stride 2, padding 1.

    Of mean (b, c, h, w) the image's mean is subtracted, both are divided by its deviation; h and w are even.
    """
    out, deviation = _empty_stem(mean, weight)
    batch, channels, rows, columns = mean.shape
    units, padded = mean.new_empty(batch, channels + 1), triton.next_power_of_2(channels)
    block, taps = 128, max(DOT, triton.next_power_of_2(9 * channels))
    with torch.cuda.device_of(mean):
        _units_kernel[(batch,)](
            mean, units, rows * columns, CHANNELS=channels, PADDED=padded, SMALLEST=MIN_UNIT,
            BLOCK=16384 // padded, num_warps=8,
        )  # fmt: skip
        _stem_kernel[(triton.cdiv(out[0, ..., 0].numel(), block), batch)](
            mean, variance, units, weight.contiguous(), out, deviation, rows, columns,
            CHANNELS=channels, TAPS=taps, WIDTH=weight.shape[0], SMALLEST=MIN_UNIT, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out, deviation


stem.register_fake(lambda mean, variance, weight: _empty_stem(mean, weight))


def _empty_stem(mean: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    size = (mean.shape[0], mean.shape[2] // 2, mean.shape[3] // 2)
    return weight.new_empty(*size, weight.shape[0]), weight.new_empty(size)


@triton.jit
@no_type_check
def _downsample_kernel(
    x, plane, weight, bias, position, out, total, rows, columns,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, HAS_PLANE: tl.constexpr, GELU: tl.constexpr,
    HAS_POSITION: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK places of the output, of any image, and PART of its channels. STRIDE: channels of the
    # weight, the plane's included.
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    half_columns = columns // 2
    places = rows // 2 * half_columns
    place, first_row = i % places, (i // places).to(tl.int64) * rows
    y, z = place // half_columns * 2 - 1, place % half_columns * 2 - 1
    c, n = tl.arange(0, CHANNELS), tl.program_id(1) * PART + tl.arange(0, PART)
    result = tl.zeros([BLOCK, PART], tl.float32)
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
    tl.store(out + i.to(tl.int64)[:, None] * WIDTH + n[None, :], result.to(out.dtype.element_ty), mask=inside[:, None])


@torch.library.custom_op("msvit::downsample", mutates_args=())
def downsample(
    x: Tensor, plane: Tensor | None, weight: Tensor, bias: Tensor, position: Tensor | None, gelu: bool
) -> Tensor:
    """Convolve x (b, h, w, c), with a `plane` (b, h, w) as a further channel -> (b, h/2, w/2, d): stride 2, padding 1.

    `weight` is (3, 3, c, d), with one more channel for the plane; `position` (1, d, h/2, w/2) is added.
    """
    out = _empty_half(x, weight)
    batch, rows, columns, channels = x.shape
    total, width = batch * (rows // 2) * (columns // 2), weight.shape[3]
    block, part, stages = (DOT, min(width, 32), 5) if total <= FEW_PLACES else (64, width, 3)
    with torch.cuda.device_of(x):
        _downsample_kernel[(triton.cdiv(total, block), width // part)](
            x, plane, weight.contiguous(), bias, None if position is None else position.contiguous(), out, total,
            rows, columns, CHANNELS=channels, WIDTH=width, STRIDE=weight.shape[2], HAS_PLANE=plane is not None,
            GELU=gelu, HAS_POSITION=position is not None, PART=part, BLOCK=block, num_warps=4, num_stages=stages,
        )  # fmt: skip
    return out


downsample.register_fake(lambda x, plane, weight, *_: _empty_half(x, weight))


def _empty_half(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2, x.shape[2] // 2, weight.shape[3])


@triton.jit
@no_type_check
def _depthwise_kernel(
    x, weight, bias, out, sums, rows, columns,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK cells and PART channels of an image, and adds up what it computes and its squares.
    image, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = image.to(tl.int64) * rows * columns * WIDTH
    cell, n = tile * BLOCK + tl.arange(0, BLOCK), part * PART + tl.arange(0, PART)
    inside = (cell < rows * columns)[:, None]
    y, z = cell // columns - SIDE // 2, cell % columns - SIDE // 2
    total = tl.zeros([BLOCK, PART], tl.float32) + tl.load(bias + n).to(tl.float32)[None, :]
    for down in tl.static_range(SIDE):
        row = y + down
        for across in tl.static_range(SIDE):
            column = z + across
            real = inside & ((row >= 0) & (row < rows) & (column >= 0) & (column < columns))[:, None]
            at = x + start + (row * columns + column)[:, None] * WIDTH + n[None, :]
            filters = tl.load(weight + (down * SIDE + across) * WIDTH + n).to(tl.float32)
            total += tl.load(at, mask=real, other=0.0).to(tl.float32) * filters[None, :]
    total = tl.where(inside, total, 0.0)
    tl.store(out + start + cell[:, None] * WIDTH + n[None, :], total.to(out.dtype.element_ty), mask=inside)
    place = sums + 2 * ((image * tl.num_programs(1) + tile) * tl.num_programs(2) + part)
    tl.store(place, tl.sum(tl.sum(total, 1), 0))
    tl.store(place + 1, tl.sum(tl.sum(total * total, 1), 0))


@triton.jit
@no_type_check
def _mix_kernel(
    x, mixed, sums, norm_weight, norm_bias, first, first_bias, second, second_bias, out,
    last_weight, last_bias, head, head_bias, total, cells, num_sums, eps, last_eps,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK cells of any images. The norm is over all channels and cells of an image. LAST: not the
    # cells are written but their logits.
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < total
    image_sums = sums + 2 * ((cell // cells) * num_sums)[:, None]
    mean, square = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num_sums, SUMS):  # all at once but for large images: loads one by one would take longest
        each = begin + tl.arange(0, SUMS)[None, :]
        real = inside[:, None] & (each < num_sums)
        mean += tl.sum(tl.load(image_sums + 2 * each, mask=real, other=0.0), 1)
        square += tl.sum(tl.load(image_sums + 2 * each + 1, mask=real, other=0.0), 1)
    mean = mean / (cells * WIDTH)
    scale = 1.0 / tl.sqrt(tl.maximum(square / (cells * WIDTH) - mean * mean, 0.0) + eps)
    n, h = tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    at = cell.to(tl.int64)[:, None] * WIDTH + n[None, :]
    value = tl.load(mixed + at, mask=inside[:, None], other=0.0).to(tl.float32)
    value = (value - mean[:, None]) * scale[:, None] * tl.load(norm_weight + n).to(tl.float32)[None, :]
    value = (value + tl.load(norm_bias + n).to(tl.float32)[None, :]).to(first.dtype.element_ty)
    result = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    result += tl.load(second_bias + n).to(tl.float32)[None, :]
    for begin in range(0, HIDDEN, CHUNK):
        layer = tl.load(first + (begin + h)[None, :] * WIDTH + n[:, None])
        hidden = tl.dot(value, layer) + tl.load(first_bias + begin + h).to(tl.float32)[None, :]
        layer = tl.load(second + n[None, :] * HIDDEN + (begin + h)[:, None])
        result += tl.dot(_gelu_of(hidden).to(layer.dtype), layer)
    if LAST:
        result -= tl.sum(result, 1)[:, None] / WIDTH
        result = result / tl.sqrt(tl.sum(result * result, 1) / WIDTH + last_eps)[:, None]
        result = result * tl.load(last_weight + n).to(tl.float32)[None, :]
        result += tl.load(last_bias + n).to(tl.float32)[None, :]
        logit = tl.sum(result * tl.load(head + n).to(tl.float32)[None, :], 1) + tl.load(head_bias).to(tl.float32)
        tl.store(out + cell, logit, mask=inside)
    else:
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside[:, None])


@torch.library.custom_op("msvit::mix_cells", mutates_args=())
def mix_cells(
    x: Tensor, depthwise: Tensor, layers: list[Tensor], eps: float, last: list[Tensor], last_eps: float
) -> Tensor:
    """Return x (b, hc, wc, d) + MLP(GroupNorm(depthwise convolution of x)); with `last`, float32 logits (b, hc, wc).

    `depthwise` is (side, side, d). `layers`: its bias, then weight and bias of the norm and of two linear layers;
    `last`: those of a LayerNorm and of a linear layer that follow, or nothing.
    """
    batch, rows, columns, width = x.shape
    bias, *norm = layers[:3]
    out, mixed = _empty_mixed(x, bool(last)), torch.empty_like(x)
    hidden, total, part = layers[3].shape[0], batch * rows * columns, min(width, 32)
    block, chunk, warps = (DOT, 128, 8) if total <= FEW_PLACES else (64, 64, 4)
    tiles, parts = triton.cdiv(rows * columns, block), width // part
    sums = x.new_empty(batch, tiles, parts, 2, dtype=torch.float32)
    end: list[Tensor | None] = [*last] or [None] * 4
    with torch.cuda.device_of(x):
        _depthwise_kernel[(batch, tiles, parts)](
            x, depthwise.contiguous(), bias, mixed, sums, rows, columns,
            SIDE=depthwise.shape[0], WIDTH=width, PART=part, BLOCK=block, num_warps=4,
        )  # fmt: skip
        _mix_kernel[(triton.cdiv(total, block),)](
            x, mixed, sums, *norm, *layers[3:], out, *end, total, rows * columns, tiles * parts, eps,
            last_eps, WIDTH=width, HIDDEN=hidden, LAST=bool(last), BLOCK=block, CHUNK=min(hidden, chunk), SUMS=16,
            num_warps=warps, num_stages=2,
        )  # fmt: skip
    return out


mix_cells.register_fake(lambda x, depthwise, layers, eps, last, last_eps: _empty_mixed(x, bool(last)))


def _empty_mixed(x: Tensor, last: bool) -> Tensor:
    return x.new_empty(x.shape[:3], dtype=torch.float32) if last else torch.empty_like(x)
