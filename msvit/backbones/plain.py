"""Hosts of one scale, such as ViT: positions, blocks and head, for tokens of mixed scale."""

from functools import partial
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from msvit.backbones.base import Backbone, Recorder
from msvit.backbones.blocks import RunBlock, block_macs, run_eager_block, unsupported_block
from msvit.execution import MODES, packed
from msvit.execution.layout import check_not_traced
from msvit.gates import Gate
from msvit.heads.classify import check_pooling, classify, head_macs, unsupported_head
from msvit.reduction import Reducer
from msvit.shapes import Bool, Float, Int
from msvit.tokens import dense_map
from msvit.tokens.patches import coarse_positions
from msvit.tokens.tokenizer import tokenize
from msvit.types import GateOutput, Layout, ScaleGrid, TokenBatch, check_scales


class PlainBackbone(Backbone):
    """Base class of adapters for hosts of one scale: every block gets all active tokens, fine and coarse.

    What the adapter of a family has besides:

        serves(host)         # whether it can run the host, by its class
        prefix()             # the host's prefix tokens, (1, n, d) each, in its order
        make_rotary(grid)    # `rotary`, of hosts that have such positions
    """

    modes = tuple(MODES)

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        self.num_prefix = self.host.num_prefix_tokens

    def _unsupported_reasons(self) -> list[str | None]:
        drop = getattr(self.host.patch_drop, "prob", 0)
        dropped = f"patch dropout ({drop}) removes tokens; build it with patch_drop_rate=0" if drop else None
        blocks = map(unsupported_block, self.host.blocks)
        return [*super()._unsupported_reasons(), dropped, *blocks, unsupported_head(self.host)]

    def default_coarse(self, gate: Gate | None) -> int:
        """Return the side of a cell in px, where `convert` was given none: of a Swin the gate's, else two patches."""
        return 2 * self.fine

    def check_coarse(self, coarse: int) -> None:
        """Raise ValueError unless cells of this size fit the host's scales."""
        check_scales(self.fine, coarse)

    @property
    def blocks(self) -> nn.Module:
        """The transformer blocks of the host; of a Swin, its stages."""
        return self.host.blocks

    @property
    def head_dims(self) -> set[int]:
        """All values of head_dim that occur in the host's attention."""
        dims = {block.attn.proj.in_features // block.attn.num_heads for block in self.host.blocks}
        pool = getattr(self.host, "attn_pool", None)
        return dims if pool is None else dims | {pool.kv.out_features // 2 // pool.num_heads}

    def rotary(self, grid: ScaleGrid) -> Tensor | None:
        """Return (ids, 2 head_dim), sine and cosine of each token's place, or None."""
        if getattr(self.host, "rope", None) is None:
            return None
        if self.draws_positions:
            return self.make_rotary(grid)
        return self._cached(("rotary", grid), self.rotary_sources(), lambda: self.make_rotary(grid), constant=True)

    def rotary_sources(self) -> list[Tensor]:
        """Return the buffers that `rotary` is made of."""
        rope = getattr(self.host, "rope", None)
        return [] if rope is None else list(rope.buffers())

    def token_table(self, grid: ScaleGrid) -> Tensor:
        """Return (ids, d): prefix tokens, positions of cells, positions of patches."""
        sources = [p for p in (self.host.pos_embed, *self.prefix()) if p is not None]
        return self._cached(("token_table", grid), sources, lambda: self.make_token_table(grid))

    def make_token_table(self, grid: ScaleGrid) -> Tensor:
        """Compute `token_table` from the weights as they are now."""
        like = self.host.patch_embed.proj.weight
        prefix = torch.cat([token[0] for token in self.prefix()] or [like.new_zeros(0, like.shape[0])])
        positions = self.positions(grid)
        if positions is None:
            return torch.cat([prefix, like.new_zeros(grid.num_ids, like.shape[0])])
        shared = positions.shape[0] - grid.num_patches  # prefix tokens with positions of their own
        fine = positions[shared:]
        return torch.cat([prefix[:shared] + positions[:shared], prefix[shared:], coarse_positions(fine, grid), fine])

    def positions(self, grid: ScaleGrid) -> Tensor | None:
        """Return positions (n, d) of the first prefix tokens and of the patches, resized as the host does, or None."""
        if self.host.pos_embed is None:
            return None
        shared = 0 if self.host.no_embed_class else self.num_prefix
        old, new = list(self.native_patches), list(grid.patches)
        return resample_abs_pos_embed(self.host.pos_embed, new_size=new, old_size=old, num_prefix_tokens=shared)[0]

    def make_layout(
        self, gate: GateOutput, grid: ScaleGrid, mode: str, max_tokens: int | None = None
    ) -> Layout:
        """Return which tokens run. With `max_tokens`, in which all must fit, its length is fixed: no device sync."""
        if max_tokens is None:
            return MODES[mode](gate, grid, self.num_prefix)
        return packed(gate, grid, self.num_prefix, slots=max_tokens)

    def tokenize(self, image: Tensor, layout: Layout, mask: Tensor) -> TokenBatch:
        """Embed the tokens of the layout, and no others; with NaN in images where the mask has NaN."""
        return tokenize(image, layout, self, mask=mask)

    def forward(
        self, tokens: TokenBatch, rotary: Tensor | None = None, reducer: Reducer | None = None
    ) -> TokenBatch:
        """Run all blocks and the last norm. `rotary`: what `self.rotary` returns, if computed already."""
        tokens = self.run_blocks(tokens, rotary, reducer)
        return tokens.with_x(self.host.norm(tokens.x))

    def run_blocks(
        self, tokens: TokenBatch, rotary: Tensor | None = None, reducer: Reducer | None = None,
        record: Recorder | None = None, run: RunBlock = run_eager_block,
    ) -> TokenBatch:  # fmt: skip
        """Run all blocks, no last norm. `record` is called after each block, and ends the run by returning True."""
        host, start = self.host, tokens.layout
        if reducer is not None and not reducer.can_be_traced:
            check_not_traced(f"the reducer {type(reducer).__name__}", "use model.with_options(reducer=None)")
        rotary = self.rotary(start.grid) if rotary is None else rotary  # (ids, 2 head_dim)
        tokens = tokens.with_x(host.norm_pre(host.pos_drop(tokens.x)))
        tokens = tokens if reducer is None else reducer.begin(tokens)
        rotary_layout, slot_rotary = None, None
        for index, block in enumerate(host.blocks):
            tokens = tokens if reducer is None else reducer.before(index, tokens, start)
            if rotary is not None and tokens.layout is not rotary_layout:
                rotary_layout, slot_rotary = tokens.layout, rotary[tokens.layout.token]  # (slots, 2 head_dim)
            reduce = None
            if reducer is not None and reducer.acts_between(index):
                reduce = partial(reducer.between, index, start)
            if host.grad_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(run, block, tokens, slot_rotary, reduce, use_reentrant=False)
            else:
                tokens = run(block, tokens, slot_rotary, reduce)
            if record is not None and record(index, tokens):
                break
        return tokens

    def head(self, tokens: TokenBatch, pre_logits: bool = False) -> Any:
        """Run the host's own head on these tokens; with `pre_logits` return what its classifier is given."""
        return classify(self.host, tokens, pre_logits)

    def head_of_features(self, features: Tensor, pre_logits: bool, all_fine: bool, reduced: bool) -> Tensor:
        """Run the host's own head on what `features` returns. Raise ValueError unless that is `head` of the tokens."""
        check_pooling(self.host, all_fine, reduced)
        return self.host.forward_head(features, pre_logits=pre_logits)

    def features(self, tokens: TokenBatch) -> Float[Tensor, "b n d"]:
        """Return the tokens after the last norm in the format of the host's `forward_features`."""
        return torch.cat([tokens.prefix, dense_map(tokens).flatten(2).transpose(1, 2)], dim=1)

    def intermediates(
        self, tokens: TokenBatch, record: Recorder, norm: bool, final: bool, reducer: Reducer | None = None
    ) -> tuple[Tensor | None, list[tuple[Tensor, Tensor]]]:
        """Return `features` after the last block, if `final`, and (b, p, d) and (b, d, h, w) after each block recorded.

        `tokens` are those of `tokenize`; `norm`: apply the last norm to all, as far as the host does.
        """
        last = self.run_blocks(tokens, reducer=reducer, record=record)
        taken = [t.with_x(self.host.norm(t.x)) if norm else t for t in record.taken]
        features = self.features(last.with_x(self.host.norm(last.x))) if final else None
        return features, [(t.prefix, dense_map(t).contiguous()) for t in taken]

    def check_classifier(self, global_pool: str) -> None:
        known = ("token", "avg") if getattr(self.host, "attn_pool", None) is None else ("map",)
        if global_pool not in known:
            raise ValueError(
                f"global_pool is {global_pool!r}, but the head of this {type(self.host).__name__} can pool tokens of "
                f"mixed scale by {' or '.join(map(repr, known))} only; leave global_pool out to keep the host's own"
            )

    def head_macs(self, total: Tensor) -> Tensor:
        """Return the multiply-adds of the head for images of `total` tokens, prefix included."""
        return head_macs(self.host, total)

    def num_tokens(self, num_fine: Int[Tensor, "*b"], grid: ScaleGrid) -> Int[Tensor, "*b"]:
        """Return the tokens of images with so many fine cells, prefix not counted."""
        return grid.num_cells + (grid.k**2 - 1) * num_fine

    def num_macs(
        self, fine: Bool[Tensor, "b hc wc"], grid: ScaleGrid, reducer: Reducer | None = None, head: bool = True
    ) -> Int[Tensor, " b"]:
        """Return the multiply-adds of embedding, blocks and (with `head`) head for images with these fine cells."""
        initial = current = self.num_tokens(fine.flatten(1).sum(1), grid)
        prefix = self.num_prefix
        macs = initial * self.host.patch_embed.proj.weight.numel()
        for index, block in enumerate(self.host.blocks):
            kept = current if reducer is None else reducer.num_kept(index, current, initial)
            attending = kept if reducer is not None and reducer.acts_before else current  # in attention
            macs = macs + block_macs(block, attending + prefix, kept + prefix)
            if reducer is not None:
                macs = macs + reducer.num_macs(index, current, prefix)
            current = kept
        return macs + self.head_macs(current + prefix) if head else macs
