"""From a mask to token indices, and from indices to pixels."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from msvit.fast.kernels.addresses import _image_at


@triton.jit
@no_type_check
def _lay_out_kernel(
    mask, token, image, cu_seqlens, batch, slots,
    PREFIX: tl.constexpr, CELLS: tl.constexpr, PATCHES: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
    IDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # One program per image, and one more for the end. The fine cells of the images before determine where this one
    # starts, those of all images where padding does, of which each program writes its share.
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNK)
    before = tl.zeros([CHUNK], tl.int32)
    total = tl.zeros([CHUNK], tl.int32)
    for start in range(0, batch * CELLS, CHUNK):
        is_fine = (tl.load(mask + start + chunk, mask=start + chunk < batch * CELLS, other=0.0) > 0.5).to(tl.int32)
        before += tl.where(start + chunk < row * CELLS, is_fine, 0)
        total += is_fine
    first = row * (PREFIX + CELLS) + (K * K - 1) * tl.sum(before, 0)
    tl.store(cu_seqlens + row, tl.minimum(first, slots))
    end = batch * (PREFIX + CELLS) + (K * K - 1) * tl.sum(total, 0)
    for start in range(end + row * CHUNK, slots, CHUNK * tl.num_programs(0)):
        has_padding = start + chunk < slots
        tl.store(token + start + chunk, PREFIX + 0 * chunk.to(tl.int64), mask=has_padding)
        tl.store(image + start + chunk, (batch - 1) + 0 * chunk.to(tl.int64), mask=has_padding)
    if row < batch:
        ids = tl.arange(0, IDS)
        patch = ids - PREFIX - CELLS
        fine = (patch >= 0) & (patch < PATCHES)
        coarse = (ids >= PREFIX) & (patch < 0)
        cell = (patch // (COLUMNS * K)) // K * COLUMNS + (patch % (COLUMNS * K)) // K
        cell = tl.where(coarse, ids - PREFIX, cell)
        decided = tl.load(mask + row * CELLS + cell, mask=fine | coarse, other=0.0) > 0.5
        active = (ids < PREFIX) | (fine & decided) | (coarse & (decided == 0))
        slot = first + tl.cumsum(active.to(tl.int32), 0) - 1
        fits = active & (slot < slots)
        tl.store(token + slot, ids.to(tl.int64), mask=fits)
        tl.store(image + slot, row.to(tl.int64) + 0 * ids.to(tl.int64), mask=fits)


@torch.library.custom_op("msvit::pack_indices", mutates_args=())
def pack_indices(
    mask: Tensor, num_prefix: int, rows: int, columns: int, k: int, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack mask (b, hc, wc) to token (slots,), image (slots,), cu_seqlens (b + 1,); padding holds the first cell."""
    arrays = _empty_layout(mask, slots)
    _lay_out(mask, num_prefix, rows, columns, k, *arrays)
    return arrays


@torch.library.custom_op("msvit::pack_indices_into", mutates_args=("token", "image", "cu_seqlens"))
def pack_indices_into(
    mask: Tensor, num_prefix: int, rows: int, columns: int, k: int, token: Tensor, image: Tensor, cu_seqlens: Tensor
) -> None:
    """Write what `pack_indices` returns to memory that is given."""
    _lay_out(mask, num_prefix, rows, columns, k, token, image, cu_seqlens)


def _lay_out(
    mask: Tensor, num_prefix: int, rows: int, columns: int, k: int, token: Tensor, image: Tensor, cu_seqlens: Tensor
) -> None:
    mask = mask.contiguous()
    batch, cells, patches = mask.shape[0], rows * columns, rows * columns * k * k
    ids = triton.next_power_of_2(num_prefix + cells + patches)
    with torch.cuda.device_of(mask):
        _lay_out_kernel[(batch + 1,)](
            mask, token, image, cu_seqlens, batch, token.shape[0],
            PREFIX=num_prefix, CELLS=cells, PATCHES=patches, COLUMNS=columns, K=k, IDS=ids, CHUNK=1024, num_warps=4,
        )  # fmt: skip


pack_indices.register_fake(lambda mask, num_prefix, rows, columns, k, slots: _empty_layout(mask, slots))


def _empty_layout(mask: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    token = mask.new_empty(slots, dtype=torch.long)
    return token, torch.empty_like(token), mask.new_empty(mask.shape[0] + 1, dtype=torch.int32)


@triton.jit
@no_type_check
def _gather_kernel(
    image, address, which, patch, pixels, stride_b, stride_c, stride_h, stride_w,
    PREFIX: tl.constexpr, CHANNELS: tl.constexpr, CELLS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
    SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program per token. A fine patch is copied; of a coarse cell every k x k pixels become their mean; a prefix
    # token, whose id is below PREFIX, has only zeros.
    row = tl.program_id(0).to(tl.int64)
    corner = _image_at(image, address) + tl.load(which + row) * stride_b
    place = tl.load(patch + row) - PREFIX
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    inside = (i < SIDE) & (j < SIDE)
    out = pixels + row * (CHANNELS * SIDE * SIDE) + i * SIDE + j
    if place < 0:
        for channel in tl.static_range(CHANNELS):
            zero = tl.zeros([BLOCK, BLOCK], pixels.dtype.element_ty)
            tl.store(out + channel * SIDE * SIDE, zero, mask=inside)
    elif place >= CELLS:
        place = place - CELLS
        corner += (place // (COLUMNS * K)) * SIDE * stride_h + (place % (COLUMNS * K)) * SIDE * stride_w
        for channel in tl.static_range(CHANNELS):
            pixel = corner + channel * stride_c + i * stride_h + j * stride_w
            value = tl.load(pixel, mask=inside).to(pixels.dtype.element_ty)
            tl.store(out + channel * SIDE * SIDE, value, mask=inside)
    else:
        corner += (place // COLUMNS) * SIDE * K * stride_h + (place % COLUMNS) * SIDE * K * stride_w
        for channel in tl.static_range(CHANNELS):
            plane = corner + channel * stride_c
            if (K & (K - 1)) == 0:  # whole rows of the cell at a time
                across = tl.arange(0, BLOCK * K)[None, :]
                wide = (i < SIDE) & (across < SIDE * K)
                rows = tl.zeros([BLOCK, BLOCK * K], tl.float32)
                for di in tl.static_range(K):
                    rows_at = plane + (i * K + di) * stride_h + across * stride_w
                    rows += tl.load(rows_at, mask=wide, other=0.0).to(tl.float32)
                total = tl.sum(tl.reshape(rows, [BLOCK, BLOCK, K]), 2)
            else:
                total = tl.zeros([BLOCK, BLOCK], tl.float32)
                for di in tl.static_range(K):
                    for dj in tl.static_range(K):
                        pixel = plane + (i * K + di) * stride_h + (j * K + dj) * stride_w
                        total += tl.load(pixel, mask=inside, other=0.0).to(tl.float32)
            mean = (total / (K * K)).to(pixels.dtype.element_ty)
            tl.store(out + channel * SIDE * SIDE, mean, mask=inside)


@torch.library.custom_op("msvit::gather_pixels", mutates_args=())
def gather_pixels(
    image: Tensor, which: Tensor, patch: Tensor, side: int, k: int, dtype: torch.dtype, address: Tensor | None = None
) -> Tensor:
    """Gather (n, c side side) from (b, c, h, w): row i is token `patch[i]` (cells first) of image `which[i]`."""
    pixels = image.new_empty(which.shape[0], image.shape[1] * side * side, dtype=dtype)
    _gather(image, address, which, patch, 0, side, k, pixels)
    return pixels


@torch.library.custom_op("msvit::gather_pixels_into", mutates_args=("pixels",))
def gather_pixels_into(
    image: Tensor, which: Tensor, token: Tensor, num_prefix: int, side: int, k: int, pixels: Tensor,
    address: Tensor | None = None,
) -> None:  # fmt: skip
    """Gather pixels into `pixels`, for token ids that count prefix tokens first; rows of these are 0."""
    _gather(image, address, which, token, num_prefix, side, k, pixels)


def _gather(
    image: Tensor, address: Tensor | None, which: Tensor, patch: Tensor, num_prefix: int, side: int, k: int,
    pixels: Tensor,
) -> None:  # fmt: skip
    if which.shape[0] == 0:
        return
    channels, rows, columns = image.shape[1], image.shape[2] // (side * k), image.shape[3] // (side * k)
    with torch.cuda.device_of(image):
        _gather_kernel[(which.shape[0],)](
            image, address, which, patch, pixels, *image.stride(),
            PREFIX=num_prefix, CHANNELS=channels, CELLS=rows * columns, COLUMNS=columns, K=k,
            SIDE=side, BLOCK=triton.next_power_of_2(side), num_warps=2,
        )  # fmt: skip


@gather_pixels.register_fake
def _(image: Tensor, which: Tensor, patch: Tensor, side: int, k: int, dtype: torch.dtype, *_: Any) -> Tensor:
    return image.new_empty(which.shape[0], image.shape[1] * side * side, dtype=dtype)
