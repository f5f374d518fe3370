"""The trunk of a plain ViT with a reducer, for inference in 16 bits: the kernels of `FusedTrunk`, block by block.

After each reduction there are fewer slots, so memory is allocated anew in each block; the graph's pool uses it again.
"""

import torch
from torch import Tensor

from msvit.backbones import Backbone
from msvit.compiling.fused_trunk import has_layer_scales, normalize, run_fused_block, token_starts
from msvit.compiling.graphed_forward import PlainTrunk, Tables
from msvit.compiling.products import multiply
from msvit.execution.fused import kernels
from msvit.reduction import Reducer
from msvit.tokens.tokenizer import nan_or_zero
from msvit.types import Layout, ScaleGrid, TokenBatch


class FusedBlocksTrunk(PlainTrunk):
    """`PlainTrunk` whose blocks are fused; in 32 bits and under autocast it is `PlainTrunk`."""

    def __init__(
        self, backbone: Backbone, coarse: int, reducer: Reducer, mode: str, proportional_attention: float
    ) -> None:
        super().__init__(backbone, coarse, reducer, mode, proportional_attention)
        self.block_function = run_fused_block

    @staticmethod
    def can_fuse(backbone: Backbone) -> bool:
        """Of those that `FusedTrunk` takes. A reducer needs the residual itself, so no layer scale is folded."""
        return not has_layer_scales(backbone)

    def tables(self, grid: ScaleGrid) -> Tables:
        """Besides rotary positions, what tokens start from."""
        return [*super().tables(grid), token_starts(self.backbone, grid)]

    def table_sources(self) -> list[Tensor]:
        host = self.backbone.host
        found = [host.pos_embed, host.patch_embed.proj.bias, *self.backbone.prefix()]
        return [*super().table_sources(), *(source for source in found if source is not None)]

    def tokenize(
        self, image: Tensor, layout: Layout, mask: Tensor, tables: Tables, address: Tensor | None
    ) -> TokenBatch:
        host, grid, start = self.backbone.host, layout.grid, tables[1]
        weight = host.patch_embed.proj.weight.flatten(1)
        if start is None or not self._fits(image):
            return super().tokenize(image, layout, mask, tables, address)
        x = start.index_select(0, layout.token)
        pixels = x.new_empty(x.shape[0], weight.shape[1])
        slots = (layout.image, layout.token, layout.num_prefix)
        kernels.gather_pixels_into(image, *slots, grid.fine, grid.k, pixels, address)
        multiply(pixels, weight, x, add=True)
        marks = nan_or_zero(mask).to(x.dtype)[:, None].expand(-1, x.shape[1])
        return TokenBatch(x.index_add_(0, layout.cu_seqlens[:-1], marks), layout)

    def encode(self, tokens: TokenBatch, tables: Tables) -> TokenBatch:
        if not self._fits(tokens.x):
            return super().encode(tokens, tables)
        tokens = self.backbone.run_blocks(tokens, tables[0], self.reducer, run=self.block_function)
        y = torch.empty_like(tokens.x)
        normalize(self.backbone.host.norm, tokens.x, y.new_zeros(y.shape[1], dtype=torch.float32), y)
        return tokens.with_x(y)

    def _fits(self, x: Tensor) -> bool:
        """Whether images or tokens are of the weights' type, in 16 bits."""
        same = x.dtype is self.backbone.host.patch_embed.proj.weight.dtype
        return same and x.dtype in (torch.bfloat16, torch.float16) and not torch.is_autocast_enabled("cuda")
