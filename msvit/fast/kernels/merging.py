"""ToMe's reduction of a packed batch: which tokens of each image are merged, and the smaller batch that is left."""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

# One program holds the keys of half an image's tokens: for 16 bits and heads of 64, of up to 1024; else plain torch.
MAX_HELD = {torch.float16: 512 * 64, torch.bfloat16: 512 * 64, torch.float32: 128 * 64}
STEP = 256  # images, or patches, that a program looks at together

Merged = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit
@no_type_check
def _unit_means(
    keys, row, inside, stride_slot, stride_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    # (rows, WIDE): the mean over heads of each token's keys, of length 1; rounded where plain torch rounds.
    column = tl.arange(0, WIDE)[None, :]
    there = inside[:, None] & (column < DIM)
    place = keys + row[:, None] * stride_slot + column
    total = tl.load(place, mask=there, other=0.0).to(tl.float32)
    for head in tl.static_range(1, HEADS):
        total += tl.load(place + head * stride_head, mask=there, other=0.0).to(tl.float32)
    kind = keys.dtype.element_ty
    mean = (total / HEADS).to(kind).to(tl.float32)
    norm = tl.maximum(tl.sqrt_rn(tl.sum(mean * mean, 1)).to(kind).to(tl.float32), 1e-12)[:, None]
    return (tl.div_rn(mean, norm) if EXACT else mean / norm).to(kind)


@triton.jit
@no_type_check
def _num_merged(length, r, num, den, PREFIX: tl.constexpr):
    # r tokens of an image of so many, or all but ceil(num / den) of them; at most half, prefix tokens not counted.
    count = tl.maximum(length - PREFIX, 0)
    return tl.minimum(tl.where(r < 0, count - (count * num + den - 1) // den, r), count // 2)


@triton.jit(do_not_specialize=("batch", "patches", "r", "num", "den"))
@no_type_check
def _match_kernel(
    keys, cu_seqlens, size, owner, score, into, place_of, merged, index, first, number, new_size, new_cu_seqlens,
    new_owner, batch, patches, stride_slot, stride_head, r, num, den,
    PREFIX: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    # One program per image; its even places are in one block, its odd ones in another. What its tokens need of each
    # other goes through memory: barriers separate writing from reading.
    image = tl.program_id(0)
    begin = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - begin
    goes = _num_merged(length, r, num, den, PREFIX)
    step = tl.arange(0, STEP)
    before = tl.zeros([STEP], tl.int32)
    for start in range(0, image, STEP):
        is_before = start + step < image
        begins = tl.load(cu_seqlens + start + step, mask=is_before, other=0)
        lengths = tl.load(cu_seqlens + start + step + 1, mask=is_before, other=0) - begins
        before += tl.where(is_before, lengths - _num_merged(lengths, r, num, den, PREFIX), 0)
    new_begin = tl.sum(before, 0)
    tl.store(new_cu_seqlens + image, new_begin)
    tl.store(new_cu_seqlens + batch, new_begin + length - goes, mask=image == batch - 1)

    # Each token at an even place finds the most similar one at an odd place, of equal ones the first.
    i = tl.arange(0, BLOCK)
    is_even, is_odd = 2 * i < length, 2 * i + 1 < length
    free_even, free_odd = is_even & (2 * i >= PREFIX), is_odd & (2 * i + 1 >= PREFIX)
    even, odd = begin + 2 * i, begin + 2 * i + 1  # slots
    a = _unit_means(keys, even.to(tl.int64), is_even, stride_slot, stride_head, HEADS, DIM, WIDE, EXACT)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    partner = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length // 2, CHUNK):
        place = 2 * (start + tl.arange(0, CHUNK)) + 1
        row, there = (begin + place).to(tl.int64), place < length
        b = _unit_means(keys, row, there, stride_slot, stride_head, HEADS, DIM, WIDE, EXACT)
        likeness = tl.dot(a, tl.trans(b), input_precision="ieee").to(keys.dtype.element_ty).to(tl.float32)
        likeness = tl.where(likeness == likeness, likeness, float("inf"))  # NaN is the highest, as for torch.max
        likeness = tl.where(free_even[:, None] & (there & (place >= PREFIX))[None, :], likeness, -float("inf"))
        top, which = tl.max(likeness, 1, return_indices=True)
        partner = tl.where(top > best, start + which, partner)
        best = tl.maximum(best, top)
    tl.store(score + even, best, mask=is_even)
    tl.debug_barrier()

    # The best pairs of the image are merged, of equal ones the earlier.
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, (length + 1) // 2, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(score + begin + 2 * j, mask=2 * j < length, other=-float("inf"))[None, :]
        higher = (other > best[:, None]) | ((other == best[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum(higher.to(tl.int32), 1)
    gone = free_even & (rank < goes)
    target = tl.where(gone, begin + 2 * partner + 1, -1)
    tl.store(into + even, target, mask=is_even)

    # Places in the new batch: prefix tokens, then what is left of the even places, then the odd ones.
    stays = free_even & (gone == 0)
    new_even = new_begin + tl.where(free_even, PREFIX + tl.cumsum(stays.to(tl.int32), 0) - 1, 2 * i)
    num_first = (length + 1) // 2 - (PREFIX + 1) // 2 - goes
    shift = new_begin + PREFIX + num_first - PREFIX // 2
    new_odd = tl.where(free_odd, shift + i, new_begin + 2 * i + 1)
    tl.store(place_of + even, tl.where(gone, shift + partner, new_even), mask=is_even)
    tl.store(place_of + odd, new_odd, mask=is_odd)
    kept = is_even & (gone == 0)
    tl.store(index + new_even, even, mask=kept)
    tl.store(number + new_even, tl.zeros([BLOCK], tl.int32), mask=kept)
    tl.store(new_size + new_even, tl.load(size + even, mask=kept), mask=kept)
    tl.debug_barrier()

    # Those that go into one target lie one after the other in `merged`, and their sizes add to its own.
    order = tl.zeros([BLOCK], tl.int32)
    earlier = tl.zeros([BLOCK], tl.int32)
    comes = tl.zeros([BLOCK], tl.int32)
    total = tl.load(size + odd, mask=is_odd, other=1.0)
    for start in range(0, (length + 1) // 2, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(into + begin + 2 * j, mask=2 * j < length, other=-1)[None, :]
        leaves = other >= 0
        same = (other == target[:, None]) & (j[None, :] < i[:, None])
        order += tl.sum((leaves & ((other < target[:, None]) | same)).to(tl.int32), 1)
        earlier += tl.sum((leaves & (other < odd[:, None])).to(tl.int32), 1)
        enters = other == odd[:, None]
        comes += tl.sum(enters.to(tl.int32), 1)
        added = tl.load(size + begin + 2 * j, mask=2 * j < length, other=0.0)[None, :]
        total += tl.sum(tl.where(enters, added, 0.0), 1)
    tl.store(merged + begin + order, even, mask=gone)
    tl.store(index + new_odd, odd, mask=is_odd)
    tl.store(first + new_odd, begin + earlier, mask=is_odd)
    tl.store(number + new_odd, comes, mask=is_odd)
    tl.store(new_size + new_odd, total, mask=is_odd)
    for start in range(0, patches, STEP):
        patch = image.to(tl.int64) * patches + start + step
        slot = tl.load(owner + patch, mask=start + step < patches, other=-1)
        now = tl.load(place_of + slot, mask=slot >= 0, other=-1)
        tl.store(new_owner + patch, now.to(tl.int64), mask=start + step < patches)


@triton.jit(do_not_specialize=("batch", "slots", "new_slots"))
@no_type_check
def _move_kernel(
    x, token, image, weight, size, merged, index, first, number, new_cu_seqlens, new_x, new_token, new_image,
    new_weight, new_size, batch, slots, new_slots, stride_slot,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # A program takes ROWS of the new slots: means by size of what was merged, else a copy. Padding repeats the last
    # slot, with weight 0.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < new_slots
    real = row < tl.load(new_cu_seqlens + batch)
    source = tl.load(index + row, mask=real, other=slots - 1)
    tl.store(new_token + row, tl.load(token + source, mask=inside), mask=inside)
    tl.store(new_image + row, tl.load(image + source, mask=inside), mask=inside)
    kept = tl.load(weight + source, mask=inside)
    tl.store(new_weight + row, tl.where(real, kept, tl.zeros_like(kept)), mask=inside)
    tl.store(new_size + row, tl.load(size + source, mask=inside), mask=inside & (real == 0))
    comes = tl.load(number + row, mask=real, other=0)
    start = tl.load(first + row, mask=comes > 0, other=0)
    size_now = tl.load(new_size + row, mask=real, other=1.0)
    column = tl.arange(0, BLOCK)[None, :]
    known = column < WIDTH
    kept_share = tl.div_rn(tl.load(size + source, mask=real, other=1.0), size_now)
    value = tl.load(x + source.to(tl.int64)[:, None] * stride_slot + column, mask=inside[:, None] & known, other=0.0)
    value = value.to(tl.float32) * kept_share[:, None]
    for step in range(0, tl.max(comes, 0)):
        enters = step < comes
        source = tl.load(merged + start + step, mask=enters, other=0)
        share = tl.div_rn(tl.load(size + source, mask=enters, other=0.0), size_now)
        place = x + source.to(tl.int64)[:, None] * stride_slot + column
        value += tl.load(place, mask=enters[:, None] & known, other=0.0).to(tl.float32) * share[:, None]
    place = new_x + row.to(tl.int64)[:, None] * WIDTH + column
    tl.store(place, value.to(new_x.dtype.element_ty), mask=inside[:, None] & known)


@torch.library.custom_op("msvit::merge_tokens", mutates_args=())
def merge_tokens(
    x: Tensor, keys: Tensor, token: Tensor, image: Tensor, weight: Tensor, size: Tensor, cu_seqlens: Tensor,
    owner: Tensor, num_prefix: int, r: int, num: int, den: int, max_len: int, new_slots: int,
) -> Merged:  # fmt: skip
    """Return x, token, image, weight, size, cu_seqlens and owner (b, patches) after one reduction of a packed batch.

    x (slots, d), keys (slots, heads, head_dim), all others but owner (slots,). An image merges r of its tokens or, if r
    is negative, all but ceil(num / den) of them; it has at most `max_len` (see `can_merge`). Means are weighted by
    size. What is left must fit into `new_slots`. There are no gradients.
    """
    out = _empty_batch(x, token, image, weight, size, cu_seqlens, owner, new_slots)
    new_x, new_token, new_image, new_weight, new_size, new_cu_seqlens, new_owner = out
    batch, slots, (heads, dim), width = cu_seqlens.shape[0] - 1, x.shape[0], keys.shape[1:], x.shape[1]
    keys = keys if keys.stride(2) == 1 else keys.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    score = torch.empty_like(size)
    # Each in memory of its own, which is aligned: Triton compiles for alignments.
    into, place_of, merged = (cu_seqlens.new_empty(slots) for _ in range(3))
    index, first, number = (cu_seqlens.new_empty(new_slots) for _ in range(3))
    tiles = _tiles(max_len, heads, dim, keys.dtype)
    with torch.cuda.device_of(x):
        _match_kernel[(batch,)](
            keys, cu_seqlens, size, owner.contiguous(), score, into, place_of, merged, index, first, number,
            new_size, new_cu_seqlens, new_owner, batch, owner.shape[1], keys.stride(0), keys.stride(1),
            r, num, den, PREFIX=num_prefix, HEADS=heads, DIM=dim, WIDE=tiles.wide, EXACT=keys.dtype is torch.float32,
            BLOCK=tiles.block, CHUNK=tiles.chunk, STEP=STEP, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        columns = triton.next_power_of_2(width)
        rows = max(1, 2048 // columns)
        _move_kernel[(triton.cdiv(new_slots, rows),)](
            x, token, image, weight, size, merged, index, first, number, new_cu_seqlens, new_x, new_token, new_image,
            new_weight, new_size, batch, slots, new_slots, x.stride(0),
            WIDTH=width, BLOCK=columns, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return out


class Tiles(NamedTuple):
    """The tiling of a program: even places, odd ones compared at a time, width of a key, warps, stages."""

    block: int
    chunk: int
    wide: int
    warps: int
    stages: int


def _tiles(max_len: int, heads: int, dim: int, dtype: torch.dtype) -> Tiles:
    """So that two programs of usual images share an SM: a batch of 256 then runs at once on an H200."""
    block, wide = (max(16, triton.next_power_of_2(n)) for n in ((max_len + 1) // 2, dim))
    chunk = 16 if dtype is torch.float32 or block > 256 else min(block, 32)
    ahead = (48 if block <= 128 else 24) * 1024  # bytes of keys that are loaded while others are compared
    stages = 1 + min(2, ahead // (heads * chunk * wide * dtype.itemsize))
    return Tiles(block, chunk, wide, 16 if block > 128 else 8 if block > 32 else 4, stages)


merge_tokens.register_fake(
    lambda x, keys, token, image, weight, size, cu_seqlens, owner, num_prefix, r, num, den, max_len, new_slots: (
        _empty_batch(x, token, image, weight, size, cu_seqlens, owner, new_slots)
    )
)


def _empty_batch(
    x: Tensor, token: Tensor, image: Tensor, weight: Tensor, size: Tensor, cu_seqlens: Tensor, owner: Tensor,
    new_slots: int,
) -> Merged:  # fmt: skip
    new_x = x.new_empty(new_slots, x.shape[1])
    new_token, new_image, new_weight, new_size = (t.new_empty(new_slots) for t in (token, image, weight, size))
    new_owner = owner.new_empty(owner.shape)
    return new_x, new_token, new_image, new_weight, new_size, cu_seqlens.new_empty(cu_seqlens.shape), new_owner


def can_merge(dtype: torch.dtype, keys: Tensor, max_len: int) -> bool:
    """Return whether `merge_tokens` takes x of this dtype, such keys (slots, heads, head_dim), and images so long."""
    if dtype not in MAX_HELD or keys.dtype not in MAX_HELD or max_len < 2:
        return False
    tiles = _tiles(max_len, keys.shape[1], keys.shape[2], keys.dtype)
    return tiles.block * tiles.wide <= MAX_HELD[keys.dtype]
