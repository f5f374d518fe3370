"""Encoders: everything after the gate as a function of tensors, for a fixed number of slots.

    indices = encoder.pack_indices(mask, sample, grid, slots, min_slots)   # which tokens run: not compiled, no wait
    output = encoder(image, mask, indices, tables, full, head=True)        # compiled once for any number of slots
    encoder.tokens(grid, batch, output)                                    # the TokenBatch that every model returns

What an encoder takes and returns are records of tensors: a graph keeps them, and copies what it returns field by field.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msvit.backbones.base import Backbone
from msvit.execution.attention import choose_backend
from msvit.execution.layout import (
    num_tokens,
    pack_indices,
    pack_with_inactive,
    packed_layout,
    slot_weights,
)
from msvit.fast.find_kernels import runs_kernels
from msvit.fast.training_blocks import can_add_norms, run_training_blocks
from msvit.reduction import Reducer
from msvit.tokens.patches import gather_pixels
from msvit.tokens.tokenizer import embed, tokenize
from msvit.types import Layout, ScaleGrid, TokenBatch


class PlainTables(NamedTuple):
    """Tables computed from weights beforehand."""

    rotary: Tensor | None = None  # (ids, 2 head_dim)
    start: Tensor | None = None  # (ids, d), of fused blocks: what tokens start from


class SlotIndices(NamedTuple):
    """The token id and image of each slot, and where images begin."""

    token: Tensor  # (slots,) ids
    image: Tensor  # (slots,)
    cu_seqlens: Tensor  # (b + 1,)


class PlainOutput(NamedTuple):
    """Output of a `PlainEncoder`: logits if there is a head, and all of a TokenBatch that is a tensor."""

    logits: Tensor | None
    x: Tensor
    weight: Tensor
    token: Tensor
    image: Tensor
    cu_seqlens: Tensor
    patch_to_slot: Tensor | None = None  # after a reduction
    size: Tensor | None = None
    decisions: Tensor | None = None  # (4, b, hc, wc), where the gate is in the same graph


class Encoder(nn.Module):
    """Base class of encoders of all hosts."""

    backbone: Any
    trains = True  # whether it can be captured with its backward
    has_regions = True  # whether its blocks can be compiled by themselves
    has_static_sizes = False  # whether it is compiled anew for every image size
    adds_norms = False  # in training: whether sums and norms are one kernel, where `can_add_norms`

    def __init__(
        self, backbone: Backbone, coarse: int, reducer: Reducer | None = None, mode: str = "packed"
    ) -> None:
        super().__init__()
        self.backbone, self.coarse, self.reducer, self.mode = backbone, coarse, reducer, mode
        self.head_dims = backbone.head_dims  # used in every call

    def attention_reason(self, dtype: torch.dtype, backends: tuple[str, ...]) -> str | None:
        """Return why attention runs by none of these backends, whose launches do not depend on the number of tokens."""
        for dim in self.head_dims:
            if (backend := choose_backend(dtype, dim, cuda=True)) not in backends:
                need = " or ".join(backends)
                return f"attention of {dim} channels per head in {dtype} runs by {backend}, but graphs need {need}"
        return None

    def grid(self, image: Tensor) -> ScaleGrid:
        """Return the grid of such images."""
        return ScaleGrid(image.shape[2], image.shape[3], fine=self.backbone.fine, coarse=self.coarse)


class PlainEncoder(Encoder):
    """The encoder of a ViT and other hosts of one scale. A slot is a token, some (trimmed, masked) of weight 0."""

    def unsupported_reason(self, dtype: torch.dtype) -> str | None:
        """Return why the encoder cannot be captured as a CUDA graph, None if it can be."""
        host = self.backbone.host
        if host.grad_checkpointing:
            return "gradient checkpointing is on, which CUDA graphs cannot hold"
        if self.backbone.draws_positions:
            return "the host draws random positions in every training step, which CUDA graphs cannot hold"
        if getattr(host, "distilled_training", False) and host.training:
            return "distilled training is on, in which the host returns two outputs"
        if self.mode != "packed" and self.reducer is not None:
            return f"with a reducer packed inference is compiled, and the mode is {self.mode}"
        return self.attention_reason(dtype, ("triton",) if self.mode != "packed" else ("triton", "varlen"))

    def slots(self, batch: int, num_fine: int, grid: ScaleGrid) -> int:
        """Return the slots needed for so many fine cells; in mode trimmed each image has those of the longest."""
        if self.mode == "masked":
            return batch * (self.backbone.num_prefix + grid.num_ids)
        return num_tokens(batch, num_fine, grid, self.backbone.num_prefix)

    def tables(self, grid: ScaleGrid) -> PlainTables:
        """Compute rotary positions. Position embeddings are cheap, and computed per call."""
        if self.reducer is not None:
            self.reducer.precompute(len(self.backbone.host.blocks), grid)
        return PlainTables(self.backbone.rotary(grid))

    def table_sources(self) -> list[Tensor]:
        """Return the weights and buffers that `tables` are made of, and anew when one of these is written."""
        return self.backbone.rotary_sources()

    def pack_indices(self, mask: Tensor, sample: Tensor, grid: ScaleGrid, slots: int, min_slots: int) -> SlotIndices:
        """Return the layout of a batch in `slots` slots. `sample`: the soft decisions, by which mode trimmed sorts."""
        if self.mode == "packed":
            return SlotIndices(*pack_indices(mask, grid, self.backbone.num_prefix, slots))
        return SlotIndices(*pack_with_inactive(self.mode, mask, sample, grid, self.backbone.num_prefix, slots))

    def takes_address(self, image: Tensor) -> bool:
        """Return whether such images can be read by their address."""
        return runs_kernels(image) and image.dtype is not torch.float64

    def forward(
        self, image: Tensor, mask: Tensor, indices: SlotIndices, tables: PlainTables, full: bool, head: bool = True,
        address: Tensor | None = None,
    ) -> PlainOutput:  # fmt: skip
        """Run embedding, blocks and head on these slots. `full`: all cells are fine and no slot is padding."""
        token, which, cu_seqlens = indices
        grid, num_prefix, inactive = self.grid(image), self.backbone.num_prefix, self.mode != "packed"
        weight = slot_weights(mask, grid, num_prefix, token, which, None if full else cu_seqlens, not inactive)
        layout = packed_layout(grid, num_prefix, token, which, weight, cu_seqlens, not full, inactive)
        tokens = self.encode(self.tokenize(image, layout, mask, tables, address), tables)
        logits = self.backbone.head(tokens) if head else None
        last = tokens.layout
        if self.reducer is None:
            return PlainOutput(logits, tokens.x, weight, *indices)
        arrays = (last.weight, last.token, last.image, last.cu_seqlens)
        return PlainOutput(logits, tokens.x, *arrays, patch_to_slot=last.owner, size=last.size)

    def tokenize(
        self, image: Tensor, layout: Layout, mask: Tensor, tables: PlainTables, address: Tensor | None
    ) -> TokenBatch:
        """Embed the tokens of the layout, of the images at `address` if one is given."""
        start = self.backbone.make_token_table(layout.grid)  # (ids, d), from the weights as they are now
        if address is None:
            return tokenize(image, layout, self.backbone, start, mask)

        def pixels_of(which: Tensor, patch: Tensor) -> Tensor:
            return gather_pixels(image, which, patch, layout.grid, address)

        return embed(layout, self.backbone, start, mask, pixels_of)

    def encode(self, tokens: TokenBatch, tables: PlainTables) -> TokenBatch:
        """Run all blocks and the last norm."""
        if self.adds_norms and can_add_norms(self.backbone.host, tokens.x):
            return run_training_blocks(self.backbone.host, tokens)
        return self.backbone(tokens, tables.rotary, self.reducer)

    def tokens(self, grid: ScaleGrid, batch: int, out: PlainOutput) -> TokenBatch:
        """Return the TokenBatch of an output."""
        num_prefix, arrays = self.backbone.num_prefix, (out.token, out.image, out.weight, out.cu_seqlens)
        layout = packed_layout(grid, num_prefix, *arrays, True, self.mode != "packed", out.size)
        if self.reducer is not None:
            left = self.reducer.max_left(len(self.backbone.host.blocks) - 1, grid)
            layout = replace(layout, max_len=num_prefix + left, patch_to_slot=out.patch_to_slot)
        return TokenBatch(out.x, layout)
