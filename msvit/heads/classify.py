"""Classification: the host's own head, on tokens that may cover different areas.

A class token goes to the host's head as it is. An average over patches becomes an average over area: a coarse
token counts k*k times. Attention pooling attends to the active tokens, Eq. 10 as everywhere.
"""

from typing import Any

import torch
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn

from msvit.checks import check_flag, check_kind
from msvit.execution import attend
from msvit.shapes import Float
from msvit.types import TokenBatch


def classify(host: Any, tokens: TokenBatch, pre_logits: bool = False) -> Any:
    """Return what `host.forward_head` does, for tokens of mixed scale."""
    check_kind("host", host, nn.Module, "a timm model, such as model.host")
    check_kind("tokens", tokens, TokenBatch, "a TokenBatch")
    check_flag("pre_logits", pre_logits)
    if getattr(host, "attn_pool", None) is not None:
        pooled = host.head_drop(host.fc_norm(attention_pool(host.attn_pool, tokens)))
        return pooled if pre_logits else host.head(pooled)
    if host.global_pool == "token":
        return host.forward_head(tokens.prefix, pre_logits=pre_logits)
    # The host averages what it is given: prefix tokens it drops, and one token that is the average already.
    return host.forward_head(torch.cat([tokens.prefix, area_mean(tokens)[:, None]], dim=1), pre_logits=pre_logits)


def check_pooling(host: Any, all_fine: bool, reduced: bool) -> None:
    """Raise ValueError unless pooling over patches, each with its token's feature, is pooling over tokens.

    It is for class tokens; for averages unless a reducer has dropped patches; for attention only if no token covers
    several patches, as each is one key.
    """
    attends = getattr(host, "attn_pool", None) is not None
    averages = not attends and host.global_pool != "token"
    if (averages and reduced) or (attends and (reduced or not all_fine)):
        raise ValueError(
            f"the head of this {type(host).__name__} pools tokens ({host.global_pool!r}), which a map over patches no "
            "longer has apart; pass the tokens: model.forward_head(model.encode(images)[1])"
        )


def area_mean(tokens: TokenBatch) -> Float[Tensor, "b d"]:
    """Return the mean over the image's area of all active tokens, prefix tokens left out."""
    layout = tokens.layout
    x = tokens.x if tokens.x.dtype is torch.float64 else tokens.x.float()
    share = (layout.weight * layout.area)[:, None].to(x.dtype)  # (slots, 1)
    x = x.masked_fill(layout.padding[:, None], 0) if layout.has_padding else x
    return (layout.sum_by_image(x * share) / layout.sum_by_image(share)).to(tokens.x.dtype)


def attention_pool(pool: Any, tokens: TokenBatch) -> Float[Tensor, "b d"]:
    """Pool as timm's AttentionPoolLatent does: learned queries over the tokens of each image."""
    batch, num = tokens.layout.batch, pool.latent_len
    q = pool.q(pool.latent.expand(batch, -1, -1)).flatten(0, 1)  # (b num, d)
    k, v = pool.kv(tokens.x).chunk(2, dim=-1)
    q, k, v = (t.unflatten(-1, (pool.num_heads, -1)) for t in (q, k, v))
    q, k = pool.q_norm(q), pool.k_norm(k)
    x = attend(q, k, v, tokens.layout, num_queries=num).flatten(1).view(batch, num, -1)
    x = pool.proj_drop(pool.proj(x))
    if pool.mlp is not None:
        x = x + pool.mlp(pool.norm(x))
    return x[:, 0] if pool.pool == "token" else x.mean(1)


def unsupported_head(host: Any) -> str | None:
    """Return why a host's head cannot take tokens of mixed scale, or None."""
    pool = getattr(host, "attn_pool", None)
    if pool is not None:
        keeps_prefix = getattr(host, "pool_include_prefix", True)
        plain = type(pool) is AttentionPoolLatent and pool.pos_embed is None and pool.pool in ("token", "avg")
        if not plain or (host.num_prefix_tokens and not keeps_prefix):
            return f"its attention pooling ({type(pool).__name__} with these options) has no mixed-scale form"
        return None
    if host.global_pool not in ("token", "avg") or getattr(host, "pool_include_prefix", False):
        return f"its pooling is {host.global_pool!r} with these options; build it with global_pool='token' or 'avg'"
    return None


def head_macs(host: Any, total: Tensor) -> Tensor:
    """Return the multiply-adds of the head for images of `total` tokens, prefix included."""
    heads = [getattr(host, name, None) for name in ("head", "head_dist")]
    macs = torch.zeros_like(total) + sum(head.weight.numel() for head in heads if isinstance(head, nn.Linear))
    pool = getattr(host, "attn_pool", None)
    if pool is None:
        return macs
    per_query = [pool.q, pool.proj, *(m for m in pool.mlp.modules())] if pool.mlp is not None else [pool.q, pool.proj]
    macs = macs + pool.latent_len * sum(m.weight.numel() for m in per_query if isinstance(m, nn.Linear))
    return macs + total * (pool.kv.weight.numel() + 2 * pool.latent_len * pool.kv.in_features)
