"""The trunk of a plain ViT for inference in 16 bits: seven kernels per block, in memory that is allocated once.

    norm, product, attention, product + residual, norm, product + GELU, product + residual

Bias and GELU are computed in the matrix products, and residuals are their accumulators. A product that adds to the
residual has no place for a bias, so biases stay out of the residual: what they have added up to before each norm is a
constant vector (`shifts`), and the norm adds it. Layer scales are multiplied into weights. GELU is cuBLAS's, the tanh
approximation: it differs from the exact one by up to 5e-4, and in a layer's output by less than bfloat16 rounds.
"""

from typing import Any

import torch
from timm.layers import LayerScale, Mlp
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from msvit.backbones import Backbone
from msvit.backbones.blocks import Reduce, run_block
from msvit.backbones.timm_vit import TimmViT
from msvit.compiling.fast_layers import is_linear, is_plain_norm
from msvit.compiling.graphed_forward import PlainTrunk, Tables
from msvit.compiling.products import multiply
from msvit.execution.attention import choose_backend, key_weight
from msvit.execution.fused import kernels
from msvit.execution.layout import key_sizes, packed_layout
from msvit.tokens.tokenizer import nan_or_zero
from msvit.types import Heads, ScaleGrid, TokenBatch


class PackedIndices:
    """The layout of a batch: token id and image of each slot, where images begin, and how often keys count."""

    def __init__(self, token: Tensor, image: Tensor, cu_seqlens: Tensor, size: Tensor | None) -> None:
        self.token, self.image, self.cu_seqlens, self.size = token, image, cu_seqlens, size

    @staticmethod
    def empty(slots: int, batch: int, sized: bool, device: torch.device) -> "PackedIndices":
        token, image = (torch.zeros(slots, dtype=torch.long, device=device) for _ in range(2))
        cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        return PackedIndices(token, image, cu_seqlens, torch.ones(slots, device=device) if sized else None)

    def fill(self, mask: Tensor, grid: ScaleGrid, num_prefix: int, power: float) -> None:
        arrays = (self.token, self.image, self.cu_seqlens)
        kernels.pack_indices_into(mask, num_prefix, *grid.cells, grid.k, *arrays)
        if self.size is not None:
            self.size.copy_(key_sizes(self.token, grid, num_prefix, power))

    def narrow(self, rows: int) -> "PackedIndices":
        """Those of the first slots, in which all tokens fit."""
        size = None if self.size is None else self.size[:rows]
        return PackedIndices(self.token[:rows], self.image[:rows], self.cu_seqlens, size)

    def clamped(self, rows: int) -> "PackedIndices":
        """Those of the first slots, whether all tokens fit or not: images past the end have no tokens."""
        cu_seqlens = self.cu_seqlens if rows == len(self.token) else self.cu_seqlens.clamp(max=rows)
        return PackedIndices(self.token, self.image, cu_seqlens, self.size)


class Workspace:
    """Memory for so many slots. Pixels, queries to values, and what an MLP holds are never needed at once."""

    def __init__(self, trunk: "FusedTrunk", like: Tensor, rows: int) -> None:
        """`like`: of the dtype and on the device."""
        self.rows = rows
        self.shared = like.new_zeros(rows * max(trunk.patch_weight.shape[1], 3 * trunk.width, trunk.mlp_width))
        self.x, self.y = like.new_zeros(rows + 1, trunk.width), like.new_zeros(rows, trunk.width)  # x: see `embed`

    def take(self, rows: int, width: int) -> Tensor:
        return self.shared[: rows * width].view(rows, width)


class FusedTrunk(PlainTrunk):
    """`PlainTrunk` in parts: `embed`, `run_block`, `finish`, each for the first slots of a `Workspace`."""

    def __init__(self, backbone: Backbone, coarse: int, proportional_attention: float = 0.0) -> None:
        super().__init__(backbone, coarse, proportional_attention=proportional_attention)
        blocks = self.backbone.host.blocks
        self.width = blocks[0].attn.proj.out_features
        self.mlp_width = max(block.mlp.fc1.out_features for block in blocks)

    @staticmethod
    def can_fuse(backbone: Any) -> bool:
        """Whether every block is timm's usual one: LayerNorm, an MLP with the exact GELU, and no norm of heads."""
        if type(backbone) is not TimmViT:
            return False
        host = backbone.host
        norms = (host.norm, host.norm_pre)
        plain = all(is_plain_norm(norm) or type(norm) is nn.Identity for norm in norms)
        return plain and type(host.patch_embed.norm) is nn.Identity and all(map(is_plain_block, host.blocks))

    def workspace(self, like: Tensor, rows: int) -> Workspace:
        return Workspace(self, like, rows)

    @property
    def patch_weight(self) -> Tensor:
        return self.backbone.host.patch_embed.proj.weight.flatten(1)

    def tables(self, grid: ScaleGrid) -> Tables:
        """What tokens start from, shifts, and weights of `residual_layers` times layer scales, None without one."""
        start = token_starts(self.backbone, grid)
        total = torch.zeros(self.width, device=start.device)
        shifts, folded = [total], list[Tensor | None]()
        for layer, scale in self.residual_layers():
            if layer.bias is not None:
                total = total + layer.bias.float() * (1 if scale is None else scale.float())
            shifts.append(total)
            folded.append(None if scale is None else layer.weight * scale[:, None])
        return [start, torch.stack(shifts), *folded]

    def residual_layers(self) -> list[tuple[Any, Tensor | None]]:
        """The layers that add to the residual, in order, and their layer scales."""
        pairs = [
            (layer, scale)
            for block in self.backbone.host.blocks
            for layer, scale in ((block.attn.proj, block.ls1), (block.mlp.fc2, block.ls2))
        ]
        return [(layer, scale.gamma if isinstance(scale, LayerScale) else None) for layer, scale in pairs]

    def table_sources(self) -> list[Tensor]:
        host = self.backbone.host
        found = [host.pos_embed, host.patch_embed.proj.bias, *self.backbone.prefix()]
        for layer, scale in self.residual_layers():
            found += [layer.bias, scale, None if scale is None else layer.weight]
        return [source for source in found if source is not None]

    def takes_address(self, image: Tensor) -> bool:
        return True

    def embed(
        self, image: Tensor, address: Tensor | None, indices: PackedIndices, grid: ScaleGrid, mask: Tensor, tables: Any,
        workspace: Workspace, rows: int,
    ) -> None:  # fmt: skip
        """Tokens of the first `rows` slots."""
        host, indices, x = self.backbone.host, indices.narrow(rows), workspace.x[:rows]
        pixels = workspace.take(rows, self.patch_weight.shape[1])
        slots = (indices.image, indices.token, self.backbone.num_prefix)
        kernels.gather_pixels_into(image, *slots, grid.fine, grid.k, pixels, address)
        torch.index_select(tables[0], 0, indices.token, out=x)
        multiply(pixels, self.patch_weight, x, add=True)
        marks = nan_or_zero(mask).to(x.dtype)[:, None].expand(-1, self.width)
        workspace.x.index_add_(0, indices.cu_seqlens[:-1], marks)  # those of images past the end, after x
        if type(host.norm_pre) is not nn.Identity:
            normalize(host.norm_pre, x, torch.zeros_like(tables[1][0]), x)

    def run_block(
        self, index: int, indices: PackedIndices, grid: ScaleGrid, tables: Any, workspace: Workspace, rows: int
    ) -> None:
        block, indices = self.backbone.host.blocks[index], indices.narrow(rows)
        x, y, shifts = workspace.x[:rows], workspace.y[:rows], tables[1][2 * index :]
        qkv = workspace.take(rows, 3 * self.width)
        proj_weight, fc2_weight = self.residual_weights(index, tables)
        normalize(block.norm1, x, shifts[0], y)
        linear(block.attn.qkv, y, qkv)
        self.attend(block.attn.num_heads, qkv, indices, grid, y)
        multiply(y, proj_weight, x, add=True)
        normalize(block.norm2, x, shifts[1], y)
        hidden = workspace.take(rows, block.mlp.fc1.out_features)
        linear(block.mlp.fc1, y, hidden, gelu=True)
        multiply(hidden, fc2_weight, x, add=True)

    def attend(self, num_heads: int, qkv: Tensor, indices: PackedIndices, grid: ScaleGrid, y: Tensor) -> None:
        heads = (num_heads, self.width // num_heads)
        q, k, v = qkv.view(-1, 3, *heads).unbind(1)
        most = self.backbone.num_prefix + grid.num_patches
        kernels.attention_into(q, k, v, indices.size, indices.cu_seqlens, most, heads[1] ** -0.5, y.view(-1, *heads))

    def residual_weights(self, index: int, tables: Any) -> tuple[Tensor, Tensor]:
        """Of the two `residual_layers` of a block."""
        block, (proj, fc2) = self.backbone.host.blocks[index], tables[2 + 2 * index :][:2]
        return block.attn.proj.weight if proj is None else proj, block.mlp.fc2.weight if fc2 is None else fc2

    def finish(
        self, indices: PackedIndices, grid: ScaleGrid, tables: Any, workspace: Workspace, rows: int, head: bool
    ) -> tuple[Tensor, ...]:
        """Logits if `head`, tokens, and what a layout is made of, as `PlainTrunk` returns them."""
        indices, y = indices.narrow(rows), workspace.y[:rows]
        normalize(self.backbone.host.norm, workspace.x[:rows], tables[1][-1], y)
        weight = (torch.arange(rows, device=y.device) < indices.cu_seqlens[-1]).float()
        arrays = (indices.token, indices.image, weight, indices.cu_seqlens)
        layout = packed_layout(grid, self.backbone.num_prefix, *arrays, has_padding=True, size=indices.size)
        logits = (self.backbone.head(TokenBatch(y, layout)),) if head else ()
        size = () if indices.size is None else (indices.size,)
        return *logits, y, weight, indices.token, indices.image, indices.cu_seqlens, *size


def token_starts(backbone: Any, grid: ScaleGrid) -> Tensor:
    """(ids, d): what tokens start from, with the bias of the patch embedding."""
    proj, start = backbone.host.patch_embed.proj, backbone.make_token_table(grid)
    if proj.bias is not None:
        start = start.float()
        start[backbone.num_prefix :] += proj.bias
    return start.to(proj.weight.dtype)


def has_layer_scales(backbone: Any) -> bool:
    return any(type(scale) is LayerScale for block in backbone.host.blocks for scale in (block.ls1, block.ls2))


def normalize(norm: Any, x: Tensor, shift: Tensor, y: Tensor) -> None:
    if type(norm) is nn.Identity:
        kernels.normalize_into(x, shift, None, None, 0.0, y)
    else:
        kernels.normalize_into(x, shift, norm.weight, norm.bias, norm.eps, y)


def linear(layer: Any, x: Tensor, y: Tensor, gelu: bool = False) -> None:
    needs_zeros = layer.bias is None and gelu
    multiply(x, layer.weight, y, x.new_zeros(layer.out_features) if needs_zeros else layer.bias, gelu)


def run_fused_block(block: Any, tokens: TokenBatch, rotary: Tensor | None, reduce: Reduce | None) -> TokenBatch:
    """`run_block` by the same kernels, for blocks between which tokens are reduced; x is written to.

    A reducer needs the residual with its biases, so each norm adds that of the product to come.
    """
    x, layout, attn, mlp = tokens.x, tokens.layout, block.attn, block.mlp
    half = x.dtype in (torch.bfloat16, torch.float16) and x.dtype is attn.proj.weight.dtype
    heads = (attn.num_heads, attn.head_dim)
    fits = half and is_plain_block(block) and choose_backend(x.dtype, heads[1], cuda=True) == "triton"
    if not fits or any(part.training for part in block.modules()) or torch.is_autocast_enabled("cuda"):
        return run_block(block, tokens, rotary, reduce)
    y, qkv = torch.empty_like(x), x.new_empty(x.shape[0], 3 * x.shape[1])
    normalize_then_add(block.norm1, x, attn.proj.bias, y)
    linear(attn.qkv, y, qkv)
    q, k, v = qkv.view(x.shape[0], 3, *heads).unbind(1)
    weight = key_weight(layout) if layout.has_inactive else layout.size  # those of active tokens are 1
    kernels.attention_into(q, k, v, weight, layout.cu_seqlens, layout.max_len, attn.scale, y.view(-1, *heads))
    multiply(y, attn.proj.weight, x, add=True)
    if reduce is not None:
        tokens = reduce(tokens, Heads(q, k))
        x = tokens.x.contiguous()
        y = torch.empty_like(x)
    normalize_then_add(block.norm2, x, mlp.fc2.bias, y)
    hidden = x.new_empty(x.shape[0], mlp.fc1.out_features)
    linear(mlp.fc1, y, hidden, gelu=True)
    multiply(hidden, mlp.fc2.weight, x, add=True)
    return tokens.with_x(x)


def normalize_then_add(norm: Any, x: Tensor, added: Tensor | None, y: Tensor) -> None:
    if added is None:
        kernels.normalize_into(x, x.new_zeros(x.shape[1], dtype=torch.float32), norm.weight, norm.bias, norm.eps, y)
    else:
        kernels.normalize_then_add(x, norm.weight, norm.bias, norm.eps, added, y)


def is_plain_block(block: Any) -> bool:
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
