"""The program of a transformer block, and its operations on tokens of any layout.

`run_block` has the order of a pre-norm block, once for all. What it calls are the methods of an object: here those of
eager mode, with the block's own norms, MLP and weights; `fast/` has others, with kernels.

Only two things differ from the block's own forward: attention stays inside each image of the layout, and
stochastic depth is drawn once per image, not once per tensor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from timm.layers import GluMlp, Mlp, SwiGLU, apply_rot_embed_cat
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from msvit.execution import attend
from msvit.fast.regions import compile_region
from msvit.shapes import Float
from msvit.types import Heads, Layout, TokenBatch

ATTENTIONS = (Attention, AttentionRope, EvaAttention)
MLPS = (Mlp, GluMlp, SwiGLU)

Kinds = tuple[type, ...]
Reduce = Callable[[TokenBatch, Heads], TokenBatch]
RunBlock = Callable[[Any, TokenBatch, Tensor | None, Reduce | None], TokenBatch]  # of the form of `run_eager_block`
Depth = Float[Tensor, "b 1"] | None  # what stochastic depth multiplies half a block with


class Residual(NamedTuple):
    """Tokens between the halves of blocks."""

    tokens: Any  # a TokenBatch, or another record of x, the residual sum (slots, d), and its layout
    branch: Any = None  # what half a block has computed and not yet added to x


@runtime_checkable
class BlockOps(Protocol):
    """The operations of a block."""

    def add_norm(self, residual: Residual, norm: Any) -> tuple[Residual, Any]:
        """Return the residual with its branch added, and the norm of that."""

    def attention(self, block: Any, residual: Residual, y: Any) -> tuple[Residual, Any]:
        """Return the residual with attention, and its Heads; with a reducer these are needed, and no branch is left."""

    def mlp(self, block: Any, residual: Residual, y: Any) -> Residual:
        """Return the residual with the MLP."""


def attention_half(ops: BlockOps, block: Any, residual: Residual) -> tuple[Residual, Any]:
    """Run the first half of a block: norm and attention."""
    residual, y = ops.add_norm(residual, block.norm1)
    return ops.attention(block, residual, y)


def mlp_half(ops: BlockOps, block: Any, residual: Residual) -> Residual:
    """Run the second half of a block: norm and MLP."""
    residual, y = ops.add_norm(residual, block.norm2)
    return ops.mlp(block, residual, y)


def both_halves(ops: BlockOps, block: Any, residual: Residual) -> Residual:
    """Run a whole block, without a reducer."""
    return mlp_half(ops, block, attention_half(ops, block, residual)[0])


class Halves(NamedTuple):
    """The parts of a block, compiled or not."""

    attention: Callable[[BlockOps, Any, Residual], tuple[Residual, Any]]
    mlp: Callable[[BlockOps, Any, Residual], Residual]
    both: Callable[[BlockOps, Any, Residual], Residual]


PLAIN = Halves(attention_half, mlp_half, both_halves)
REGIONS = Halves(compile_region(attention_half), compile_region(mlp_half), compile_region(both_halves))


def run_block(
    ops: BlockOps, block: Any, residual: Residual, reduce: Reduce | None = None, halves: Halves = PLAIN
) -> Residual:
    """Run a pre-norm block. `reduce` acts between its halves, and gets queries and keys of its attention."""
    if reduce is None:
        return halves.both(ops, block, residual)
    residual, heads = halves.attention(ops, block, residual)
    residual = Residual(reduce(residual.tokens, heads))
    del heads  # queries, keys and values need not be in memory beside the MLP
    return halves.mlp(ops, block, residual)


class EagerOps(NamedTuple):
    """Operations of timm's Block and EvaBlock by the block's own modules."""

    rotary: Tensor | None  # (slots, 2 head_dim)
    first: Depth
    second: Depth

    def add_norm(self, residual: Residual, norm: Any) -> tuple[Residual, Tensor]:
        """Return the residual, to which halves are added at once, and the norm of it."""
        return residual, norm(residual.tokens.x)

    def attention(self, block: Any, residual: Residual, y: Tensor) -> tuple[Residual, Heads]:
        tokens = residual.tokens
        y, heads = run_attention(block.attn, y, tokens.layout, self.rotary)
        y = at_depth(layer_scale(block, 1, y), self.first, tokens.layout)
        return Residual(tokens.with_x(tokens.x + y)), heads

    def mlp(self, block: Any, residual: Residual, y: Tensor) -> Residual:
        tokens = residual.tokens
        y = at_depth(layer_scale(block, 2, block.mlp(y)), self.second, tokens.layout)
        return Residual(tokens.with_x(tokens.x + y))


def run_eager_block(block: Any, tokens: TokenBatch, rotary: Tensor | None, reduce: Reduce | None = None) -> TokenBatch:
    """Run a block by its own modules. `rotary`: (slots, 2 head_dim), of each slot."""
    ops = EagerOps(rotary, *draw_depths(block, tokens.layout.batch, tokens.x))
    return run_block(ops, block, Residual(tokens), reduce, REGIONS).tokens


def run_attention(attn: Any, x: Tensor, layout: Layout, rotary: Tensor | None) -> tuple[Tensor, Heads]:
    """Run an attention module, (slots, d) -> (slots, d), and return the queries and keys it used, too."""
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
    """Compute queries, keys and values, each (slots, heads, head_dim), fused or not, with whatever biases there are."""
    shape = (attn.num_heads, attn.proj.in_features // attn.num_heads)  # spelled out: there may be no token at all
    if attn.qkv is None:
        q, k, v = (project(x).view(x.shape[0], *shape) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
        return q, k, v
    apart = getattr(attn, "q_bias", None) is not None  # biases of their own, as timm does it
    qkv = F.linear(x, attn.qkv.weight, qkv_bias(attn)) if apart else attn.qkv(x)
    q, k, v = qkv.view(x.shape[0], 3, *shape).unbind(1)
    return q, k, v


def qkv_bias(attn: Any) -> Tensor | None:
    """Return the bias of queries, keys and values, one after the other."""
    if getattr(attn, "q_bias", None) is None:
        return attn.qkv.bias
    return torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))


def layer_scale(block: Any, which: int, y: Tensor) -> Tensor:
    """Apply the layer scale of half 1 or 2 of a block, if it has one."""
    if isinstance(block, EvaBlock):
        gamma = getattr(block, f"gamma_{which}")
        return y if gamma is None else gamma * y
    return getattr(block, f"ls{which}")(y)


def drop_path(module: nn.Module, y: Tensor, layout: Any) -> Tensor:
    """Apply stochastic depth, one draw per image."""
    return at_depth(y, draw_depth(module, layout.batch, y), layout)


def draw_depth(module: Any, batch: int, like: Tensor) -> Depth:
    """Draw one factor per image. Not inside a compiled region: the rate differs per block and would be a constant."""
    rate: float = getattr(module, "drop_prob", 0) or 0  # timm's DropPath, and those of transformers
    if not rate or not module.training:
        return None
    keep = 1 - rate
    drawn = like.new_empty(batch, 1).bernoulli_(keep)
    return drawn / keep if getattr(module, "scale_by_keep", True) and keep > 0 else drawn


def draw_depths(block: Any, batch: int, like: Tensor) -> tuple[Depth, Depth]:
    """Draw the factors of both halves of a block."""
    return draw_depth(block.drop_path1, batch, like), draw_depth(block.drop_path2, batch, like)


def at_depth(y: Tensor, depth: Depth, layout: Any) -> Tensor:
    """Multiply each token by its image's factor of stochastic depth."""
    return y if depth is None else y * depth.to(y.dtype)[layout.image]


def unsupported_block(block: Any) -> str | None:
    """Return why a block cannot be run on tokens of mixed scale, or None."""
    if reason := unsupported_part(block, (Block, EvaBlock), ATTENTIONS, MLPS):
        return reason
    if getattr(block.attn, "num_kv_groups", 1) > 1:
        return "it groups queries (num_kv_heads < num_heads)"
    return None


def unsupported_part(block: Any, blocks: Kinds, attentions: Kinds, mlps: Kinds) -> str | None:
    """Name the first part of a block that is of no known kind, by exact type; None if all are."""
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
    """Return the multiply-adds of all linear layers of a module for one token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def block_macs(block: Any, total: Tensor, num_kept: Tensor) -> Tensor:
    """Return a block's multiply-adds for images of `total` tokens in attention, `num_kept` in the MLP, with prefix."""
    width = block.attn.proj.in_features  # heads * head_dim: scores and mixing take one multiply-add each per pair
    attention = linear_macs(block.attn)
    return total * attention + 2 * width * total * total + num_kept * (linear_macs(block) - attention)
