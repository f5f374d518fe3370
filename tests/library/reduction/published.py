"""EViT, ToMe and DynamicViT as their authors wrote them: dense tokens (b, n, d) of a plain ViT, explicit attention."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(host: Any, image: Tensor) -> Tensor:
    return host.norm_pre(host._pos_embed(host.patch_embed(image)))


def head(host: Any, x: Tensor) -> Tensor:
    return host.forward_head(host.norm(x))


def attend(block: Any, x: Tensor, added: Tensor | float = 0.0, seen: Tensor | float = 1.0) -> tuple[Tensor, ...]:
    """Tokens after a block's attention, the attention, and the mean of its keys.

    `added` to scores, `seen` times their exponentials.
    """
    attn = block.attn
    q, k, v = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = attn.q_norm(q), attn.k_norm(k)  # (b, heads, n, head_dim)
    score = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + added
    e = (score - score.amax(-1, keepdim=True)).exp() * seen
    attention = e / e.sum(-1, keepdim=True)
    mixed = attn.proj((attention @ v).transpose(1, 2).flatten(2))
    return x + block.ls1(mixed), attention, k.mean(1)


def mlp(block: Any, x: Tensor) -> Tensor:
    return x + block.ls2(block.mlp(block.norm2(x)))


def evit(host: Any, image: Tensor, rate: float, at: tuple[int, ...], fuse: bool) -> Tensor:
    x = embed(host, image)
    for index, block in enumerate(host.blocks):
        x, attention, _ = attend(block, x)
        left = math.ceil(rate * (x.shape[1] - 1))
        if index in at and left < x.shape[1] - 1:
            cls_attn = attention[:, :, 0, 1:].mean(1)  # (b, n - 1)
            order = cls_attn.argsort(1, descending=True)
            top, rest = order[:, :left], order[:, left:]
            others = x[:, 1:]
            kept = others.gather(1, top[..., None].expand(-1, -1, x.shape[2]))
            dropped = others.gather(1, rest[..., None].expand(-1, -1, x.shape[2]))
            extra = (dropped * cls_attn.gather(1, rest)[..., None]).sum(1, keepdim=True)
            x = torch.cat([x[:, :1], kept, *([extra] if fuse else [])], dim=1)
        x = mlp(block, x)
    return head(host, x)


def tome(host: Any, image: Tensor, r: int | tuple[int, ...], distilled: bool = False) -> tuple[Tensor, Tensor]:
    """Logits, and the features of the final tokens put back where their parts came from (unmerging), (b, n, d)."""
    x, size = embed(host, image), None
    source = torch.eye(x.shape[1], dtype=x.dtype).expand(x.shape[0], -1, -1)  # who has come into each token
    for index, block in enumerate(host.blocks):
        x, _, metric = attend(block, x, added=0.0 if size is None else size.log()[:, None, None, :, 0])
        x, size, source = tome_merge(x, size, source, metric, r if isinstance(r, int) else r[index], distilled)
        x = mlp(block, x)
    return head(host, x), source.transpose(1, 2) @ host.norm(x)


def tome_merge(
    x: Tensor, size: Tensor | None, source: Tensor, metric: Tensor, r: int, distilled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    size = torch.ones_like(x[..., :1]) if size is None else size
    r = min(r, (x.shape[1] - 1 - distilled) // 2)
    if r <= 0:
        return x, size, source
    metric = metric / metric.norm(dim=-1, keepdim=True)
    scores = metric[:, ::2] @ metric[:, 1::2].transpose(-1, -2)
    scores[:, 0, :] = -math.inf
    if distilled:
        scores[:, :, 0] = -math.inf
    node_max, node_idx = scores.max(-1)
    edge = node_max.argsort(-1, descending=True)[..., None]
    unmerged, merged = edge[:, r:].sort(1)[0], edge[:, :r]
    target = node_idx[..., None].gather(1, merged)

    def merge(t: Tensor) -> Tensor:
        src, dst, c = t[:, ::2], t[:, 1::2], t.shape[-1]
        unm = src.gather(1, unmerged.expand(-1, -1, c))
        dst = dst.scatter_add(1, target.expand(-1, -1, c), src.gather(1, merged.expand(-1, -1, c)))
        if distilled:
            return torch.cat([unm[:, :1], dst[:, :1], unm[:, 1:], dst[:, 1:]], dim=1)
        return torch.cat([unm, dst], dim=1)

    whole = merge(size)
    return merge(x * size) / whole, whole, merge(source)


def predict(predictor: Any, x: Tensor, policy: Tensor) -> Tensor:
    x = predictor.stem(x)
    half = x.shape[-1] // 2
    shared = (x[..., half:] * policy).sum(1, keepdim=True) / policy.sum(1, keepdim=True)
    return predictor.head(torch.cat([x[..., :half], shared.expand(-1, x.shape[1], -1)], -1)).log_softmax(-1)


def dynamicvit(host: Any, predictors: Any, image: Tensor, rate: float, at: tuple[int, ...]) -> Tensor:
    """At evaluation."""
    x = embed(host, image)
    first = x.shape[1] - 1
    for index, block in enumerate(host.blocks):
        if index in at:
            stage = at.index(index)
            score = predict(predictors[stage], x[:, 1:], torch.ones_like(x[:, 1:, :1]))[..., 0]
            keep = score.argsort(1, descending=True)[:, : int(first * rate ** (stage + 1))]
            x = torch.cat([x[:, :1], x[:, 1:].gather(1, keep[..., None].expand(-1, -1, x.shape[2]))], dim=1)
        x = mlp(block, attend(block, x)[0])
    return head(host, x)


def dynamicvit_training(host: Any, predictors: Any, image: Tensor, at: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """In training, without noise: logits, and what each stage keeps."""
    x = embed(host, image)
    policy, kept = torch.ones_like(x[..., :1]), []
    for index, block in enumerate(host.blocks):
        if index in at:
            soft = predict(predictors[at.index(index)], x[:, 1:], policy[:, 1:]).softmax(-1)
            hard = F.one_hot(soft.argmax(-1), 2).to(soft.dtype) - soft.detach() + soft
            policy = torch.cat([policy[:, :1], hard[..., :1] * policy[:, 1:]], dim=1)
            kept.append(policy[:, 1:, 0])
        seen = policy[:, None, None, :, 0]
        x = mlp(block, attend(block, x, seen=seen + (1 - seen) * torch.eye(x.shape[1], dtype=x.dtype))[0])
    return head(host, x), kept
