"""The trunk of a plain ViT for inference in 16 bits: seven kernels per block, in memory that is allocated once.

    norm, product, attention, product + residual, norm, product + GELU, product + residual

Bias and GELU are computed in the matrix products, and residuals are their accumulators. A product that adds to the
residual has no place for a bias, so biases stay out of the residual: what they have added up to before each norm is a
constant vector (`shifts`), and the norm adds it. Layer scales are multiplied into weights. GELU is cuBLAS's, the tanh
approximation: it differs from the exact one by up to 5e-4, and in a layer's output by less than bfloat16 rounds.
"""

from typing import Any

import torch
from timm.layers import LayerNorm, LayerScale, Mlp
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from msvit.backbones import Backbone
from msvit.backbones.blocks import Reduce, run_block
from msvit.backbones.timm_vit import TimmViT
from msvit.compiling.graphed_forward import PlainTrunk, Tables
from msvit.execution.attention import key_weight
from msvit.execution.fused import kernels
from msvit.execution.layout import packed_layout
from msvit.tokens.tokenizer import nan_or_zero
from msvit.types import Heads, ScaleGrid, TokenBatch

ALIGN = 128  # numbers: where tensors begin in shared memory


class Lines:
    """The layout of a batch: token id and image of each slot, where images begin, and how often keys count."""

    def __init__(self, token: Tensor, image: Tensor, cu_seqlens: Tensor, size: Tensor | None) -> None:
        self.token, self.image, self.cu_seqlens, self.size = token, image, cu_seqlens, size

    @staticmethod
    def empty(slots: int, batch: int, sized: bool, device: torch.device) -> "Lines":
        token, image = (torch.zeros(slots, dtype=torch.long, device=device) for _ in range(2))
        cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        return Lines(token, image, cu_seqlens, torch.ones(slots, device=device) if sized else None)

    def fill(self, mask: Tensor, grid: ScaleGrid, num_prefix: int, power: float) -> None:
        arrays = (self.token, self.image, self.cu_seqlens)
        kernels.pack_indices_into(mask, num_prefix, *grid.cells, grid.k, *arrays)
        if self.size is not None:
            coarse = (self.token >= num_prefix) & (self.token < num_prefix + grid.num_cells)
            self.size.fill_(1).masked_fill_(coarse, float(grid.k) ** (2 * power))

    def first(self, rows: int) -> "Lines":
        """Those of the first slots, in which all tokens fit."""
        size = None if self.size is None else self.size[:rows]
        return Lines(self.token[:rows], self.image[:rows], self.cu_seqlens, size)

    def cut(self, rows: int) -> "Lines":
        """Those of the first slots, whether all tokens fit or not: images past the end have no tokens."""
        fits = rows == len(self.token)
        return Lines(self.token, self.image, self.cu_seqlens if fits else self.cu_seqlens.clamp(max=rows), self.size)


class Room:
    """Memory for a batch. Image, pixels, queries to values, and what an MLP holds are never needed at once."""

    def __init__(self, trunk: "FusedTrunk", image: Tensor, rows: int) -> None:
        pixels = trunk.patch_weight.shape[1]
        start = -(-image.numel() // ALIGN) * ALIGN
        size = max(start + rows * pixels, rows * 3 * trunk.width, rows * trunk.hidden)
        shared, self.x, self.y = (image.new_zeros(n) for n in (size, rows * trunk.width, rows * trunk.width))
        self.image = shared[: image.numel()].view(image.shape)
        self.pixels = shared[start : start + rows * pixels].view(rows, pixels)
        self.qkv = shared[: rows * 3 * trunk.width].view(rows, 3 * trunk.width)
        self.mlp = shared
        self.x, self.y = self.x.view(rows, -1), self.y.view(rows, -1)

    def hidden(self, rows: int, width: int) -> Tensor:
        return self.mlp[: rows * width].view(rows, width)


class FusedTrunk(PlainTrunk):
    """`PlainTrunk` in parts: `embed`, `run_block` and `finish`, each for the first `rows` slots of a `Room`."""

    def __init__(self, backbone: Backbone, coarse: int, proportional_attention: float = 0.0) -> None:
        super().__init__(backbone, coarse, proportional_attention=proportional_attention)
        blocks = self.backbone.host.blocks
        self.width = blocks[0].attn.proj.out_features
        self.hidden = max(block.mlp.fc1.out_features for block in blocks)

    @staticmethod
    def can_fuse(backbone: Any) -> bool:
        """Whether every block is timm's usual one: LayerNorm, an MLP with the exact GELU, and no norm of heads."""
        if type(backbone) is not TimmViT:
            return False
        host = backbone.host
        norms = (host.norm, host.norm_pre)
        plain = all(is_plain_norm(norm) or type(norm) is nn.Identity for norm in norms)
        return plain and type(host.patch_embed.norm) is nn.Identity and all(map(is_plain_block, host.blocks))

    @property
    def patch_weight(self) -> Tensor:
        return self.backbone.host.patch_embed.proj.weight.flatten(1)

    def tables(self, grid: ScaleGrid) -> Tables:
        """What tokens start from, shifts, and the weights that layer scales are multiplied into."""
        host = self.backbone.host
        start = self.backbone.make_token_table(grid)
        if host.patch_embed.proj.bias is not None:
            start = start.float()
            start[self.backbone.num_prefix :] += host.patch_embed.proj.bias
        total = torch.zeros(self.width, device=start.device)
        shifts, folded = [total], []
        for layer, scale in self.residual_layers():
            if layer.bias is not None:
                total = total + layer.bias.float() * (1 if scale is None else scale.float())
            shifts.append(total)
            if scale is not None:
                folded.append(layer.weight * scale[:, None])
        return [start.to(host.patch_embed.proj.weight.dtype), torch.stack(shifts), *folded]

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

    def embed(self, lines: Lines, mask: Tensor, grid: ScaleGrid, tables: Any, room: Room, rows: int) -> None:
        host, lines = self.backbone.host, lines.first(rows)
        x, pixels, num_prefix = room.x[:rows], room.pixels[:rows], self.backbone.num_prefix
        kernels.gather_pixels_into(room.image, lines.image, lines.token, num_prefix, grid.fine, grid.k, pixels)
        torch.index_select(tables[0], 0, lines.token, out=x)
        x.addmm_(pixels, self.patch_weight.T)
        marks = nan_or_zero(mask).to(x.dtype)[:, None].expand(-1, self.width)
        room.x.index_add_(0, lines.cu_seqlens[:-1], marks)  # of images past the end, outside of x
        if type(host.norm_pre) is not nn.Identity:
            normalize(host.norm_pre, x, torch.zeros_like(tables[1][0]), x)

    def run_block(self, index: int, lines: Lines, grid: ScaleGrid, tables: Any, room: Room, rows: int) -> None:
        block, lines = self.backbone.host.blocks[index], lines.first(rows)
        x, y, qkv, shifts = room.x[:rows], room.y[:rows], room.qkv[:rows], tables[1][2 * index :]
        project, shrink = self.residual_weights(index, tables)
        normalize(block.norm1, x, shifts[0], y)
        linear(block.attn.qkv, y, qkv)
        heads = (block.attn.num_heads, self.width // block.attn.num_heads)
        q, k, v = qkv.view(rows, 3, *heads).unbind(1)
        most = self.backbone.num_prefix + grid.num_patches
        kernels.attention_into(q, k, v, lines.size, lines.cu_seqlens, most, heads[1] ** -0.5, y.view(rows, *heads))
        x.addmm_(y, project.T)
        normalize(block.norm2, x, shifts[1], y)
        hidden = room.hidden(rows, block.mlp.fc1.out_features)
        linear(block.mlp.fc1, y, hidden, gelu=True)
        x.addmm_(hidden, shrink.T)

    def residual_weights(self, index: int, tables: Any) -> tuple[Tensor, Tensor]:
        layers, folded = self.residual_layers(), list(tables[2:])
        weights = [layer.weight if scale is None else folded.pop(0) for layer, scale in layers]
        return weights[2 * index], weights[2 * index + 1]

    def finish(
        self, lines: Lines, grid: ScaleGrid, tables: Any, room: Room, rows: int, head: bool
    ) -> tuple[Tensor, ...]:
        """Logits if `head`, tokens, and what a layout is made of, as `PlainTrunk` returns them."""
        lines, y = lines.first(rows), room.y[:rows]
        normalize(self.backbone.host.norm, room.x[:rows], tables[1][-1], y)
        weight = (torch.arange(rows, device=y.device) < lines.cu_seqlens[-1]).float()
        arrays = (lines.token, lines.image, weight, lines.cu_seqlens)
        layout = packed_layout(grid, self.backbone.num_prefix, *arrays, has_padding=True, size=lines.size)
        logits = (self.backbone.head(TokenBatch(y, layout)),) if head else ()
        size = () if lines.size is None else (lines.size,)
        return *logits, y, weight, lines.token, lines.image, lines.cu_seqlens, *size


def has_layer_scales(backbone: Any) -> bool:
    return any(type(scale) is LayerScale for block in backbone.host.blocks for scale in (block.ls1, block.ls2))


def normalize(norm: Any, x: Tensor, shift: Tensor, y: Tensor) -> None:
    if type(norm) is nn.Identity:
        kernels.normalize_into(x, shift, None, None, 0.0, y)
    else:
        kernels.normalize_into(x, shift, norm.weight, norm.bias, norm.eps, y)


def linear(layer: Any, x: Tensor, y: Tensor, gelu: bool = False) -> None:
    bias = layer.bias if layer.bias is not None else x.new_zeros(layer.out_features)
    if gelu:
        torch.ops.aten._addmm_activation.out(bias, x, layer.weight.T, use_gelu=True, out=y)
    else:
        torch.addmm(bias, x, layer.weight.T, out=y)


def run_fused_block(block: Any, tokens: TokenBatch, rotary: Tensor | None, reduce: Reduce | None) -> TokenBatch:
    """`run_block` by the same kernels, for blocks between which tokens are reduced; x is written to.

    A reducer needs the residual with its biases, so each norm adds that of the product to come.
    """
    x, layout, attn, mlp = tokens.x, tokens.layout, block.attn, block.mlp
    half = x.dtype in (torch.bfloat16, torch.float16) and x.dtype is attn.proj.weight.dtype
    heads = (attn.num_heads, attn.head_dim)
    if not half or block.training or torch.is_autocast_enabled("cuda") or not kernels.can_attend(x.dtype, heads[1]):
        return run_block(block, tokens, rotary, reduce)
    y, qkv = torch.empty_like(x), x.new_empty(x.shape[0], 3 * x.shape[1])
    normalize_then_add(block.norm1, x, attn.proj.bias, y)
    linear(attn.qkv, y, qkv)
    q, k, v = qkv.view(x.shape[0], 3, *heads).unbind(1)
    weight = None if layout.size is None else key_weight(layout)
    kernels.attention_into(q, k, v, weight, layout.cu_seqlens, layout.max_len, attn.scale, y.view(-1, *heads))
    x.addmm_(y, attn.proj.weight.T)
    if reduce is not None:
        tokens = reduce(tokens, Heads(q, k))
        x = tokens.x.contiguous()
        y = torch.empty_like(x)
    normalize_then_add(block.norm2, x, mlp.fc2.bias, y)
    hidden = x.new_empty(x.shape[0], mlp.fc1.out_features)
    linear(mlp.fc1, y, hidden, gelu=True)
    return tokens.with_x(x.addmm_(hidden, mlp.fc2.weight.T))


def normalize_then_add(norm: Any, x: Tensor, added: Tensor | None, y: Tensor) -> None:
    if added is None:
        kernels.normalize_into(x, x.new_zeros(x.shape[1], dtype=torch.float32), norm.weight, norm.bias, norm.eps, y)
    else:
        kernels.normalize_then_add(x, norm.weight, norm.bias, norm.eps, added, y)


def is_plain_norm(norm: nn.Module) -> bool:
    return type(norm) in (nn.LayerNorm, LayerNorm) and norm.weight is not None and norm.bias is not None


def is_plain_block(block: Any) -> bool:
    if type(block) is not Block or type(block.attn) is not Attention or type(block.mlp) is not Mlp:
        return False
    attn, mlp = block.attn, block.mlp
    bare = (attn.q_norm, attn.k_norm, attn.norm, mlp.norm)
    layers = (attn.qkv, attn.proj, mlp.fc1, mlp.fc2)
    return (
        all(type(part) is nn.Identity for part in bare)
        and all(type(layer) is nn.Linear for layer in layers)
        and all(map(is_plain_norm, (block.norm1, block.norm2)))
        and all(type(scale) in (nn.Identity, LayerScale) for scale in (block.ls1, block.ls2))
        and isinstance(mlp.act, nn.GELU) and mlp.act.approximate == "none"
        and getattr(attn, "gate", None) is None
        and attn.proj.in_features == attn.proj.out_features
    )  # fmt: skip
