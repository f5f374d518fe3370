"""Everything after the gate of a Swin as a function of tensors, as in `msvit.fast.encoders`."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msvit.fast.encoders import Encoder
from msvit.swin.backbone import last_layout
from msvit.swin.blocks import bias_sources, frame_of
from msvit.swin.cells import CellLayout, packed_cells
from msvit.swin.windows import MAX_AREA
from msvit.types import GateOutput, ScaleGrid, TokenBatch


class CellIndices(NamedTuple):
    """The arrays of a CellLayout."""

    fine: Tensor
    coarse: Tensor
    cell: Tensor
    token: Tensor


class SwinOutput(NamedTuple):
    """Output of a `SwinEncoder`; `initial_count`: tokens of each image before the first stage."""

    logits: Tensor | None
    x: Tensor
    initial_count: Tensor
    decisions: Tensor | None = None


class SwinEncoder(Encoder):
    """The encoder of a Swin, for inference. A slot is a fine token; how many coarse ones there can be follows.

    Inductor of torch 2.11 fails on some of its kernels if sizes of images are dynamic.
    """

    trains = has_regions = False
    has_static_sizes = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        blocks = (block for stage in self.backbone.host.layers for block in stage.blocks)
        self.max_area = max(frame_of(block).area for block in blocks)  # used in every call

    def unsupported_reason(self, dtype: torch.dtype) -> str | None:
        if self.max_area > MAX_AREA:
            return f"windows have {self.max_area} tokens, but the window kernel takes at most {MAX_AREA}"
        if self.mode != "packed":
            return f"a Swin is compiled in mode packed only, and the mode is {self.mode}"
        return self.attention_reason(dtype, ("triton",))

    def slots(self, batch: int, num_fine: int, grid: ScaleGrid) -> int:
        return num_fine * grid.k**2

    def tables(self, grid: ScaleGrid) -> list[Tensor]:
        """Return the position biases of the blocks' attention."""
        return [*self.backbone.biases()]

    def table_sources(self) -> list[Tensor]:
        blocks = (block for stage in self.backbone.host.layers for block in stage.blocks)
        return [source for block in blocks for source in bias_sources(block.attn)]

    def pack_indices(self, mask: Tensor, sample: Tensor, grid: ScaleGrid, slots: int, min_slots: int) -> CellIndices:
        entering = (grid.coarse // self.backbone.coarse_stride) ** 2  # coarse tokens of a cell
        num_coarse = mask.shape[0] * grid.num_cells - min_slots // grid.k**2
        capacity = max(2, slots // grid.k**2), max(2, num_coarse * entering)  # 0 and 1 would be specialised
        layout = packed_cells(GateOutput.from_mask(mask), grid, self.backbone.coarse_stride, capacity)
        return CellIndices(layout.fine, layout.coarse, layout.cell, layout.token)

    def takes_address(self, image: Tensor) -> bool:
        """Return False: images are copied."""
        return False

    def forward(
        self, image: Tensor, mask: Tensor, indices: CellIndices, tables: list[Tensor], full: bool, head: bool = True,
        address: Tensor | None = None,
    ) -> SwinOutput:  # fmt: skip
        layout = CellLayout(self.grid(image), self.backbone.coarse_stride, mask, *indices, whole=False)
        tokens = self.backbone(self.backbone.tokenize(image, layout, mask), tables)
        return SwinOutput(self.backbone.head(tokens) if head else None, tokens.x, tokens.count)

    def tokens(self, grid: ScaleGrid, batch: int, out: SwinOutput) -> TokenBatch:
        layout = last_layout(grid, batch, len(self.backbone.host.layers), out.x.device)
        return TokenBatch(out.x, replace(layout, initial_count=out.initial_count))
