"""Attention inside each image of a layout: one function, one fall-back rule.

    y = attend(q, k, v, layout)                     # q, k, v: (slots, heads, head_dim)
    y = attend(q, k, v, layout, num_queries=1)      # q: (b * 1, heads, head_dim), such as a pooling query
    with force_backend("sdpa"): ...                 # triton | varlen | sdpa, for tests and measurements

The definition is Eq. 10 of the paper: A_ij = w_j exp(s_ij) / sum_p w_p exp(s_ip), over the tokens p of the
same image. Layouts with inactive tokens compute just that, and so does the Triton kernel, forward and backward. Packed
layouts hold only tokens with w_j = 1, so the weight changes no value and only its gradient is wanted. The Triton kernel
computes it in its backward. Others get one more column,
q' = [q, 1], k' = [k, log(w) / scale], which adds log(w_j) = 0 to every score, so that autograd of any attention also
gives the gate's gradient. Merged tokens count as often as their size says: w_j is then the weight times the size, and
log(w_j) is added to the scores in the same ways.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from msvit.fast.find_kernels import kernels
from msvit.shapes import Float
from msvit.types import Bucket, Layout, PackedLayout, PaddedLayout

varlen_attn: Any = varlen.varlen_attn

BACKENDS = ("triton", "varlen", "sdpa")
_forced: str | None = None

# Plain constants, so that torch.compile sees through them.
_HAS_VARLEN = torch.version.cuda is not None
_HAS_MKL = torch.backends.mkl.is_available()

# Tokens of an image, measured on a CPU.
SHORT = 160  # up to here images of like length are faster in one call, and MKL's products than the fused kernel
SHORT_TRAINED = 64  # the same with gradients, where gathering tokens costs more


def attend(
    q: Float[Tensor, "queries heads head_dim"],
    k: Float[Tensor, "slots heads head_dim"],
    v: Float[Tensor, "slots heads head_dim"],
    layout: Layout,
    num_queries: int | None = None,
) -> Float[Tensor, "queries heads head_dim"]:
    """Attend from each query to the tokens of its own image. With `num_queries`, q holds that many per image."""
    scale = q.shape[-1] ** -0.5
    q, k = q.type_as(v), k.type_as(v)  # a norm of theirs may have left them wider under autocast
    backend = choose_backend(q.dtype, q.shape[-1], q.is_cuda)
    has_key_weights = layout.size is not None or layout.has_inactive
    if backend == "triton":
        weight = key_weight(layout) if has_key_weights or layout.weight.requires_grad else None
        return kernels.attention(q, k, v, weight, has_key_weights, *_sequence_bounds(layout, num_queries), scale)
    if isinstance(layout, PaddedLayout):
        return _attend_padded(q, k, v, layout, scale)
    if not isinstance(layout, PackedLayout):
        exported: Any = layout  # an ExportLayout
        return exported.attend(q, k, v, scale, num_queries)
    if layout.has_inactive:
        return _weighted_by_bucket(q, k, v, layout, scale, num_queries)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, layout.weight))
    if not needs_grad and not layout.has_padding and not has_key_weights:
        return _attend_packed(q, k, v, layout, scale, num_queries, backend)
    k, v = _without_padding(k, layout), _without_padding(v, layout)
    q = q if num_queries else _without_padding(q, layout)
    head_dim = v.shape[-1]
    bias = None
    if (needs_grad and layout.weight.requires_grad) or (has_key_weights and backend != "sdpa"):
        q, k, v = _with_weight_column(q, k, v, key_weight(layout), scale)
    elif layout.size is not None:
        bias = layout.size.log().to(q.dtype)
    y = _attend_packed(q, k, v, layout, scale, num_queries, backend, bias)[..., :head_dim]
    return y if num_queries else _without_padding(y, layout)


def attend_among(
    qkv: Float[Tensor, "slots 3 heads head_dim"], bias: Float[Tensor, " width"], layout: Layout
) -> Float[Tensor, "slots heads head_dim"]:
    """Attend by the Triton kernel, if that is the backend. The bias that was added to qkv gets its gradient here."""
    has_key_weights = layout.size is not None or layout.has_inactive
    weight = key_weight(layout) if has_key_weights or layout.weight.requires_grad else None
    bounds, scale = (layout.cu_seqlens, layout.max_len), qkv.shape[-1] ** -0.5
    return kernels.self_attention(qkv, bias, weight, has_key_weights, *bounds, scale)


def key_weight(layout: Layout) -> Float[Tensor, " slots"]:
    """Return w_j: whether a token is active, times how often it counts."""
    return layout.weight if layout.size is None else layout.weight * layout.size


@contextmanager
def force_backend(name: str) -> Iterator[None]:
    """Run packed attention with one backend, whatever the fall-back rule would choose."""
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}")
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def choose_backend(dtype: torch.dtype, head_dim: int, cuda: bool) -> str:
    """Return the backend: our own kernel where it can be used, else torch's varlen or SDPA."""
    if _forced is None and not cuda:
        return "sdpa"
    ours = kernels is not None and kernels.can_attend(dtype, head_dim)
    if _forced is not None:
        if _forced == "triton" and not ours:
            raise ValueError(
                f"the triton backend needs Triton and heads of 16, 32, 64 or 128 numbers in 16 or 32 bits, "
                f"and these have {head_dim} in {dtype}; force another backend"
            )
        return _forced
    if ours:
        return "triton"
    fused = dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256
    return "varlen" if fused and _HAS_VARLEN else "sdpa"


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, layout: PaddedLayout, scale: float) -> Tensor:
    batch = layout.batch
    weight = key_weight(layout).view(batch, 1, 1, -1)  # (b, 1, 1, n)
    q, k, v = (t.unflatten(0, (batch, -1)).transpose(1, 2) for t in (q, k, v))  # (b, heads, n, head_dim)
    if weight.requires_grad and torch.is_grad_enabled():
        y = weighted_attention(q, k, v, weight, scale)
    else:
        mask = weight > 0.5 if layout.size is None else weight.log().to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y.transpose(1, 2).flatten(0, 1)


def weighted_attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Compute Eq. 10, with a gradient for every weight, also where it is 0. q, k, v: (..., heads, n, head_dim).

    `bias` is added to the scores. Where all keys have weight 0, the result is 0. A key of weight 0 may score far above
    the others: in the gradient its attention, exp(s_j) over the sum of the active keys, counts as 1 at most.
    """
    with torch.autocast(q.device.type, enabled=False):
        wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        score = (q.to(wide) * scale) @ k.to(wide).transpose(-2, -1)  # (b, heads, n, n)
        score = score if bias is None else score + bias.to(wide)
        active = (score.detach() + weight.detach().to(wide).log()).logsumexp(-1, keepdim=True)
        active = active.clamp(min=torch.finfo(wide).min)
        e = weight.to(wide) * (score - active).clamp(max=0).exp()
        total = e.sum(-1, keepdim=True)
        return ((e @ v.to(wide)) / total.masked_fill(total == 0, 1)).to(v.dtype)  # n d divisions, not n n


def _weighted_by_bucket(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, num_queries: int | None
) -> Tensor:
    """Eq. 10 in plain torch, bucket by bucket: for packed tokens that may have weight 0 and need its gradient."""
    weight, done = key_weight(layout), []
    for bucket in layout.buckets:
        rows = weight[bucket.slots] if bucket.real is None else weight[bucket.slots] * bucket.real
        inside = _rows(q, bucket, num_queries), _rows(k, bucket), _rows(v, bucket)
        done.append(weighted_attention(*inside, rows[:, None, None], scale))
    return _packed_again(done, layout, q.shape[0], num_queries)


def _with_weight_column(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    pad = 8 - q.shape[-1] % 8  # room for one column, up to the kernels' multiple of 8
    weight = weight.masked_fill(weight.detach() < 0.5, 1)  # padding, whose output is unused
    bias = (weight.log() / scale).to(k.dtype)[:, None, None].expand(-1, k.shape[1], -1)  # (slots, heads, 1)
    q = torch.cat([q, torch.ones_like(q[..., :1]), q.new_zeros(*q.shape[:-1], pad - 1)], dim=-1)
    k = torch.cat([k, bias, k.new_zeros(*k.shape[:-1], pad - 1)], dim=-1)
    return q, k, F.pad(v, (0, pad))


def _without_padding(t: Tensor, layout: PackedLayout) -> Tensor:
    """Fused kernels leave padding unwritten: set it, and its gradient, to 0."""
    return t.masked_fill(~layout.valid[:, None, None], 0) if layout.has_padding else t


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, num_queries: int | None, backend: str,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if backend == "sdpa":
        return _sdpa_of_images(q, k, v, layout, scale, num_queries, bias)
    cu_q, cu_k, max_q, max_k = _sequence_bounds(layout, num_queries)
    return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale)


def _sequence_bounds(layout: Layout, num_queries: int | None) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens of queries and of keys, and the largest possible number of each per image."""
    cu_k, max_k = layout.cu_seqlens, layout.max_len
    if num_queries is None:
        return cu_k, cu_k, max_k, max_k
    cu_q = torch.arange(layout.batch + 1, device=cu_k.device, dtype=torch.int32) * num_queries
    return cu_q, cu_k, num_queries, max_k


def _sdpa_of_images(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, num_queries: int | None, bias: Tensor | None
) -> Tensor:
    """Run SDPA inside each image: one call if lengths are equal, one per bucket if short, else one per image."""
    lengths, batch = layout.lengths, layout.batch
    if len(set(lengths)) == 1 and not layout.has_padding:  # no raggedness: one call for the whole batch
        rows = (batch, -1, *v.shape[1:])
        q, k, v = q.view(rows).transpose(1, 2), k.view(rows).transpose(1, 2), v.view(rows).transpose(1, 2)
        bias = None if bias is None else bias.view(batch, 1, 1, -1)
        return _sdpa(q, k, v, bias, scale).transpose(1, 2).flatten(0, 1)  # of (b, heads, n, head_dim)
    if max(lengths) <= (SHORT_TRAINED if torch.is_grad_enabled() else SHORT):
        return _sdpa_by_bucket(q, k, v, layout, scale, num_queries, bias)
    queries = lengths if num_queries is None else [num_queries] * batch
    given = ((q, queries), (k, lengths), (v, lengths))
    images = zip(*(t[: sum(num)].transpose(0, 1)[None].split(num, dim=2) for t, num in given), strict=True)
    biases = [None] * batch if bias is None else bias[: sum(lengths)].view(1, 1, 1, -1).split(lengths, dim=3)
    done = [_sdpa(q, k, v, added, scale)[0] for (q, k, v), added in zip(images, biases, strict=True)]
    y = torch.cat(done, dim=1).transpose(0, 1)
    return F.pad(y, (0, 0, 0, 0, 0, q.shape[0] - y.shape[0])) if layout.has_padding else y


def _sdpa_by_bucket(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, num_queries: int | None, bias: Tensor | None
) -> Tensor:
    """Images of like length in one call, the shorter ones padded: for short ones most of the time goes into calls."""
    done = []
    for bucket in layout.buckets:
        mask = None if bucket.real is None else bucket.real[:, None, None]  # (images, 1, 1, n)
        if bias is not None:
            added = bias[bucket.slots][:, None, None]
            mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
        done.append(_sdpa(_rows(q, bucket, num_queries), _rows(k, bucket), _rows(v, bucket), mask, scale))
    return _packed_again(done, layout, q.shape[0], num_queries)


def _rows(t: Tensor, bucket: Bucket, num_queries: int | None = None) -> Tensor:
    """Return the tokens of each image of a bucket in a row of its own, (images, heads, n, head_dim)."""
    if num_queries is None:
        rows = t.index_select(0, bucket.slots.flatten()).unflatten(0, bucket.slots.shape)
    else:
        rows = t.unflatten(0, (-1, num_queries)).index_select(0, bucket.images)
    return rows.transpose(1, 2)


def _packed_again(done: list[Tensor], layout: PackedLayout, num_slots: int, num_queries: int | None) -> Tensor:
    """Invert `_rows`: return the results of all buckets, image after image; 0 in padding."""
    flat = torch.cat([rows.transpose(1, 2).flatten(0, 1) for rows in done])
    if num_queries is None:
        y = flat.index_select(0, layout.from_buckets)
        return F.pad(y, (0, 0, 0, 0, 0, num_slots - y.shape[0])) if layout.has_padding else y
    order = torch.cat([bucket.images for bucket in layout.buckets])
    return flat.unflatten(0, (-1, num_queries)).index_select(0, order.argsort()).flatten(0, 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scale: float) -> Tensor:
    """Run SDPA on (images, heads, n, head_dim). `added`: which keys count, or what is added to their scores."""
    short = k.shape[0] == 1 and k.shape[2] <= SHORT and q.dtype in (torch.float32, torch.float64)
    if not short or not _HAS_MKL or q.is_cuda or torch.is_grad_enabled():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale)
    bias, beta = (q.new_empty(()), 0) if added is None else (added[0], 1)
    score = torch.baddbmm(bias, q[0], k[0].transpose(1, 2), beta=beta, alpha=scale)
    return torch.bmm(score.softmax(-1), v[0])[None]
