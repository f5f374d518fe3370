"""The method written naively, one image at a time, for the tests to compare with.

Eq. 10 as it stands: every token that exists is run, attention weighs each key by w_j. Which tokens exist is an
argument: all of them (masked), those that survive the cut (trimmed), the active ones (packed).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_logits(host: Any, image: Tensor, mask: Tensor, coarse: int, exists: Tensor) -> Tensor:
    """image (b, c, h, w), mask (b, hc, wc), exists (b, ids) -> (b, classes)."""
    fine = host.patch_embed.patch_size[0]
    k, (rows, columns) = coarse // fine, (image.shape[2] // fine, image.shape[3] // fine)
    prefix = [t[0] for n in ("cls_token", "dist_token", "reg_token") if (t := getattr(host, n, None)) is not None]
    num_prefix = sum(len(p) for p in prefix)
    logits = []
    for i in range(len(image)):
        x = torch.cat([*prefix, patches(host, F.avg_pool2d(image[i : i + 1], k)), patches(host, image[i : i + 1])])
        if host.pos_embed is not None:
            x = x + positions(host, rows, columns, k, num_prefix)
        cell = torch.arange(rows * columns // k**2).view(rows // k, columns // k)
        cell = cell.repeat_interleave(k, 0).repeat_interleave(k, 1).flatten()
        w_fine = mask[i].flatten()[cell]
        w = torch.cat([torch.ones(num_prefix, dtype=mask.dtype), 1 - mask[i].flatten(), w_fine])
        area = torch.cat([torch.zeros(num_prefix), torch.full((mask[i].numel(),), float(k * k)), torch.ones(len(cell))])
        places = torch.cat([centres(rows // k, columns // k, k), centres(rows, columns, 1)])  # in fine patches
        here = exists[i]
        x, w, area, places = x[here], w[here], area[here].to(x), places[here[num_prefix:]]
        x = host.norm_pre(x)
        for block in host.blocks:
            y = attention(block.attn, block.norm1(x), w, angles(host, places, rows, columns), num_prefix)
            x = x + layer_scale(block, "1", y)
            x = x + layer_scale(block, "2", block.mlp(block.norm2(x)))
        logits.append(head(host, host.norm(x), w, area))
    return torch.stack(logits)


def layer_scale(block: Any, which: str, y: Tensor) -> Tensor:
    gamma = getattr(block, f"gamma_{which}", None)
    return gamma * y if gamma is not None else getattr(block, f"ls{which}", lambda same: same)(y)


def patches(host: Any, image: Tensor) -> Tensor:
    return host.patch_embed.norm(host.patch_embed.proj(image).flatten(2)[0].T)


def positions(host: Any, rows: int, columns: int, k: int, num_prefix: int) -> Tensor:
    table = host.pos_embed[0]
    assert len(table) - (0 if host.no_embed_class else num_prefix) == rows * columns, "the host's own size only"
    own = table.new_zeros(num_prefix, table.shape[1]) if host.no_embed_class else table[:num_prefix]
    fine = table[-rows * columns :]
    grid = fine.T.view(1, -1, rows, columns)
    return torch.cat([own, F.interpolate(grid, scale_factor=1 / k, mode="bilinear")[0].flatten(1).T, fine])


def centres(rows: int, columns: int, step: int) -> Tensor:
    """Index of each token's centre in units of fine patches: the centre of patch (0, 0) is (0, 0)."""
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([y, x], -1).flatten(0, 1).double() * step + (step - 1) / 2


def angles(host: Any, places: Tensor, rows: int, columns: int) -> Tensor | None:
    """(tokens, head_dim / 2) rotation angles of the two kinds of rotary position."""
    rope = getattr(host, "rope", None)
    if rope is None:
        return None
    size = torch.tensor([rows, columns]).double()
    if type(rope).__name__ == "RotaryEmbeddingDinoV3":
        where = 2 * (places + 0.5) / size - 1
        return (2 * math.pi * where[:, :, None] / rope.periods).flatten(1)
    where = places / size * torch.tensor(rope.ref_feat_shape).double()
    bands = 1 / rope.temperature ** (torch.arange(rope.dim // 4).float() / (rope.dim // 4))
    return (where[:, :, None] * bands).flatten(1)


def rotate(x: Tensor, angle: Tensor, half: bool) -> Tensor:
    """Rotate pairs of channels: (i, i + d/2) in the half layout, (2 i, 2 i + 1) otherwise."""
    a, b = x.chunk(2, -1) if half else (x[..., ::2], x[..., 1::2])
    a, b = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return torch.cat([a, b], -1) if half else torch.stack([a, b], -1).flatten(-2)


def slot_weights(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Eq. 10: (heads, queries, keys)."""
    e = w * bounded(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, w).exp()
    return e / e.sum(-1, keepdim=True)


def bounded(score: Tensor, w: Tensor) -> Tensor:
    """The score of a key of weight 0, which only its weight's gradient sees, is at most that of all others together."""
    others = (score.detach() + w.detach().log()).logsumexp(-1, keepdim=True)
    return torch.where(w > 0, score, torch.minimum(score, others).detach())


def attention_by_image(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, num_q: Sequence[int], num_k: Sequence[int]
) -> Tensor:
    """Eq. 10 for one image after the other, with so many queries and keys each: (tokens, heads, head_dim)."""
    given, done = ((q, num_q), (k, num_k), (v, num_k), (weight, num_k)), []
    for *own, w in zip(*(t[: sum(num)].split([*num]) for t, num in given), strict=True):
        queries, keys, values = (t.transpose(0, 1) for t in own)
        done.append((slot_weights(queries, keys, w) @ values).transpose(0, 1))
    return torch.cat(done)


def attention(attn: Any, x: Tensor, w: Tensor, angle: Tensor | None, num_prefix: int) -> Tensor:
    if attn.qkv is None:
        q, k, v = attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
    else:
        qkv = attn.qkv(x)
        if getattr(attn, "q_bias", None) is not None:
            qkv = qkv + torch.cat([attn.q_bias, torch.zeros_like(attn.q_bias), attn.v_bias])
        q, k, v = qkv.chunk(3, -1)
    q, k, v = (t.view(len(x), attn.num_heads, -1).transpose(0, 1) for t in (q, k, v))
    q, k = attn.q_norm(q), attn.k_norm(k)
    if angle is not None:
        half = getattr(attn, "rotate_half", False)
        q, k = (torch.cat([t[:, :num_prefix], rotate(t[:, num_prefix:], angle, half)], 1) for t in (q, k))
    return attn.proj(attn.norm((slot_weights(q, k, w) @ v).transpose(0, 1).flatten(1)))


def head(host: Any, x: Tensor, w: Tensor, area: Tensor) -> Tensor:
    if host.attn_pool is not None:
        pool = host.attn_pool
        q, (k, v) = pool.q(pool.latent[0]), pool.kv(x).chunk(2, -1)
        q, k, v = (t.view(len(t), pool.num_heads, -1).transpose(0, 1) for t in (q, k, v))
        y = pool.proj((slot_weights(q, k, w) @ v).transpose(0, 1).flatten(1))
        y = (y + pool.mlp(pool.norm(y)))[0]
    elif host.global_pool == "avg":
        y = (x * (w * area)[:, None]).sum(0) / (w * area).sum()
    elif hasattr(host, "head_dist"):
        return (host.head(x[0]) + host.head_dist(x[1])) / 2
    else:
        y = x[0]
    return host.head(host.fc_norm(y))
