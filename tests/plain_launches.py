"""The launches of our kernels done in plain torch, for tests of what is built on them.

Triton's interpreter takes a quarter of a second for each launch, and a replay has twenty; the kernels themselves are
tested in library/execution. All pairs of slots are compared, so nothing depends on lengths that a captured graph would
not read again.
"""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.execution.layout import pack_indices
from msvit.tokens.patches import patch_pixels
from msvit.types import ScaleGrid


class Launch:
    """kernel[grid](...) calls a function instead."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run


def use_plain_launches(patch: pytest.MonkeyPatch) -> None:
    from msvit.fast import kernels  # only where there is Triton

    for name, run in (("", forward), ("_dq", dq_of), ("_dkv", dkv_of)):
        patch.setattr(kernels.attending, f"_attention{name}_kernel", Launch(run))
    patch.setattr(kernels.windows, "_window_kernel", Launch(windows))
    patch.setattr(kernels.norms, "_norm_kernel", Launch(norm))
    patch.setattr(kernels.fp8, "_norm_fp8_kernel", Launch(norm_fp8))
    patch.setattr(kernels.fp8, "_gelu_fp8_kernel", Launch(gelu_fp8))
    patch.setattr(kernels.tokens, "_lay_out_kernel", Launch(lay_out))
    patch.setattr(kernels.tokens, "_gather_kernel", Launch(gather))
    patch.setattr(kernels.norms, "_add_norm_kernel", Launch(add_norm))
    patch.setattr(kernels.norms, "_add_norm_backward_kernel", Launch(add_norm_backward))
    patch.setattr(kernels.sums, "_sum_rows_kernel", Launch(sum_rows))
    patch.setattr(kernels.activation, "_gelu_kernel", Launch(gelu))
    patch.setattr(kernels.activation, "_gelu_backward_kernel", Launch(gelu_backward))
    patch.setattr(torch, "_scaled_mm", scaled_mm)


def scaled_mm(
    x: Tensor, weight: Tensor, scale_x: Tensor, scale_weight: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype,
    use_fast_accum: bool, out: Tensor,
) -> Tensor:  # fmt: skip
    """With scales per row and column, and what it asks for on a GPU."""
    rows, columns = x.shape[0], weight.shape[1]
    assert x.dtype is weight.dtype
    assert x.is_contiguous()
    assert weight.T.is_contiguous()
    assert x.shape[1] % 16 == columns % 16 == 0
    assert (scale_x.shape, scale_weight.shape) == ((rows, 1), (1, columns))
    assert scale_x.dtype is scale_weight.dtype is torch.float32
    assert out.dtype is out_dtype is torch.bfloat16
    product = (x.double() @ weight.double()) * scale_x * scale_weight
    return out.copy_(product if bias is None else product + bias)


def norm(
    x: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, rows: int, eps: float,
    ADD_TO_X: bool, **sizes: Any,
) -> None:  # fmt: skip
    value = x.double() if ADD_TO_X else x.double() + shift
    if ADD_TO_X:
        x.add_(shift)
    if weight is not None and bias is not None:
        value = F.layer_norm(value, value.shape[1:], weight.double(), bias.double(), eps)
    y.copy_(value)


def norm_fp8(
    x: Tensor, added: Tensor | None, shift: Tensor, weight: Tensor, bias: Tensor, y: Tensor, scale: Tensor, rows: int,
    eps: float, **sizes: Any,
) -> None:  # fmt: skip
    if added is not None:
        x.add_(added)
    store_scaled(F.layer_norm(x.double() + shift, x.shape[1:], weight.double(), bias.double(), eps), y, scale)


def gelu_fp8(x: Tensor, y: Tensor, scale: Tensor, rows: int, **sizes: Any) -> None:
    store_scaled(F.gelu(x.double(), approximate="tanh"), y, scale)


def store_scaled(value: Tensor, y: Tensor, scale: Tensor) -> None:
    scale.copy_((value.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12))
    y.copy_((value / scale).float())


def add_norm(
    x: Tensor, u: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, total: Tensor, y: Tensor, centre: Tensor,
    scale: Tensor, rows: int, eps: float, **sizes: Any,
) -> None:  # fmt: skip
    total.copy_(x + u if added is None else x + u + added.float())
    centre.copy_(total.mean(1))
    scale.copy_((total.var(1, correction=0) + eps).rsqrt())
    y.copy_((total - centre[:, None]) * scale[:, None] * weight + bias)


def add_norm_backward(
    dtotal: Tensor | None, dy: Tensor, total: Tensor, centre: Tensor, scale: Tensor, weight: Tensor, dx: Tensor,
    du: Tensor, sums: Tensor, rows: int, SUMS: int, **sizes: Any,
) -> None:  # fmt: skip
    normal, slope = (total - centre[:, None]) * scale[:, None], dy.float() * weight
    along = (slope * normal).mean(1, keepdim=True)
    dx.copy_(scale[:, None] * (slope - slope.mean(1, keepdim=True) - normal * along))
    if dtotal is not None:
        dx.add_(dtotal)
    du.copy_(dx)
    sums.zero_()
    sums[0] = torch.stack([(dy.float() * normal).sum(0), dy.float().sum(0), dx.sum(0)])[:SUMS]


def gelu(x: Tensor, bias: Tensor | None, y: Tensor, rows: int, **sizes: Any) -> None:
    y.copy_(F.gelu(x.double() if bias is None else x.double() + bias))


def gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, sums: Tensor | None, rows: int, **sizes: Any
) -> None:
    value = x.double() if bias is None else x.double() + bias
    grad = torch.ops.aten.gelu_backward(dy.double(), value)
    dx.copy_(grad)
    if sums is not None:
        sums.zero_()
        sums[0] = grad.sum(0)


def sum_rows(x: Tensor, first: Tensor, second: Tensor, rows: int, SPLIT: int, **sizes: Any) -> None:
    total = x.double().sum(0).flatten()
    for into, part in ((first, total[:SPLIT]), (second, total[SPLIT:])):
        if part.numel():
            into.zero_()
            into.view(-1)[: part.numel()] = part


def image_at(image: Tensor, address: Tensor | None) -> Tensor:
    """The image, or the one like it that lies at the address."""
    if address is None:
        return image
    size = 1 + sum((n - 1) * stride for n, stride in zip(image.shape, image.stride(), strict=True))
    memory = (ctypes.c_char * (size * image.element_size())).from_address(int(address))
    return torch.frombuffer(memory, dtype=image.dtype).as_strided(image.shape, image.stride())


def gather(
    image: Tensor, address: Tensor | None, which: Tensor, patch: Tensor, pixels: Tensor, *strides: int, PREFIX: int,
    K: int, SIDE: int,
    **sizes: Any,
) -> None:  # fmt: skip
    grid = ScaleGrid(image.shape[2], image.shape[3], fine=SIDE, coarse=SIDE * K)
    found = patch_pixels(image_at(image, address).float(), grid)[which, (patch - PREFIX).clamp(min=0)]
    pixels.copy_(found.masked_fill((patch < PREFIX)[:, None], 0))


def lay_out(
    mask: Tensor, token: Tensor, image: Tensor, cu_seqlens: Tensor, batch: int, slots: int, PREFIX: int, K: int,
    **sizes: Any,
) -> None:  # fmt: skip
    grid = ScaleGrid(mask.shape[1] * K, mask.shape[2] * K, fine=1, coarse=K)
    for into, found in zip((token, image, cu_seqlens), pack_indices(mask, grid, PREFIX, slots), strict=True):
        into.copy_(found)


def attended(
    q: Tensor, k: Tensor, weight: Tensor | None, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Eq. 10 over pairs of slots of one image: A_ij and A_ij / w_j, (heads, queries, keys)."""
    batch = cu_q.shape[0] - 1
    image_q, image_k = (
        torch.searchsorted(cu[1:].contiguous(), torch.arange(len(x), dtype=cu.dtype), right=True)
        for cu, x in ((cu_q, q), (cu_k, k))
    )
    seen = (image_q[:, None] == image_k) & (image_k < batch)
    score = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * scale
    e, w = torch.where(seen, score.exp(), 0.0), 1.0 if weight is None else weight.double()
    total = (e * w).sum(-1, keepdim=True)
    alone = e / torch.where(total == 0, 1, total)
    return w * alone, alone


def forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, y: Tensor, lse: Tensor | None, cu_q: Tensor, cu_k: Tensor,
    batch: int, slots: int, scale: float, *strides: int, HAS_KEY_WEIGHTS: bool, **sizes: Any,
) -> None:  # fmt: skip
    share, _ = attended(q, k, weight if HAS_KEY_WEIGHTS else None, cu_q, cu_k, scale * math.log(2))
    mixed = torch.einsum("hij,jhd->ihd", share, v.double().nan_to_num())
    # 0 * NaN: a NaN value counts only where it is attended to
    broken = torch.einsum("hij,jhd->ihd", (share != 0).double(), v.isnan().double()) > 0
    y.copy_(mixed.masked_fill(broken, torch.nan))


def change(dy: Tensor, v: Tensor, share: Tensor) -> Tensor:
    """The gradient of the scores is that of A_ij, less its mean over keys, times A_ij."""
    of_share = torch.einsum("ihd,jhd->hij", dy.double(), v.double())
    return of_share - (share * of_share).sum(-1, keepdim=True)


def dq_of(
    dy: Tensor, y: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, lse: Tensor, dq: Tensor,
    level: Tensor, sums: Tensor | None, cu_q: Tensor, cu_k: Tensor, batch: int, slots: int, scale: float,
    *strides: int, HAS_KEY_WEIGHTS: bool, **sizes: Any,
) -> None:  # fmt: skip
    share, _ = attended(q, k, weight if HAS_KEY_WEIGHTS else None, cu_q, cu_k, scale)
    dq.copy_(scale * torch.einsum("hij,jhd->ihd", share * change(dy, v, share), k.double()))
    if sums is not None:
        sums.zero_()
        sums[0].view(3, -1)[0] = dq.flatten(1).float().sum(0)


def dkv_of(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, lse: Tensor, level: Tensor, dk: Tensor,
    dv: Tensor, dw: Tensor | None, sums: Tensor | None, cu_q: Tensor, cu_k: Tensor, batch: int, slots: int,
    scale: float, *strides: int, HAS_KEY_WEIGHTS: bool, **sizes: Any,
) -> None:  # fmt: skip
    share, alone = attended(q, k, weight if HAS_KEY_WEIGHTS else None, cu_q, cu_k, scale)
    dk.copy_(scale * torch.einsum("hij,ihd->jhd", share * change(dy, v, share), q.double()))
    dv.copy_(torch.einsum("hij,ihd->jhd", share, dy.double()))
    if dw is not None:
        dw.copy_((alone * change(dy, v, share)).sum(1).T)
    if sums is not None:
        sums[0].view(3, -1)[1:] = torch.stack([t.flatten(1).float().sum(0) for t in (dk, dv)])


def windows(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, cell: Tensor, rank: Tensor, bias: Tensor, padding: int, scale: float,
    *strides: int, HIGH: int, WIDE: int, WINDOW_H: int, WINDOW_W: int, SHIFT_H: int, SHIFT_W: int, SIDE: int,
    **sizes: Any,
) -> None:  # fmt: skip
    """Every window of every image at once; `part` tells apart what a shift has brought together."""
    rows, columns = -(-HIGH // WINDOW_H), -(-WIDE // WINDOW_W)
    image = torch.arange(cell.shape[0]).view(-1, 1, 1, 1, 1)
    y_at, x_at = torch.arange(rows * WINDOW_H).view(rows, 1, WINDOW_H, 1), torch.arange(columns * WINDOW_W)
    x_at = x_at.view(1, columns, 1, WINDOW_W)
    from_y, from_x = (y_at + SHIFT_H) % HIGH, (x_at + SHIFT_W) % WIDE
    real = (y_at < HIGH) & (x_at < WIDE)
    place = cell[image, from_y // SIDE, from_x // SIDE]
    there = real & (place >= 0)
    slot = torch.where(there, place * SIDE**2 + rank.view(-1)[from_y % SIDE * SIDE + from_x % SIDE], padding)
    part = 3 * moved(y_at, rows * WINDOW_H, WINDOW_H, SHIFT_H) + moved(x_at, columns * WINDOW_W, WINDOW_W, SHIFT_W)
    part = part.expand_as(slot).reshape(-1, WINDOW_H * WINDOW_W)
    slot, there, padded = (t.expand_as(place).reshape(part.shape) for t in (slot, there, ~real))
    queries, keys, values = (x[slot.clamp(max=len(x) - 1)].double().transpose(1, 2) for x in (q, k, v))
    score = queries @ keys.mT * scale * math.log(2) + bias.double()
    if SHIFT_H + SHIFT_W > 0:
        score = score - 100.0 * (part[:, :, None] != part[:, None])[:, None]
    score = score.masked_fill(~(there | padded)[:, None, None], -torch.inf)
    values = values.masked_fill(~(there | padded)[:, None, :, None], 0)
    y[slot[there]] = (score.softmax(-1) @ values).transpose(1, 2)[there].to(y.dtype)


def moved(place: Tensor, length: int, side: int, shift: int) -> Tensor:
    return (place >= length - side).long() + (place >= length - shift).long()
