"""The functions of `msvit.fast.kernels` in plain torch, for tests of what is built on them.

Triton's interpreter takes a quarter of a second for each launch, and a replay has twenty; the kernels themselves are
tested in library/execution. Nothing that a captured graph would not read again, such as lengths, is kept in Python.
"""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.execution.attention import force_backend, weighted_attention
from msvit.execution.layout import pack_indices
from msvit.swin.cells import Places
from msvit.swin.windows import Finder, Frame, attend_windows
from msvit.tokens.patches import patch_pixels
from msvit.types import ScaleGrid


def use_plain_kernels(patch: pytest.MonkeyPatch) -> None:
    from msvit.fast import kernels  # only where there is Triton

    for differentiable in (attention, self_attention, gelu, add_norm):
        patch.setattr(kernels, differentiable.__name__, differentiable)
    patch.setattr(kernels.linears, "sum_rows", lambda x: x.double().sum(0).to(x.dtype))
    for run in (
        attention_into, window_attention, normalize_into, normalize_then_add, normalize_fp8_into, gelu_fp8_into,
        pack_indices_into, gather_pixels, gather_pixels_into,
    ):  # fmt: skip
        patch.setitem(getattr(kernels, run.__name__)._backend_fns, None, run)  # one operation of a graph
    patch.setattr(torch, "_scaled_mm", scaled_mm)


def attention(q, k, v, weight, has_key_weights, cu_q, cu_k, max_q, max_k, scale):
    """Images in rows of their own: what one has in common with others is nothing, not even NaN."""
    (index_q, has_q), (index_k, has_k) = rows_of(cu_q, max_q, len(q)), rows_of(cu_k, max_k, len(k))
    given = ((q, index_q, has_q), (k, index_k, has_k), (v, index_k, has_k))
    rows = [t.double()[index].where(has[..., None, None], 0).transpose(1, 2) for t, index, has in given]
    w = has_k.double() if weight is None else weight.double()[index_k] * has_k
    y = weighted_attention(*rows, w[:, None, None], scale).transpose(1, 2)  # (b, max_q, heads, head_dim)
    out = y.new_zeros(len(q) + 1, *y.shape[2:])  # a row more for those that no image has
    return out.index_copy(0, index_q.where(has_q, len(q)).flatten(), y.flatten(0, 1))[:-1].to(v.dtype)


def rows_of(cu_seqlens: Tensor, max_len: int, slots: int) -> tuple[Tensor, Tensor]:
    """The slots of each image, (b, max_len), and which are its own."""
    index = cu_seqlens[:-1, None] + torch.arange(max_len)
    return index.clamp(max=slots - 1).long(), index < cu_seqlens[1:, None]


def self_attention(qkv, bias, weight, has_key_weights, cu_seqlens, max_len, scale):
    qkv = qkv if bias is None else qkv + (bias - bias.detach()).view(qkv.shape[1:])  # 0, with a gradient
    bounds = (cu_seqlens, cu_seqlens, max_len, max_len)
    return attention(*qkv.unbind(1), weight, has_key_weights, *bounds, scale)


def attention_into(q, k, v, weight, cu_seqlens, max_len, scale, y):
    y.copy_(attention(q, k, v, weight, True, cu_seqlens, cu_seqlens, max_len, max_len, scale))


def window_attention(q, k, v, cell, rank, bias, slots, side, window, shift, scale):
    known = (Places(cell, side, merges, slots, whole=False) for merges in range(side.bit_length()))
    places = next(places for places in known if torch.equal(places.rank, rank))
    with force_backend("sdpa"):
        frame, wide = Frame(tuple(window), tuple(shift)), [t.double() for t in (q, k, v)]
        return attend_windows(*wide, Finder(places), frame, bias.double(), scale).to(v.dtype, copy=True)


def layer_norm(x, weight, bias, eps):
    return x if weight is None else F.layer_norm(x, x.shape[1:], weight.double(), bias.double(), eps)


def normalize_into(x, shift, weight, bias, eps, y):
    y.copy_(layer_norm(x.double() + shift, weight, bias, eps))


def normalize_then_add(x, weight, bias, eps, added, y):
    y.copy_(layer_norm(x.double(), weight, bias, eps))
    x.add_(added)


def normalize_fp8_into(x, added, shift, weight, bias, eps, y, scale):
    x.add_(0 if added is None else added)
    store_scaled(layer_norm(x.double() + shift, weight, bias, eps), y, scale)


def gelu_fp8_into(x, y, scale):
    store_scaled(F.gelu(x.double(), approximate="tanh"), y, scale)


def store_scaled(value, y, scale):
    scale.copy_((value.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12))
    y.copy_((value / scale).float())


def scaled_mm(x, weight, scale_x, scale_weight, *, bias, out_dtype, use_fast_accum, out):
    """With scales per row and column, and what it asks for on a GPU."""
    assert x.dtype is weight.dtype
    assert x.is_contiguous()
    assert weight.T.is_contiguous()
    assert x.shape[1] % 16 == weight.shape[1] % 16 == 0
    assert (scale_x.shape, scale_weight.shape) == ((x.shape[0], 1), (1, weight.shape[1]))
    assert scale_x.dtype is scale_weight.dtype is torch.float32
    assert out.dtype is out_dtype is torch.bfloat16
    return out.copy_((x.double() @ weight.double()) * scale_x * scale_weight + (0 if bias is None else bias))


def add_norm(x, u, added, weight, bias, eps, dtype):
    total = x + u if added is None else x + u + added.float()
    return total, layer_norm(total.double(), weight, bias, eps).to(dtype)


def gelu(x, bias=None):
    return F.gelu(x.double() if bias is None else x.double() + bias).to(x.dtype)


def pack_indices_into(mask, num_prefix, rows, columns, k, token, image, cu_seqlens):
    found = pack_indices(mask, ScaleGrid(rows * k, columns * k, fine=1, coarse=k), num_prefix, len(token))
    for into, each in zip((token, image, cu_seqlens), found, strict=True):
        into.copy_(each)


def gather_pixels(image, which, patch, side, k, dtype, address=None):
    if address is not None:  # of the image like this one that lies there
        size = 1 + sum((n - 1) * stride for n, stride in zip(image.shape, image.stride(), strict=True))
        memory = (ctypes.c_char * (size * image.element_size())).from_address(int(address))
        image = torch.frombuffer(memory, dtype=image.dtype).as_strided(image.shape, image.stride())
    grid = ScaleGrid(image.shape[2], image.shape[3], fine=side, coarse=side * k)
    return patch_pixels(image.float(), grid)[which, patch].to(dtype)


def gather_pixels_into(image, which, token, num_prefix, side, k, pixels, address=None):
    found = gather_pixels(image, which, (token - num_prefix).clamp(min=0), side, k, pixels.dtype, address)
    pixels.copy_(found.where((token >= num_prefix)[:, None], 0))
