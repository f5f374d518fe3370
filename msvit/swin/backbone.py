"""timm's Swin and SwinV2: fine cells go the host's own way, coarse cells skip its early blocks (section 4.2.3).

A "block" l of the paper is one of the host's stages, l = 1, 2, ...; its tokens cover 4 * 2^(l-1) px. A coarse cell
enters block `merge_at` through one linear embedding of its pixels. Before it only tokens of fine cells exist; from
there on every token does, and the host runs as ever.
"""

from dataclasses import dataclass
from functools import partial

import torch
from timm.layers import ClassifierHead
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from msvit.backbones.base import Backbone, Recorder, keeps_forward_of
from msvit.caching import cache_by_size
from msvit.checks import check_int
from msvit.gates import Gate
from msvit.reduction import Reducer
from msvit.shapes import Bool, Float, Int
from msvit.swin.blocks import (
    bias_sources,
    position_bias,
    run_swin_block,
    swin_block_macs,
    unsupported_stage,
)
from msvit.swin.cells import CELL_MODES, CellLayout, Places, every_place, join, packed_cells, pixels_of, spread
from msvit.swin.windows import Finder
from msvit.tokens.patches import cut_patches
from msvit.tokens.tokenizer import nan_or_zero
from msvit.types import GateOutput, Layout, PaddedLayout, ScaleGrid, TokenBatch, changed

MERGE_AT = 3  # the block at which coarse tokens enter, if none is given


@dataclass(frozen=True)
class CellTokens:
    """Embedded tokens: fine ones, the input of the first stage, and coarse ones, which enter stage `merge_at`."""

    fine: Float[Tensor, "slots d"]
    coarse: Float[Tensor, "tokens e"]
    layout: CellLayout


class TimmSwin(Backbone):
    """The adapter of timm's Swin and SwinV2."""

    modes = tuple(CELL_MODES)
    merge_at: int
    is_hierarchical = True

    def __init__(self, host: nn.Module, merge_at: int | None = None) -> None:
        super().__init__(host)
        num_blocks = len(self.host.layers)
        self.merge_at = min(MERGE_AT, num_blocks) if merge_at is None else check_int("merge_at", merge_at)
        if not 2 <= self.merge_at <= num_blocks:
            raise ValueError(
                f"merge_at is {self.merge_at}, but this host has blocks 1 to {num_blocks} and coarse cells must skip "
                f"at least one; pass merge_at from 2 to {num_blocks}"
            )
        self.coarse_stride = self.fine * 2 ** (self.merge_at - 1)  # px
        weight = self.host.patch_embed.proj.weight
        width = self.host.layers[self.merge_at - 1].blocks[0].attn.proj.out_features
        num_pixels = self.in_chans * self.coarse_stride**2
        self.embed_coarse = nn.Linear(num_pixels, width, device=weight.device, dtype=weight.dtype)
        nn.init.trunc_normal_(self.embed_coarse.weight, std=0.02)
        nn.init.zeros_(self.embed_coarse.bias)

    @classmethod
    def serves(cls, host: nn.Module) -> bool:
        return keeps_forward_of(host, SwinTransformer) or keeps_forward_of(host, SwinTransformerV2)

    def _unsupported_reasons(self) -> list[str | None]:
        head = type(self.host.head)
        known = None if head is ClassifierHead else f"its head is a {head.__name__}, which is not supported"
        flat = "it has one stage, so there is nothing to skip" if len(self.host.layers) < 2 else None
        return [*super()._unsupported_reasons(), *map(unsupported_stage, self.host.layers), known, flat]

    def default_coarse(self, gate: Gate | None) -> int:
        return self.coarse_stride if gate is None else gate.coarse

    def check_coarse(self, coarse: int) -> None:
        check_int("coarse", coarse, example=self.coarse_stride)
        if coarse < self.coarse_stride or coarse % self.coarse_stride:
            raise ValueError(
                f"cells are {coarse}px, but coarse tokens enter block {self.merge_at}, where a token covers "
                f"{self.coarse_stride}px; give a gate with cells of {self.coarse_stride}px or a multiple of it, "
                f"or another merge_at"
            )

    def check_reducer(self, reducer: Reducer) -> None:
        raise ValueError(
            f"{type(reducer).__name__} takes tokens away one by one, but windows and merging of a "
            f"{type(self.host).__name__} need whole cells; leave reducer out, or use a ViT"
        )

    @property
    def blocks(self) -> nn.Module:
        return self.host.layers

    @property
    def head_dims(self) -> set[int]:
        attentions = (block.attn for stage in self.host.layers for block in stage.blocks)
        return {attn.proj.in_features // attn.num_heads for attn in attentions}

    def sizes(self, grid: ScaleGrid) -> list[tuple[int, int]]:
        """Return rows and columns of each block's tokens. An odd row or column is merged with zeros, as in the host."""
        sizes = [grid.patches]
        for _ in self.host.layers[1:]:
            sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
        return sizes

    def make_layout(
        self, gate: GateOutput, grid: ScaleGrid, mode: str, max_tokens: int | None = None
    ) -> CellLayout:
        if max_tokens is None:
            return CELL_MODES[mode](gate, grid, self.coarse_stride)
        batch = gate.mask.shape[0]
        min_tokens, per_cell = self._token_steps(grid)
        num_fine = min((max_tokens - batch * min_tokens) // per_cell, batch * grid.num_cells)
        return packed_cells(gate, grid, self.coarse_stride, capacity=(num_fine, batch * min_tokens))

    def tokenize(self, image: Tensor, layout: CellLayout, mask: Tensor) -> CellTokens:
        cells = pixels_of(image, layout.fine, layout.grid.coarse)  # (cells, c, s, s)
        patches = cut_patches(cells, self.fine)  # (cells, side side, c p p), in raster order
        order = layout.places(self.fine).rank.flatten().argsort()
        fine = self.project(patches[:, order].flatten(0, 1))
        coarse = self.embed_coarse(pixels_of(image, layout.coarse, self.coarse_stride).flatten(1)).to(fine.dtype)
        marks = nan_or_zero(mask).to(fine.dtype)[layout.coarse // layout.token[0].numel()]  # a NaN cell is coarse
        return CellTokens(fine=fine, coarse=coarse + marks[:, None], layout=layout)

    def biases(self) -> list[Tensor]:
        """Return the position bias of every attention, in order."""
        biases = []
        for index, stage in enumerate(self.host.layers):
            for number, block in enumerate(stage.blocks):
                make = partial(position_bias, block.attn)
                biases.append(self._cached(("bias", index, number), bias_sources(block.attn), make))
        return biases

    def forward(
        self, tokens: CellTokens, biases: list[Tensor] | None = None, reducer: Reducer | None = None
    ) -> TokenBatch:
        """Run all stages and the last norm. `biases`: what `self.biases` returns, if computed already. No reducer."""
        return self._normed(self.run_stages(tokens, biases), tokens.layout)

    def _normed(self, x: Float[Tensor, "slots d"], layout: CellLayout) -> TokenBatch:
        last = last_layout(layout.grid, layout.batch, len(self.host.layers), x.device)
        initial_count = self.num_tokens((layout.mask.detach() > 0.5).flatten(1).sum(1), layout.grid)
        return TokenBatch(self.host.norm(x), changed(last, initial_count=initial_count))

    def run_stages(
        self, tokens: CellTokens, biases: list[Tensor] | None = None, record: Recorder | None = None
    ) -> Float[Tensor, "slots d"]:
        """Run all stages, no last norm. `record` is called after each stage, and ends the run by returning True."""
        layout, x = tokens.layout, tokens.fine
        bias = iter(self.biases() if biases is None else biases)
        sizes = self.sizes(layout.grid)
        for index, stage in enumerate(self.host.layers):
            if index:
                x = merge(stage.downsample, x, layout.batch, sizes[index - 1] if index >= self.merge_at else None)
            if index + 1 == self.merge_at:
                x = join(x, tokens.coarse, layout).flatten(0, 2)  # (b rows columns, d)
            finder = Finder(self._places(index, layout, sizes))
            for block in stage.blocks:
                if stage.grad_checkpointing and torch.is_grad_enabled():
                    x = checkpoint(run_swin_block, block, x, finder, next(bias), use_reentrant=False)
                else:
                    x = run_swin_block(block, x, finder, next(bias))
            if record is not None and record(index, self._map(index, x, layout)):
                break
        return x

    def _places(self, index: int, layout: CellLayout, sizes: list[tuple[int, int]]) -> Places:
        if index + 1 < self.merge_at:
            return layout.places(self.fine * 2**index)
        return every_place(layout.batch, *sizes[index], layout.mask.device)

    def _map(self, index: int, x: Float[Tensor, "slots d"], layout: CellLayout) -> Float[Tensor, "b rows columns d"]:
        """The tokens of a stage as a map; 0 in coarse cells before their tokens enter."""
        size = self.sizes(layout.grid)[index]
        if index + 1 >= self.merge_at:
            return x.view(layout.batch, *size, -1)
        places = layout.places(self.fine * 2**index)
        slot = torch.where(spread(layout.mask.detach() > 0.5, places.side), places.map, -1)
        return torch.cat([x, x.new_zeros(1, x.shape[1])])[slot]

    def head(self, tokens: TokenBatch, pre_logits: bool = False) -> Tensor:
        return self.host.forward_head(self.features(tokens), pre_logits=pre_logits)

    def head_of_features(self, features: Tensor, pre_logits: bool, all_fine: bool, reduced: bool) -> Tensor:
        return self.host.forward_head(features, pre_logits=pre_logits)

    def features(self, tokens: TokenBatch) -> Float[Tensor, "b rows columns d"]:
        return tokens.x.view(tokens.layout.batch, *self.sizes(tokens.layout.grid)[-1], -1)

    def intermediates(
        self, tokens: CellTokens, record: Recorder, norm: bool, final: bool, reducer: Reducer | None = None
    ) -> tuple[Tensor | None, list[tuple[Tensor, Tensor]]]:
        """Return features and the maps recorded. The last norm fits the last stage alone, and applies to no other."""
        x = self.run_stages(tokens, record=record)
        last = len(self.host.layers) - 1
        if final and record.stop_early and last not in record.indices:
            raise ValueError(
                f"stages after {max(record.indices)} are not run, so there are no features of the last one; "
                "pass intermediates_only=True or stop_early=False"
            )
        taken = record.taken
        if norm and last in record.indices:
            taken = [*taken[:-1], self.host.norm(taken[-1])]
        features = self.features(self._normed(x, tokens.layout)) if final else None
        return features, [(m.new_zeros(len(m), 0, m.shape[3]), m.permute(0, 3, 1, 2).contiguous()) for m in taken]

    def num_tokens(self, num_fine: Int[Tensor, "*b"], grid: ScaleGrid) -> Int[Tensor, "*b"]:
        return num_fine * grid.k**2 + (grid.num_cells - num_fine) * (grid.coarse // self.coarse_stride) ** 2

    def num_macs(
        self, fine: Bool[Tensor, "b hc wc"], grid: ScaleGrid, reducer: Reducer | None = None, head: bool = True
    ) -> Int[Tensor, " b"]:
        """Return multiply-adds of each image; position biases are not counted, as they are made once for all."""
        num_fine, sizes = fine.flatten(1).sum(1), self.sizes(grid)
        macs = num_fine * grid.k**2 * self.host.patch_embed.proj.weight.numel()
        num_coarse = (grid.num_cells - num_fine) * (grid.coarse // self.coarse_stride) ** 2
        macs = macs + num_coarse * self.embed_coarse.weight.numel()
        for index, stage in enumerate(self.host.layers):
            whole, side = fine.new_ones(fine.shape[0], *sizes[index]), grid.coarse // (self.fine * 2**index)
            merged = spread(fine, side) if index < self.merge_at else whole
            present = merged if index + 1 < self.merge_at else whole
            if index:
                macs = macs + merged.flatten(1).sum(1) * stage.downsample.reduction.weight.numel()
            for block in stage.blocks:
                macs = macs + swin_block_macs(block, present)
        fc = self.host.head.fc
        return macs + fc.weight.numel() if head and isinstance(fc, nn.Linear) else macs


def merge(
    downsample: nn.Module, x: Float[Tensor, "slots d"], batch: int, size: tuple[int, int] | None
) -> Float[Tensor, "merged e"]:
    """Merge four tokens into one: neighbours in the list, or on a map of this size."""
    around = (x.shape[0] // 4, 2, 2) if size is None else (batch, *size)
    return downsample(x.view(*around, x.shape[1])).flatten(0, 2)


@cache_by_size
def last_layout(grid: ScaleGrid, batch: int, num_blocks: int, device: torch.device) -> Layout:
    """Return the layout of the last block: all tokens are there, each covers a square of patches."""
    side = 2 ** (num_blocks - 1)
    rows, columns = (-(-num // side) for num in grid.patches)
    slots = torch.arange(batch * rows * columns, device=device)
    patches = torch.arange(grid.num_patches, device=device).view(grid.patches)
    patch_to_slot = spread(slots.view(batch, rows, columns), side)
    return PaddedLayout(
        grid=grid,
        num_prefix=0,
        batch=batch,
        token=grid.num_cells + patches[::side, ::side].flatten().repeat(batch),
        image=slots // (rows * columns),
        weight=torch.ones(batch * rows * columns, device=device),
        cu_seqlens=(torch.arange(batch + 1, device=device) * rows * columns).int(),
        max_len=rows * columns,
        patch_to_slot=patch_to_slot[:, : grid.patches[0], : grid.patches[1]].flatten(1),
    )
