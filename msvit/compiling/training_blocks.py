"""The blocks of a usual ViT in 16-bit training: each residual sum and the norm behind it are one kernel.

Gradients of a norm's weights are sums over all tokens, which such a kernel computes on its way.
"""

from typing import Any

import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from msvit.backbones.blocks import at_depth, draw_depth, run_attention
from msvit.compiling.fast_layers import HALVES, is_plain_norm
from msvit.execution.fused import kernels
from msvit.types import TokenBatch


def has_plain_norms(host: Any) -> bool:
    """Whether every block is timm's own, with two layer norms and without layer scales."""
    blocks = getattr(host, "blocks", ())
    return len(blocks) > 0 and all(
        type(block) is Block and type(block.attn) is Attention
        and is_plain_norm(block.norm1) and is_plain_norm(block.norm2)
        and type(block.ls1) is nn.Identity and type(block.ls2) is nn.Identity
        for block in blocks
    )  # fmt: skip


def can_add_norms(host: Any, x: Tensor) -> bool:
    """Whether kernels take tokens of this kind: a sum in float32, products in 16 bits."""
    half = host.blocks[0].attn.qkv.weight.dtype in HALVES and x.dtype is torch.float32
    return half and torch.is_grad_enabled() and runs_kernels(x)


def runs_kernels(x: Tensor) -> bool:
    return kernels is not None and x.is_cuda


def run_training_blocks(host: Any, tokens: TokenBatch) -> TokenBatch:
    """All blocks and the last norm. What a block adds to the residual sum is added by the next norm's kernel."""
    layout = tokens.layout
    x, branch = host.norm_pre(host.pos_drop(tokens.x)), None  # (slots, d)
    for block in host.blocks:
        first, second = (draw_depth(module, layout.batch, x) for module in (block.drop_path1, block.drop_path2))
        if branch is None:
            y = block.norm1(x)
        else:
            x, y = add_norm(x, branch, block.norm1)
        branch = at_depth(run_attention(block.attn, y, layout, None)[0], first, layout)
        x, y = add_norm(x, branch, block.norm2)
        branch = at_depth(block.mlp(y), second, layout)
    return tokens.with_x(host.norm(x if branch is None else x + branch))


def add_norm(x: Tensor, branch: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """x + branch, and the norm of that."""
    total, y, *_ = kernels.add_norm(x, branch, norm.weight, norm.bias, norm.eps)
    return total, y
