"""Trunks: everything after the gate as a function of tensors, for a fixed number of slots.

    arrays = trunk.pack_indices(mask, sample, grid, slots, least)   # which tokens run: not compiled, nothing waits
    logits, *parts = trunk(image, mask, arrays, tables, full, head=True)   # compiled once for any number of slots
    trunk.tokens(grid, batch, parts)                                # the TokenBatch that every model returns
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from msvit.backbones import Backbone
from msvit.backbones.blocks import RunBlock, run_block
from msvit.backbones.swin_blocks import bias_sources, frame_of
from msvit.backbones.timm_swin import last_layout
from msvit.compiling.training_blocks import can_add_norms, run_training_blocks
from msvit.execution.attention import choose_backend
from msvit.execution.cells import CellLayout, packed_cells
from msvit.execution.fused import kernels
from msvit.execution.layout import (
    num_tokens,
    pack_indices,
    pack_with_inactive,
    packed_layout,
    slot_weights,
    with_proportional_attention,
)
from msvit.execution.windows import MAX_AREA
from msvit.reduction import Reducer
from msvit.tokens.patches import gather_pixels
from msvit.tokens.tokenizer import embed, tokenize
from msvit.types import GateOutput, Layout, ScaleGrid, TokenBatch

Arrays = tuple[Tensor, ...]
Tables = list[Tensor | None]


class PlainTrunk(nn.Module):
    """The trunk of a non-hierarchical host, such as a ViT. A slot is a token.

    In mode trimmed or masked tokens with weight 0 have slots too: they are packed as the others, image after image.
    """

    backbone: Any
    trains = True  # whether it can be captured with its backward
    has_regions = True  # whether its blocks can be compiled by themselves

    def __init__(
        self, backbone: Backbone, coarse: int, reducer: Reducer | None = None, mode: str = "packed",
        proportional_attention: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.backbone, self.coarse, self.reducer, self.mode = backbone, coarse, reducer, mode
        self.proportional_attention = proportional_attention
        self.block_function: RunBlock = run_block
        self.adds_norms = False  # whether sums and norms are one kernel, where `can_add_norms`
        self.head_dims = backbone.head_dims  # used in every call

    def unsupported_reason(self, dtype: torch.dtype) -> str | None:
        """Why the trunk cannot be captured as a CUDA graph; then the uncompiled model runs."""
        host = self.backbone.host
        if host.grad_checkpointing:
            return "gradient checkpointing is on, which CUDA graphs cannot hold"
        if self.backbone.draws_positions:
            return "the host draws random positions in every training step, which CUDA graphs cannot hold"
        if getattr(host, "distilled_training", False) and host.training:
            return "distilled training is on, in which the host returns two outputs"
        if self.mode != "packed" and self.reducer is not None:
            return f"with a reducer packed inference is compiled, and the mode is {self.mode}"
        return self.attention_reason(dtype, ("triton",) if self.mode != "packed" else ("triton", "varlen", "flash"))

    def attention_reason(self, dtype: torch.dtype, backends: tuple[str, ...]) -> str | None:
        """Why attention runs by none of these backends, whose launches do not depend on the number of tokens."""
        for dim in self.head_dims:
            if (found := choose_backend(dtype, dim, cuda=True)) not in backends:
                need = " or ".join(backends)
                return f"attention of {dim} channels per head in {dtype} runs by {found}, but graphs need {need}"
        return None

    def slots(self, batch: int, num_fine: int, grid: ScaleGrid) -> int:
        """What a batch with so many fine cells needs. In mode trimmed each image has as many as the longest one."""
        if self.mode == "masked":
            return batch * (self.backbone.num_prefix + grid.num_ids)
        return num_tokens(batch, num_fine, grid, self.backbone.num_prefix)

    def tables(self, grid: ScaleGrid) -> Tables:
        """What is made of weights beforehand: rotary positions. Position embeddings are cheap, and made per call."""
        if self.reducer is not None:
            self.reducer.precompute(len(self.backbone.host.blocks), grid)
        return [self.backbone.rotary(grid)]

    def table_sources(self) -> list[Tensor]:
        """The weights and buffers that `tables` are made of."""
        return self.backbone.rotary_sources()

    def pack_indices(self, mask: Tensor, sample: Tensor, grid: ScaleGrid, slots: int, least: int) -> Arrays:
        """`sample`: the soft decisions, by which mode trimmed sorts. `least`: so many slots are used at least."""
        if self.mode == "packed":
            return pack_indices(mask, grid, self.backbone.num_prefix, slots)
        return pack_with_inactive(self.mode, mask, sample, grid, self.backbone.num_prefix, slots)

    def takes_address(self, image: Tensor) -> bool:
        """Whether such images can be read by their address."""
        return kernels is not None and image.is_cuda and image.dtype is not torch.float64

    def forward(
        self, image: Tensor, mask: Tensor, arrays: Arrays, tables: Tables, full: bool, head: bool = True,
        address: Tensor | None = None,
    ) -> Arrays:  # fmt: skip
        """Logits if `head`, tokens, and what a layout is made of. `full`: all cells fine, no slot is padding."""
        token, which, cu_seqlens = arrays
        num_prefix = self.backbone.num_prefix
        grid = ScaleGrid(image.shape[2], image.shape[3], fine=self.backbone.fine, coarse=self.coarse)
        inactive = self.mode != "packed"
        weight = slot_weights(mask, grid, num_prefix, token, which, None if full else cu_seqlens, not inactive)
        layout = packed_layout(grid, num_prefix, token, which, weight, cu_seqlens, not full, inactive)
        layout = with_proportional_attention(layout, self.proportional_attention)
        tokens = self.encode(self.tokenize(image, layout, mask, tables, address), tables)
        logits = (self.backbone.head(tokens),) if head else ()
        last = tokens.layout
        size = () if last.size is None else (last.size,)
        if self.reducer is None:
            return *logits, tokens.x, weight, token, which, cu_seqlens, *size
        parts = (last.weight, last.token, last.image, last.cu_seqlens, last.owner)
        return *logits, tokens.x, *parts, *size

    def tokenize(
        self, image: Tensor, layout: Layout, mask: Tensor, tables: Tables, address: Tensor | None
    ) -> TokenBatch:
        start = self.backbone.make_token_table(layout.grid)  # (ids, d), from the weights as they are now
        if address is None:
            return tokenize(image, layout, self.backbone, start, mask)

        def pixels_of(which: Tensor, patch: Tensor) -> Tensor:
            return gather_pixels(image, which, patch, layout.grid, address)

        return embed(layout, self.backbone, start, mask, pixels_of)

    def encode(self, tokens: TokenBatch, tables: Tables) -> TokenBatch:
        """All blocks and the last norm."""
        if self.adds_norms and can_add_norms(self.backbone.host, tokens.x):
            return run_training_blocks(self.backbone.host, tokens)
        return self.backbone(tokens, tables[0], self.reducer, self.block_function)

    def tokens(self, grid: ScaleGrid, batch: int, parts: Arrays) -> TokenBatch:
        x, weight, token, which, cu_seqlens, *others = parts
        num_prefix = self.backbone.num_prefix
        inactive = self.mode != "packed"
        patch_to_slot = None if self.reducer is None else others.pop(0)
        size = others[0] if others else None
        layout = packed_layout(grid, num_prefix, token, which, weight, cu_seqlens, True, inactive, size)
        if self.reducer is not None:
            left = self.reducer.max_left(len(self.backbone.host.blocks) - 1, grid)
            layout = replace(layout, max_len=num_prefix + left, patch_to_slot=patch_to_slot)
        return TokenBatch(x, layout)


class SwinTrunk(PlainTrunk):
    """Of a Swin, for inference. A slot is a fine token; how many coarse ones there can be follows."""

    trains = has_regions = False

    def __init__(
        self, backbone: Backbone, coarse: int, reducer: Reducer | None = None, mode: str = "packed",
        proportional_attention: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(backbone, coarse, reducer, mode, proportional_attention)
        host: Any = backbone.host
        self.max_area = max(frame_of(block).area for stage in host.layers for block in stage.blocks)

    def unsupported_reason(self, dtype: torch.dtype) -> str | None:
        if self.max_area > MAX_AREA:
            return f"windows have {self.max_area} tokens, but the window kernel takes at most {MAX_AREA}"
        if self.mode != "packed":
            return f"a Swin is compiled in mode packed only, and the mode is {self.mode}"
        return self.attention_reason(dtype, ("triton",))

    def slots(self, batch: int, num_fine: int, grid: ScaleGrid) -> int:
        return num_fine * grid.k**2

    def tables(self, grid: ScaleGrid) -> Tables:
        return [*self.backbone.biases()]

    def table_sources(self) -> list[Tensor]:
        blocks = (block for stage in self.backbone.host.layers for block in stage.blocks)
        return [source for block in blocks for source in bias_sources(block.attn)]

    def pack_indices(self, mask: Tensor, sample: Tensor, grid: ScaleGrid, slots: int, least: int) -> Arrays:
        entering = (grid.coarse // self.backbone.coarse_stride) ** 2  # coarse tokens of a cell
        num_coarse = mask.shape[0] * grid.num_cells - least // grid.k**2
        capacity = max(2, slots // grid.k**2), max(2, num_coarse * entering)  # 0 and 1 would be specialised
        layout = packed_cells(GateOutput.from_mask(mask), grid, self.backbone.coarse_stride, capacity)
        return layout.fine, layout.coarse, layout.cell, layout.token

    def takes_address(self, image: Tensor) -> bool:
        return False

    def forward(
        self, image: Tensor, mask: Tensor, arrays: Arrays, tables: Tables, full: bool, head: bool = True,
        address: Tensor | None = None,
    ) -> Arrays:  # fmt: skip
        """Logits if `head`, tokens, and how many tokens each image had before the first stage."""
        grid = ScaleGrid(image.shape[2], image.shape[3], fine=self.backbone.fine, coarse=self.coarse)
        fine, coarse, cell, token = arrays
        layout = CellLayout(grid, self.backbone.coarse_stride, mask, fine, coarse, cell, token, whole=False)
        tokens = self.backbone(self.backbone.tokenize(image, layout, mask), tables)
        logits = (self.backbone.head(tokens),) if head else ()
        return *logits, tokens.x, tokens.count

    def tokens(self, grid: ScaleGrid, batch: int, parts: Arrays) -> TokenBatch:
        x, initial_count = parts
        layout = last_layout(grid, batch, len(self.backbone.host.layers), x.device)
        return TokenBatch(x, replace(layout, initial_count=initial_count))


def trunk_of(
    backbone: Backbone, coarse: int, reducer: Reducer | None, mode: str, proportional_attention: float
) -> PlainTrunk:
    kind = SwinTrunk if backbone.is_hierarchical else PlainTrunk
    return kind(backbone, coarse, reducer, mode, proportional_attention)
