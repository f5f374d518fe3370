"""The encoder of a plain ViT with a reducer, for inference in 16 bits: the operations of `FusedEncoder`.

After each reduction there are fewer slots, so memory is allocated anew in each block; the graph's pool uses it again.
"""

from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor

from msvit.backbones.blocks import Reduce, Residual, run_block, run_eager_block
from msvit.execution.attention import choose_backend
from msvit.fast.encoders import PlainEncoder, PlainTables
from msvit.fast.fused_encoder import embed_into, start_sources, token_starts
from msvit.fast.fused_ops import FusedBlock, FusedOps, Norm, is_plain_block
from msvit.types import Layout, ScaleGrid, TokenBatch


class FusedBlocksEncoder(PlainEncoder):
    """`PlainEncoder` whose blocks are fused; in 32 bits and under autocast it is `PlainEncoder`."""

    @staticmethod
    def can_fuse(backbone: Any) -> bool:
        """Return whether a host that `FusedEncoder` takes has no layer scales: a reducer needs the residual itself."""
        return not any(map(has_layer_scale, backbone.host.blocks))

    def tables(self, grid: ScaleGrid) -> PlainTables:
        """Compute rotary positions and token starts."""
        return PlainTables(super().tables(grid).rotary, token_starts(self.backbone, grid))

    def table_sources(self) -> list[Tensor]:
        return [*super().table_sources(), *start_sources(self.backbone)]

    def tokenize(
        self, image: Tensor, layout: Layout, mask: Tensor, tables: PlainTables, address: Tensor | None
    ) -> TokenBatch:
        """Embed tokens by kernels, in 16 bits; else as `PlainEncoder` does."""
        start, weight = tables.start, self.backbone.host.patch_embed.proj.weight
        if start is None or not self._fits(image):
            return super().tokenize(image, layout, mask, tables, address)
        x, pixels = (start.new_empty(len(layout.token), width) for width in (start.shape[1], weight[0].numel()))
        embed_into(x, self.backbone, image, address, layout, layout.grid, mask, start, pixels)
        return TokenBatch(x, layout)

    def encode(self, tokens: TokenBatch, tables: PlainTables) -> TokenBatch:
        """Run fused blocks and the last norm, in 16 bits; else as `PlainEncoder` does."""
        if not self._fits(tokens.x):
            return super().encode(tokens, tables)
        tokens = self.backbone.run_blocks(tokens, tables.rotary, self.reducer, run=run_fused_block)
        y = torch.empty_like(tokens.x)
        Norm(self.backbone.host.norm)(tokens.x, y)
        return tokens.with_x(y)

    def _fits(self, x: Tensor) -> bool:
        """Whether images or tokens are of the weights' type, in 16 bits."""
        same = x.dtype is self.backbone.host.patch_embed.proj.weight.dtype
        return same and x.dtype in (torch.bfloat16, torch.float16) and not torch.is_autocast_enabled("cuda")


def run_fused_block(block: Any, tokens: TokenBatch, rotary: Tensor | None, reduce: Reduce | None) -> TokenBatch:
    """Run a block as `run_eager_block` does, by kernels, in place; each norm adds the bias of the product to come."""
    attn, mlp, dtype = block.attn, block.mlp, tokens.x.dtype
    fits = is_plain_block(block) and not has_layer_scale(block) and attn.proj.weight.dtype is dtype
    fits = fits and choose_backend(dtype, attn.head_dim, cuda=True) == "triton"
    if not fits or any(part.training for part in block.modules()):
        return run_eager_block(block, tokens, rotary, reduce)
    norms = Norm(block.norm1, added=attn.proj.bias), Norm(block.norm2, added=mlp.fc2.bias)
    return run_block(FusedOps(), FusedBlock.of(block, *norms), Residual(tokens), reduce).tokens


def has_layer_scale(block: Any) -> bool:
    """Return whether a block has a layer scale in either half."""
    return LayerScale in (type(block.ls1), type(block.ls2))
