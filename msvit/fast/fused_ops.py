"""The operations of a usual ViT block in 16 bits, in inference: PyTorch's products, and kernels for the rest."""

from typing import Any, NamedTuple

import torch
from timm.layers import LayerScale, Mlp
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from msvit.backbones.blocks import Residual
from msvit.execution.attention import key_weight
from msvit.fast.fast_layers import is_linear, is_plain_norm
from msvit.fast.find_kernels import kernels
from msvit.types import Heads


class Norm(NamedTuple):
    """A norm by one kernel: y = LayerNorm(x + shift); then x += added."""

    layer: Any  # of the kind of `is_plain_norm`, or nn.Identity
    shift: Tensor | None = None  # (d,), float32
    added: Tensor | None = None  # (d,), instead of a shift

    def __call__(self, x: Tensor, y: Tensor) -> None:
        if self.added is not None:
            kernels.normalize_then_add(x, *self.weights, self.added, y)
        else:
            shift = x.new_zeros(x.shape[1], dtype=torch.float32) if self.shift is None else self.shift
            kernels.normalize_into(x, shift, *self.weights, y)

    @property
    def weights(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weight, bias and eps of the layer."""
        layer = self.layer
        return (None, None, 0.0) if type(layer) is nn.Identity else (layer.weight, layer.bias, layer.eps)


class Linear(NamedTuple):
    """The weights of a linear layer; in FP8 `weight` is an `Fp8Rows`."""

    weight: Any
    bias: Tensor | None


class FusedBlock(NamedTuple):
    """The layers of a block. `proj` and `fc2` are weights without biases, which the norms add."""

    norm1: Norm
    qkv: Linear
    proj: Tensor
    norm2: Norm
    fc1: Linear
    fc2: Any
    num_heads: int

    @staticmethod
    def of(
        block: Any, norm1: Norm, norm2: Norm, proj: Tensor | None = None, fc2: Tensor | None = None
    ) -> "FusedBlock":
        """Take the layers of a host's block. `proj`, `fc2`: other weights than those of the layers."""
        attn, mlp = block.attn, block.mlp
        proj, fc2 = attn.proj.weight if proj is None else proj, mlp.fc2.weight if fc2 is None else fc2
        qkv, fc1 = (Linear(layer.weight, layer.bias) for layer in (attn.qkv, mlp.fc1))
        return FusedBlock(norm1, qkv, proj, norm2, fc1, fc2, attn.num_heads)


class FusedOps:
    """Operations of a block by kernels: products add to the residual in place. Memory is allocated for each half."""

    def take(self, rows: int, width: int, like: Tensor) -> Tensor:
        """Return memory for (rows, width) numbers, of the dtype and on the device of `like`."""
        return like.new_empty(rows, width)

    def take_y(self, x: Tensor) -> Tensor:
        """Return memory for the output of norm or attention."""
        return torch.empty_like(x)

    def add_norm(self, residual: Residual, norm: Norm) -> tuple[Residual, Any]:
        """Return the residual, and its norm in new memory."""
        tokens = residual.tokens
        if not tokens.x.is_contiguous():  # after a reduction
            tokens = tokens.with_x(tokens.x.contiguous())
        y = self.take_y(tokens.x)
        norm(tokens.x, y)
        return Residual(tokens), y

    def attention(self, block: FusedBlock, residual: Residual, y: Any) -> tuple[Residual, Heads]:
        """Add attention to the residual in place, overwriting y, and return its queries and keys."""
        qkv = self.take(len(y), block.qkv.weight.shape[0], y)
        linear(block.qkv, y, qkv)
        return residual, attend(block, residual, qkv, y)

    def mlp(self, block: FusedBlock, residual: Residual, y: Any) -> Residual:
        """Add the MLP to the residual."""
        hidden = self.take(len(y), block.fc1.weight.shape[0], y)
        linear(block.fc1, y, hidden, gelu=True)
        residual.tokens.x.addmm_(hidden, block.fc2.T)
        return residual


def attend(block: FusedBlock, residual: Residual, qkv: Tensor, y: Tensor) -> Heads:
    """Compute attention, written to y, and add its projection to the residual."""
    layout, heads = residual.tokens.layout, (block.num_heads, y.shape[1] // block.num_heads)
    q, k, v = qkv.view(-1, 3, *heads).unbind(1)
    weight = key_weight(layout) if layout.has_inactive else layout.size  # those of active tokens are 1
    scale = heads[1] ** -0.5
    kernels.attention_into(q, k, v, weight, layout.cu_seqlens, layout.max_len, scale, y.view(-1, *heads))
    residual.tokens.x.addmm_(y, block.proj.T)
    return Heads(q, k)


def linear(layer: Linear, x: Tensor, y: Tensor, gelu: bool = False) -> None:
    """Write the layer's output to y; with `gelu`, GELU of it (the tanh approximation), in the product's epilogue."""
    if gelu:
        bias = x.new_zeros(y.shape[1]) if layer.bias is None else layer.bias
        torch.ops.aten._addmm_activation.out(bias, x, layer.weight.T, use_gelu=True, out=y)
    elif layer.bias is None:
        torch.mm(x, layer.weight.T, out=y)
    else:
        torch.addmm(layer.bias, x, layer.weight.T, out=y)


def is_plain_block(block: Any) -> bool:
    """Return whether a block is timm's usual one: LayerNorm, exact GELU, no norm of heads, no gated attention."""
    if type(block) is not Block or type(block.attn) is not Attention or type(block.mlp) is not Mlp:
        return False
    attn, mlp = block.attn, block.mlp
    bare = (attn.q_norm, attn.k_norm, attn.norm, mlp.norm)
    layers = (attn.qkv, attn.proj, mlp.fc1, mlp.fc2)
    return (
        all(type(part) is nn.Identity for part in bare)
        and all(map(is_linear, layers))
        and all(map(is_plain_norm, (block.norm1, block.norm2)))
        and all(type(scale) in (nn.Identity, LayerScale) for scale in (block.ls1, block.ls2))
        and isinstance(mlp.act, nn.GELU) and mlp.act.approximate == "none"
        and getattr(attn, "gate", None) is None
        and attn.proj.in_features == attn.proj.out_features
    )  # fmt: skip
