"""The blocks of a usual ViT in 16-bit training: each residual sum and the norm behind it are one kernel.

Gradients of a norm's weights are sums over all tokens, which such a kernel computes on its way. Those of biases are
sums, too: they come from the kernels that read or write the same numbers anyway.

    qkv     attention's backward, which sums dq, dk and dv
    proj    the next norm's, as the bias is added there
    fc1     GELU's, as the bias is added there
    fc2     the next norm's
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from msvit.backbones.blocks import Depth, Residual, at_depth, draw_depths, run_attention, run_block
from msvit.execution.attention import attend_among, choose_backend
from msvit.fast.fast_layers import HALVES, FastGELU, has_plain_bias, in_half, is_plain_norm
from msvit.fast.find_kernels import has_hooks, kernels, runs_kernels
from msvit.types import Layout, TokenBatch


def has_plain_norms(host: Any) -> bool:
    """Return whether every block is timm's own, with two layer norms and without layer scales."""
    blocks = getattr(host, "blocks", ())
    return len(blocks) > 0 and all(
        type(block) is Block and type(block.attn) is Attention
        and is_plain_norm(block.norm1) and is_plain_norm(block.norm2)
        and type(block.ls1) is nn.Identity and type(block.ls2) is nn.Identity
        for block in blocks
    )  # fmt: skip


def can_add_norms(host: Any, x: Tensor) -> bool:
    """Return whether kernels take tokens of this kind: a sum in float32, products in 16 bits."""
    half = host.blocks[0].attn.qkv.weight.dtype in HALVES and x.dtype is torch.float32
    return half and torch.is_grad_enabled() and runs_kernels(x)


class Branch(NamedTuple):
    """The output of half a block, to be added to the residual sum."""

    u: Tensor  # (slots, d)
    bias: Tensor | None = None  # (d,), not yet in u


class TrainingOps(NamedTuple):
    """Operations of a block in training: the next norm's kernel adds the output of a half to the residual sum."""

    first: Depth
    second: Depth

    def add_norm(self, residual: Residual, norm: Any, dtype: torch.dtype | None = None) -> tuple[Residual, Tensor]:
        """Return the residual sum, and the norm of that, by default in the branch's dtype."""
        tokens = residual.tokens
        if residual.branch is None:
            return residual, norm(tokens.x)
        u, bias = residual.branch
        total, y, *_ = kernels.add_norm(tokens.x, u, bias, norm.weight, norm.bias, norm.eps, dtype or u.dtype)
        return Residual(tokens.with_x(total)), y

    def attention(self, block: Any, residual: Residual, y: Tensor) -> tuple[Residual, None]:
        """Return the residual with attention as its branch."""
        tokens = residual.tokens
        return Residual(tokens, attention_branch(block.attn, y, tokens.layout, self.first)), None

    def mlp(self, block: Any, residual: Residual, y: Tensor) -> Residual:
        """Return the residual with the MLP as its branch."""
        tokens = residual.tokens
        return Residual(tokens, mlp_branch(block.mlp, y, tokens.layout, self.second))


def run_training_blocks(host: Any, tokens: TokenBatch) -> TokenBatch:
    """Run all blocks and the last norm."""
    residual = Residual(tokens.with_x(host.norm_pre(host.pos_drop(tokens.x))))
    for block in host.blocks:
        ops = TrainingOps(*draw_depths(block, tokens.layout.batch, residual.tokens.x))
        residual = run_block(ops, block, residual)
    plain = is_plain_norm(host.norm) and not has_hooks(host.norm) and not getattr(host.norm, "_fast_norm", False)
    if plain:  # as autocast computes it: in float32
        return tokens.with_x(ops.add_norm(residual, host.norm, torch.float32)[1])
    u, bias = residual.branch
    return tokens.with_x(host.norm(residual.tokens.x + (u if bias is None else u + bias)))


def attention_branch(attn: Any, x: Tensor, layout: Layout, depth: Depth) -> Branch:
    """Compute attention as `run_attention` does, with queries, keys and values in one tensor."""
    if not is_plain_attention(attn):
        return Branch(at_depth(run_attention(attn, x, layout, None)[0], depth, layout))
    weight, bias = attn.qkv.weight, attn.qkv.bias
    qkv = kernels.linear(x.to(weight.dtype), weight, bias.detach())  # its gradient comes from attention
    y = attend_among(qkv.view(x.shape[0], 3, attn.num_heads, attn.head_dim), bias, layout).flatten(1)
    return last_layer(attn.proj, attn.proj_drop, attn.norm(y), layout, depth)


def is_plain_attention(attn: Any) -> bool:
    """Return whether attention takes the output of a linear layer with a bias in 16 bits."""
    norms = type(attn.q_norm) is nn.Identity and type(attn.k_norm) is nn.Identity
    gated = getattr(attn, "gate", None) is not None
    if gated or not norms or not has_plain_bias(attn.qkv) or not in_half(attn.qkv):
        return False
    return choose_backend(attn.qkv.weight.dtype, attn.head_dim, cuda=True) == "triton"


def mlp_branch(mlp: Any, x: Tensor, layout: Layout, depth: Depth) -> Branch:
    """Compute an MLP, in which GELU adds the bias of the layer before."""
    if type(mlp) is not Mlp or has_hooks(mlp):
        return Branch(at_depth(mlp(x), depth, layout))
    if type(mlp.act) is FastGELU and has_plain_bias(mlp.fc1) and not has_hooks(mlp.act):
        y = kernels.gelu(F.linear(x, mlp.fc1.weight), mlp.fc1.bias)
    else:
        y = mlp.act(mlp.fc1(x))
    return last_layer(mlp.fc2, mlp.drop2, mlp.norm(mlp.drop1(y)), layout, depth)


def last_layer(layer: Any, dropout: Any, x: Tensor, layout: Layout, depth: Depth) -> Branch:
    """Compute the last layer of a branch, without its bias where nothing comes before the residual sum."""
    drops = type(dropout) is not nn.Dropout or has_hooks(dropout) or (dropout.p > 0 and dropout.training)
    if drops or depth is not None or not has_plain_bias(layer):
        return Branch(at_depth(dropout(layer(x)), depth, layout))
    return Branch(F.linear(x, layer.weight), layer.bias)
