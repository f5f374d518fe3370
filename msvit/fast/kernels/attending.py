"""Attention inside each image of a packed batch, by Eq. 10, with the gradient of its weights.

    y = attention(q, k, v, weight, ...)         # each (slots, heads, head_dim)
    y = self_attention(qkv, bias, weight, ...)  # qkv (slots, 3, heads, head_dim), with the gradient of its bias
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from msvit.fast.kernels.sums import add_parts

LOG2_E = 1.4426950408889634
# Of exp2: a key of weight 0 may score far above the others; in its gradient its attention counts as 1 at most.
MAX_EXPONENT = tl.constexpr(0.0)


@triton.jit
@no_type_check
def _clear(out, first, slots, stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    # Padding: nothing attends there, but it must hold finite numbers.
    d = tl.arange(0, DIM)[None, :]
    for start in range(first, slots, BLOCK * tl.num_programs(0)):
        i = start + tl.arange(0, BLOCK)[:, None]
        tl.store(out + i.to(tl.int64) * stride + d, tl.zeros([BLOCK, DIM], out.dtype.element_ty), mask=i < slots)


@triton.jit
@no_type_check
def _attention_kernel(
    q, k, v, weight, y, lse, cu_q, cu_k, batch, slots, scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
    HAS_KEY_WEIGHTS: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK_Q queries of one head of one image, and goes over that image's keys.
    # Key weights multiply exponentials: adding log w_j to the scores takes a third more instructions.
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    start_q, head, row = tl.program_id(0) * BLOCK_Q, tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, DIM)[None, :]
    if row == batch:
        _clear(y + head * DIM, tl.load(cu_q + batch) + start_q, slots, HEADS * DIM, DIM, BLOCK_Q)
    else:
        first_q, first_k = tl.load(cu_q + row), tl.load(cu_k + row)
        num_q, num_k = tl.load(cu_q + row + 1) - first_q, tl.load(cu_k + row + 1) - first_k
        if start_q < num_q:
            i = start_q + tl.arange(0, BLOCK_Q)
            here = (first_q + i).to(tl.int64)
            has_q = (i < num_q)[:, None]
            queries = tl.load(q + here[:, None] * q_row + head * q_head + d, mask=has_q, other=0.0)
            top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
            total = tl.zeros([BLOCK_Q], tl.float32)
            mixed = tl.zeros([BLOCK_Q, DIM], tl.float32)
            for start_k in range(0, num_k, BLOCK_K):
                j = start_k + tl.arange(0, BLOCK_K)
                there = (first_k + j).to(tl.int64)[:, None]
                has_k = (j < num_k)[:, None]
                keys = tl.load(k + there * k_row + head * k_head + d, mask=has_k, other=0.0)
                values = tl.load(v + there * v_row + head * v_head + d, mask=has_k, other=0.0)
                score = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale  # in units of log 2
                if HAS_KEY_WEIGHTS:
                    w = tl.load(weight + first_k + j, mask=j < num_k, other=0.0).to(tl.float32)[None, :]
                    score = tl.where(w > 0, score, -float("inf"))
                else:
                    score = tl.where((j < num_k)[None, :], score, -float("inf"))
                higher = tl.maximum(top, tl.max(score, 1))
                if HAS_KEY_WEIGHTS:  # as long as all weights were 0 there is no score to go by
                    higher = tl.maximum(higher, -1e30)
                shrink = tl.exp2(top - higher)
                p = tl.exp2(score - higher[:, None])
                if HAS_KEY_WEIGHTS:
                    p *= w
                total = total * shrink + tl.sum(p, 1)
                mixed = tl.dot(p.to(values.dtype), values, mixed * shrink[:, None], input_precision=precision)
                top = higher
            out = (mixed / total[:, None]).to(y.dtype.element_ty)
            tl.store(y + (here[:, None] * HEADS + head) * DIM + d, out, mask=has_q)
            if lse is not None:
                tl.store(lse + here * HEADS + head, top + tl.log2(total), mask=i < num_q)


@triton.jit
@no_type_check
def _store_sum(sums, which, rows, head, image, HEADS: tl.constexpr, DIM: tl.constexpr):
    # Into sums (images, blocks, 3, heads, head_dim): what a program has summed of dq, dk or dv.
    part = (image * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    tl.store(sums + ((part * 3 + which) * HEADS + head) * DIM + tl.arange(0, DIM), tl.sum(rows, 0))


@triton.jit
@no_type_check
def _attention_dq_kernel(
    dy, y, q, k, v, weight, lse, dq, level, sums, cu_q, cu_k, batch, slots, scale,
    dy_row, dy_head, q_row, q_head, k_row, k_head, v_row, v_head, dq_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
    HAS_KEY_WEIGHTS: tl.constexpr,
):  # fmt: skip
    # dS_ij = P_ij (dy_i v_j - dy_i y_i), and dq_i = scale sum_j dS_ij k_j. Keeps dy_i y_i for the next kernel, and in
    # `sums` the sum of its rows of dq.
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    start_q, head, row = tl.program_id(0) * BLOCK_Q, tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, DIM)[None, :]
    if row == batch:
        _clear(dq + head * DIM, tl.load(cu_q + batch) + start_q, slots, dq_row, DIM, BLOCK_Q)
    else:
        first_q, first_k = tl.load(cu_q + row), tl.load(cu_k + row)
        num_q, num_k = tl.load(cu_q + row + 1) - first_q, tl.load(cu_k + row + 1) - first_k
        if start_q < num_q:
            i = start_q + tl.arange(0, BLOCK_Q)
            here = (first_q + i).to(tl.int64)
            has_q = (i < num_q)[:, None]
            queries = tl.load(q + here[:, None] * q_row + head * q_head + d, mask=has_q, other=0.0)
            wanted = tl.load(dy + here[:, None] * dy_row + head * dy_head + d, mask=has_q, other=0.0)
            given = tl.load(y + (here[:, None] * HEADS + head) * DIM + d, mask=has_q, other=0.0)
            along = tl.sum(wanted.to(tl.float32) * given.to(tl.float32), 1)
            tl.store(level + here * HEADS + head, along, mask=i < num_q)
            norm = tl.load(lse + here * HEADS + head, mask=i < num_q, other=0.0)
            total = tl.zeros([BLOCK_Q, DIM], tl.float32)
            for start_k in range(0, num_k, BLOCK_K):
                j = start_k + tl.arange(0, BLOCK_K)
                there = (first_k + j).to(tl.int64)[:, None]
                has_k = (j < num_k)[:, None]
                keys = tl.load(k + there * k_row + head * k_head + d, mask=has_k, other=0.0)
                values = tl.load(v + there * v_row + head * v_head + d, mask=has_k, other=0.0)
                score = tl.dot(queries, tl.trans(keys), input_precision=precision) * (scale * 1.4426950408889634)
                score = tl.where((j < num_k)[None, :], score, -float("inf"))
                if HAS_KEY_WEIGHTS:
                    w = tl.load(weight + first_k + j, mask=j < num_k, other=0.0).to(tl.float32)
                    p = w[None, :] * tl.exp2(tl.minimum(score - norm[:, None], MAX_EXPONENT))
                else:
                    p = tl.exp2(score - norm[:, None])
                change = tl.dot(wanted, tl.trans(values), input_precision=precision)
                ds = p * (change - along[:, None])
                total = tl.dot(ds.to(keys.dtype), keys, total, input_precision=precision)
            total *= scale
            tl.store(dq + here[:, None] * dq_row + head * DIM + d, total.to(dq.dtype.element_ty), mask=has_q)
            if sums is not None:
                _store_sum(sums, 0, total, head, row, HEADS, DIM)
        elif sums is not None:
            _store_sum(sums, 0, tl.zeros([BLOCK_Q, DIM], tl.float32), head, row, HEADS, DIM)


@triton.jit
@no_type_check
def _attention_dkv_kernel(
    dy, q, k, v, weight, lse, level, dk, dv, dw, sums, cu_q, cu_k, batch, slots, scale,
    dy_row, dy_head, q_row, q_head, k_row, k_head, v_row, v_head, dk_row, dv_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
    HAS_KEY_WEIGHTS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    # A program takes BLOCK_K keys and goes over the queries: dk_j = scale sum_i dS_ij q_i, dv_j = sum_i P_ij dy_i, and
    # what w_j gets is the sum over i of dS_ij / w_j, with P_ij / w_j as if it stood `alone`: known for w_j = 0 too.
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    start_k, head, row = tl.program_id(0) * BLOCK_K, tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, DIM)[None, :]
    if row == batch:
        first = tl.load(cu_k + batch) + start_k
        _clear(dk + head * DIM, first, slots, dk_row, DIM, BLOCK_K)
        _clear(dv + head * DIM, first, slots, dv_row, DIM, BLOCK_K)
        if WEIGHTED:
            _clear(dw + head, first, slots, HEADS, 1, BLOCK_K)
    else:
        first_q, first_k = tl.load(cu_q + row), tl.load(cu_k + row)
        num_q, num_k = tl.load(cu_q + row + 1) - first_q, tl.load(cu_k + row + 1) - first_k
        if start_k < num_k:
            j = start_k + tl.arange(0, BLOCK_K)
            there = (first_k + j).to(tl.int64)
            has_k = (j < num_k)[:, None]
            keys = tl.load(k + there[:, None] * k_row + head * k_head + d, mask=has_k, other=0.0)
            values = tl.load(v + there[:, None] * v_row + head * v_head + d, mask=has_k, other=0.0)
            to_k = tl.zeros([BLOCK_K, DIM], tl.float32)
            to_v = tl.zeros([BLOCK_K, DIM], tl.float32)
            to_w = tl.zeros([BLOCK_K], tl.float32)
            if HAS_KEY_WEIGHTS:
                w = tl.load(weight + there, mask=j < num_k, other=0.0).to(tl.float32)
            for start_q in range(0, num_q, BLOCK_Q):
                i = start_q + tl.arange(0, BLOCK_Q)
                here = (first_q + i).to(tl.int64)
                has_q = (i < num_q)[:, None]
                queries = tl.load(q + here[:, None] * q_row + head * q_head + d, mask=has_q, other=0.0)
                wanted = tl.load(dy + here[:, None] * dy_row + head * dy_head + d, mask=has_q, other=0.0)
                norm = tl.load(lse + here * HEADS + head, mask=i < num_q, other=float("inf"))  # so that p is 0
                along = tl.load(level + here * HEADS + head, mask=i < num_q, other=0.0)
                score = tl.dot(keys, tl.trans(queries), input_precision=precision) * (scale * 1.4426950408889634)
                score = tl.where((j < num_k)[:, None], score, -float("inf"))
                if HAS_KEY_WEIGHTS:
                    alone = tl.exp2(tl.minimum(score - norm[None, :], MAX_EXPONENT))  # (keys, queries)
                    p = w[:, None] * alone
                else:
                    alone = tl.exp2(score - norm[None, :])
                    p = alone
                to_v = tl.dot(p.to(wanted.dtype), wanted, to_v, input_precision=precision)
                change = tl.dot(values, tl.trans(wanted), input_precision=precision)
                ds = p * (change - along[None, :])
                to_k = tl.dot(ds.to(queries.dtype), queries, to_k, input_precision=precision)
                if WEIGHTED:
                    to_w += tl.sum(alone * (change - along[None, :]), 1)
            to_k *= scale
            tl.store(dk + there[:, None] * dk_row + head * DIM + d, to_k.to(dk.dtype.element_ty), mask=has_k)
            tl.store(dv + there[:, None] * dv_row + head * DIM + d, to_v.to(dv.dtype.element_ty), mask=has_k)
            if WEIGHTED:
                tl.store(dw + there * HEADS + head, to_w, mask=j < num_k)
            if sums is not None:
                _store_sum(sums, 1, to_k, head, row, HEADS, DIM)
                _store_sum(sums, 2, to_v, head, row, HEADS, DIM)
        elif sums is not None:
            _store_sum(sums, 1, tl.zeros([BLOCK_K, DIM], tl.float32), head, row, HEADS, DIM)
            _store_sum(sums, 2, tl.zeros([BLOCK_K, DIM], tl.float32), head, row, HEADS, DIM)


@torch.library.custom_op("msvit::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, has_key_weights: bool,
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, lse = _empty_attention(q)
    _attend(q, k, v, weight, has_key_weights, cu_q, cu_k, max_q, scale, y, lse, clear=True)
    return y, lse


@torch.library.custom_op("msvit::attention_into", mutates_args=("y",))
def attention_into(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, cu_seqlens: Tensor, max_len: int, scale: float, y: Tensor
) -> None:
    """Write `attention` of tokens among each other to y, without gradients; weights count, and padding stays."""
    _attend(q, k, v, weight, weight is not None, cu_seqlens, cu_seqlens, max_len, scale, y, None, clear=False)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, has_key_weights: bool, cu_q: Tensor, cu_k: Tensor,
    max_q: int, scale: float, y: Tensor, lse: Tensor | None, clear: bool,
) -> None:  # fmt: skip
    batch, (slots, heads, dim) = cu_q.shape[0] - 1, q.shape
    block_q, block_k, warps, stages = _tiles(max_q * batch * heads, q.dtype)
    with torch.cuda.device_of(q):
        _attention_kernel[(triton.cdiv(max_q, block_q), heads, batch + clear)](
            q, k, v, weight, y, lse, cu_q, cu_k, batch, slots, scale * LOG2_E, *_strides(q, k, v),
            HEADS=heads, DIM=dim, BLOCK_Q=block_q, BLOCK_K=block_k, EXACT=q.dtype is torch.float32,
            HAS_KEY_WEIGHTS=has_key_weights, num_warps=warps, num_stages=stages,
        )  # fmt: skip


@torch.library.custom_op("msvit::self_attention", mutates_args=())
def _self_attention(
    qkv: Tensor, bias: Tensor | None, weight: Tensor | None, has_key_weights: bool, cu_seqlens: Tensor, max_len: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = qkv.unbind(1)
    y, lse = _empty_attention(q)
    _attend(q, k, v, weight, has_key_weights, cu_seqlens, cu_seqlens, max_len, scale, y, lse, clear=True)
    return y, lse


@torch.library.custom_op("msvit::attention_backward", mutates_args=())
def _attention_backward(
    dy: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, has_key_weights: bool,
    weighted: bool, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv, dw = _empty_backward(q, k, v, weighted)
    _attend_backward(
        dy, y, lse, q, k, v, weight, has_key_weights, cu_q, cu_k, max_q, max_k, scale,
        dq, dk, dv, dw if weighted else None, None,
    )  # fmt: skip
    return dq, dk, dv, dw


@torch.library.custom_op("msvit::self_attention_backward", mutates_args=())
def _self_attention_backward(
    dy: Tensor, y: Tensor, lse: Tensor, qkv: Tensor, weight: Tensor | None, has_key_weights: bool, weighted: bool,
    cu_seqlens: Tensor, max_len: int, scale: float, of_bias: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv, of weights for each head, and of the bias in `of_bias`, empty if None."""
    dqkv, dw, dbias = _empty_self_backward(qkv, weighted, of_bias)
    (q, k, v), (dq, dk, dv), sums = qkv.unbind(1), dqkv.unbind(1), None
    if of_bias is not None:
        parts = (cu_seqlens.shape[0] - 1) * triton.cdiv(max_len, _tiles_dq(qkv.dtype)[0])
        sums = qkv.new_empty(parts, dbias.numel(), dtype=torch.float32)
    _attend_backward(
        dy, y, lse, q, k, v, weight, has_key_weights, cu_seqlens, cu_seqlens, max_len, max_len, scale,
        dq, dk, dv, dw if weighted else None, sums,
    )  # fmt: skip
    if sums is not None:
        with torch.cuda.device_of(qkv):
            add_parts(sums, dbias)
    return dqkv, dw, dbias


def _attend_backward(
    dy: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, has_key_weights: bool,
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float,
    dq: Tensor, dk: Tensor, dv: Tensor, dw: Tensor | None, sums: Tensor | None,
) -> None:  # fmt: skip
    """Write dq, dk, dv, dw and sums of rows of the first three."""
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    level = torch.empty_like(lse)
    batch, heads, dim = cu_q.shape[0] - 1, q.shape[1], q.shape[2]
    shape = {"HEADS": heads, "DIM": dim, "EXACT": q.dtype is torch.float32, "HAS_KEY_WEIGHTS": has_key_weights}
    with torch.cuda.device_of(q):
        block_q, block_k, warps, stages = _tiles_dq(q.dtype)
        _attention_dq_kernel[(triton.cdiv(max_q, block_q), heads, batch + 1)](
            dy, y, q, k, v, weight, lse, dq, level, sums, cu_q, cu_k, batch, q.shape[0], scale,
            *_strides(dy, q, k, v), dq.stride(0),
            BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=warps, num_stages=stages, **shape,
        )  # fmt: skip
        block_q, block_k, warps, stages = _tiles_dkv(q.dtype)
        _attention_dkv_kernel[(triton.cdiv(max_k, block_k), heads, batch + 1)](
            dy, q, k, v, weight, lse, level, dk, dv, dw, sums, cu_q, cu_k, batch, k.shape[0], scale,
            *_strides(dy, q, k, v), dk.stride(0), dv.stride(0),
            BLOCK_Q=block_q, BLOCK_K=block_k, WEIGHTED=dw is not None, num_warps=warps, num_stages=stages, **shape,
        )  # fmt: skip


def _strides(*tensors: Tensor) -> list[int]:
    return [t.stride(axis) for t in tensors for axis in (0, 1)]


def _tiles(work: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Queries and keys a program holds at a time, warps, stages: what was fastest on an H200."""
    if dtype is torch.float32:
        return 32, 32, 4, 2
    return (16, 128, 4, 2) if work < 8192 else (64, 32, 4, 3)


def _tiles_dq(dtype: torch.dtype) -> tuple[int, int, int, int]:
    return (32, 32, 4, 2) if dtype is torch.float32 else (64, 32, 4, 3)


def _tiles_dkv(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Its keys are as many as the queries of `_tiles_dq`: both write sums of the same parts."""
    return (32, 32, 4, 2) if dtype is torch.float32 else (16, 64, 4, 3)


def _empty_attention(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _empty_backward(q: Tensor, k: Tensor, v: Tensor, weighted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dw = k.new_empty(k.shape[:2] if weighted else (0, 0), dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dw


def _empty_self_backward(
    qkv: Tensor, weighted: bool, of_bias: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    slots, _, heads, dim = qkv.shape
    dw = qkv.new_empty((slots, heads) if weighted else (0, 0), dtype=torch.float32)
    return qkv.new_empty(qkv.shape), dw, qkv.new_empty(0 if of_bias is None else 3 * heads * dim, dtype=of_bias)


_attention.register_fake(lambda q, *_: _empty_attention(q))
_self_attention.register_fake(lambda qkv, *_: _empty_attention(qkv[:, 0]))


_attention_backward.register_fake(
    lambda dy, y, lse, q, k, v, weight, has_key_weights, weighted, *_: _empty_backward(q, k, v, weighted)
)
_self_attention_backward.register_fake(
    lambda dy, y, lse, qkv, weight, has_key_weights, weighted, cu_seqlens, max_len, scale, of_bias: (
        _empty_self_backward(qkv, weighted, of_bias)
    )
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, weight, ctx.has_key_weights, cu_q, cu_k, *ctx.rest = inputs
    ctx.weighted = weight is not None and ctx.needs_input_grad[3]
    ctx.dtype = None if weight is None else weight.dtype
    ctx.save_for_backward(*output, q, k, v, weight if ctx.has_key_weights else None, cu_q, cu_k)


def _differentiate(ctx: Any, dy: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    y, lse, q, k, v, weight, cu_q, cu_k = ctx.saved_tensors
    given = (dy, y, lse, q, k, v, weight, ctx.has_key_weights, ctx.weighted, cu_q, cu_k, *ctx.rest)
    dq, dk, dv, dw = _attention_backward(*given)
    return dq, dk, dv, dw.sum(1).to(ctx.dtype) if ctx.weighted else None, *(None,) * 6


_attention.register_autograd(_differentiate, setup_context=_save)


def _save_self(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias, weight, ctx.has_key_weights, cu_seqlens, *ctx.rest = inputs
    ctx.of_bias = bias.dtype if bias is not None and ctx.needs_input_grad[1] else None
    ctx.weighted = weight is not None and ctx.needs_input_grad[2]
    ctx.dtype = None if weight is None else weight.dtype
    ctx.save_for_backward(*output, qkv, weight if ctx.has_key_weights else None, cu_seqlens)


def _differentiate_self(ctx: Any, dy: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    y, lse, qkv, weight, cu_seqlens = ctx.saved_tensors
    given = (dy, y, lse, qkv, weight, ctx.has_key_weights, ctx.weighted, cu_seqlens, *ctx.rest, ctx.of_bias)
    dqkv, dw, of_bias = _self_attention_backward(*given)
    of_weight = dw.sum(1).to(ctx.dtype) if ctx.weighted else None
    return dqkv, None if ctx.of_bias is None else of_bias, of_weight, *(None,) * 4


_self_attention.register_autograd(_differentiate_self, setup_context=_save_self)


def attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, has_key_weights: bool,
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float,
) -> Tensor:  # fmt: skip
    """Attend inside each image: q, k, v (slots, heads, head_dim) of one dtype, image i at cu[i]:cu[i + 1].

    `weight` (slots,) holds the w_j of Eq. 10 and gets its gradient. With `has_key_weights=False` all are taken to be 1
    inside the images; with `has_key_weights=True` they may differ, and each image must have one above 0.
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return _attention(q, k, v, weight, has_key_weights, cu_q, cu_k, max_q, max_k, scale)[0]


def self_attention(
    qkv: Tensor, bias: Tensor | None, weight: Tensor | None, has_key_weights: bool, cu_seqlens: Tensor, max_len: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """Compute `attention` of tokens among each other: qkv (slots, 3, heads, head_dim) -> (slots, heads, head_dim).

    `bias` (3 heads head_dim), which the layer that computed qkv has added, gets its gradient here: detach it there.
    """
    return _self_attention(qkv.contiguous(), bias, weight, has_key_weights, cu_seqlens, max_len, scale)[0]


def can_attend(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `attention` takes such heads."""
    return dtype in (torch.float16, torch.bfloat16, torch.float32) and head_dim in (16, 32, 64, 128)
