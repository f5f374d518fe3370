"""A timm transformer block, run on tokens of any layout: norms, MLP and weights are the block's own.

Only two things differ from the block's own forward: attention stays inside each image of the layout, and
stochastic depth is drawn once per image, not once per tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import GluMlp, Mlp, SwiGLU, apply_rot_embed_cat
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from msvit.compile_regions import compile_region
from msvit.execution import attend
from msvit.execution.cells import Places
from msvit.shapes import Float
from msvit.types import Heads, Layout, TokenBatch

ATTENTIONS = (Attention, AttentionRope, EvaAttention)
MLPS = (Mlp, GluMlp, SwiGLU)

Kinds = tuple[type, ...]
Reduce = Callable[[TokenBatch, Heads], TokenBatch]
RunBlock = Callable[[Any, TokenBatch, Tensor | None, Reduce | None], TokenBatch]  # of the form of `run_block`
Depth = Float[Tensor, "b 1"] | None  # what stochastic depth multiplies half a block with


def run_block(block: Any, tokens: TokenBatch, rotary: Tensor | None, reduce: Reduce | None = None) -> TokenBatch:
    """For timm's Block and EvaBlock. `reduce` acts between its halves, and sees the heads of its attention."""
    batch = tokens.layout.batch
    first, second = (draw_depth(module, batch, tokens.x) for module in (block.drop_path1, block.drop_path2))
    if reduce is None:
        return both_halves(block, tokens, rotary, first, second)
    tokens, heads = attention_half(block, tokens, rotary, first)
    tokens = reduce(tokens, heads)
    del heads  # queries, keys and values need not be in memory beside the MLP
    return mlp_half(block, tokens, second)


@compile_region
def both_halves(block: Any, tokens: TokenBatch, rotary: Tensor | None, first: Depth, second: Depth) -> TokenBatch:
    return mlp_half(block, attention_half(block, tokens, rotary, first)[0], second)


@compile_region
def attention_half(block: Any, tokens: TokenBatch, rotary: Tensor | None, depth: Depth) -> tuple[TokenBatch, Heads]:
    y, heads = run_attention(block.attn, block.norm1(tokens.x), tokens.layout, rotary)
    return tokens.with_x(tokens.x + at_depth(layer_scale(block, 1, y), depth, tokens.layout)), heads


@compile_region
def mlp_half(block: Any, tokens: TokenBatch, depth: Depth) -> TokenBatch:
    y = block.mlp(block.norm2(tokens.x))
    return tokens.with_x(tokens.x + at_depth(layer_scale(block, 2, y), depth, tokens.layout))


def run_attention(attn: Any, x: Tensor, layout: Layout, rotary: Tensor | None) -> tuple[Tensor, Heads]:
    """(slots, d) -> (slots, d), and the queries and keys that were used."""
    q, k, v = project_qkv(attn, x)  # (slots, heads, head_dim)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rotary is not None:
        half = getattr(attn, "rotate_half", False)
        q, k = (apply_rot_embed_cat(t, rotary[:, None], half=half).type_as(v) for t in (q, k))
    y = attn.norm(attend(q, k, v, layout).flatten(1))
    if getattr(attn, "gate", None) is not None:
        y = y * attn.gate(x).sigmoid()
    return attn.proj_drop(attn.proj(y)), Heads(q, k)


def project_qkv(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (slots, heads, head_dim), fused or not, with whatever biases there are."""
    shape = (attn.num_heads, attn.proj.in_features // attn.num_heads)  # spelled out: there may be no token at all
    if attn.qkv is None:
        q, k, v = (project(x).view(x.shape[0], *shape) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
        return q, k, v
    apart = getattr(attn, "q_bias", None) is not None  # biases of their own, as timm does it
    qkv = F.linear(x, attn.qkv.weight, qkv_bias(attn)) if apart else attn.qkv(x)
    q, k, v = qkv.view(x.shape[0], 3, *shape).unbind(1)
    return q, k, v


def qkv_bias(attn: Any) -> Tensor | None:
    """The bias of queries, keys and values, one after the other."""
    if getattr(attn, "q_bias", None) is None:
        return attn.qkv.bias
    return torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))


def layer_scale(block: Any, which: int, y: Tensor) -> Tensor:
    if isinstance(block, EvaBlock):
        gamma = getattr(block, f"gamma_{which}")
        return y if gamma is None else gamma * y
    return getattr(block, f"ls{which}")(y)


def drop_path(module: nn.Module, y: Tensor, layout: Layout | Places) -> Tensor:
    """Stochastic depth, one draw per image."""
    return at_depth(y, draw_depth(module, layout.batch, y), layout)


def draw_depth(module: Any, batch: int, like: Tensor) -> Depth:
    """One random factor per image. Not inside a compiled region: the rate differs per block and would be a constant."""
    rate: float = getattr(module, "drop_prob", 0) or 0  # timm's DropPath, and those of transformers
    if not rate or not module.training:
        return None
    keep = 1 - rate
    drawn = like.new_empty(batch, 1).bernoulli_(keep)
    return drawn / keep if getattr(module, "scale_by_keep", True) and keep > 0 else drawn


def at_depth(y: Tensor, depth: Depth, layout: Layout | Places) -> Tensor:
    return y if depth is None else y * depth.to(y.dtype)[layout.image]


def unsupported_block(block: Any) -> str | None:
    """Why a block cannot be run on tokens of mixed scale, or None."""
    if reason := unsupported_part(block, (Block, EvaBlock), ATTENTIONS, MLPS):
        return reason
    if getattr(block.attn, "num_kv_groups", 1) > 1:
        return "it groups queries (num_kv_heads < num_heads)"
    return None


def unsupported_part(block: Any, blocks: Kinds, attentions: Kinds, mlps: Kinds) -> str | None:
    """The first part of a block that is of no known kind, by exact type, or None."""
    if type(block) not in blocks:
        return f"its blocks are {type(block).__name__}, which is not supported"
    if type(block.attn) not in attentions:
        return f"its attention is {type(block.attn).__name__}, which is not supported"
    if type(block.mlp) not in mlps:
        return f"its MLP is {type(block.mlp).__name__}, which may mix tokens"
    if block.attn.attn_drop.p:
        return f"attention dropout ({block.attn.attn_drop.p}) has no packed form; build it with attn_drop_rate=0"
    return None


def linear_macs(module: Any) -> int:
    """Multiply-adds of all linear layers of a module for one token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def block_macs(block: Any, total: Tensor, num_kept: Tensor) -> Tensor:
    """Multiply-adds of a block for images of `total` tokens in attention and `num_kept` in the MLP, prefix included."""
    width = block.attn.proj.in_features  # heads * head_dim: scores and mixing take one multiply-add each per pair
    attention = linear_macs(block.attn)
    return total * attention + 2 * width * total * total + num_kept * (linear_macs(block) - attention)
