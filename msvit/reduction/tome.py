"""ToMe (Bolya et al., 2023): merge tokens that are alike, block by block.

    match = bipartite_matching(keys, num_tokens, num_merged, max_merged, num_prefix)   # pairs, by similarity of keys
    merge(tokens, match), and the dense map of what comes out is the unmerging
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.checks import check_int
from msvit.fast.find_kernels import kernels
from msvit.fast.regions import compile_region
from msvit.reduction.base import Count, Ratio, Reducer, as_ratio, at_least, check_rate, share_of
from msvit.reduction.compact import Rows, compact, max_slots, with_owners
from msvit.shapes import Bool, Float, Int
from msvit.types import Heads, Layout, PackedLayout, TokenBatch, changed


@dataclass(frozen=True)
class Match:
    """Pairs of tokens of each image that are merged, the most alike first, by position in the image."""

    source: Int[Tensor, "b r"]
    target: Int[Tensor, "b r"]
    merged: Bool[Tensor, "b r"]  # an image may merge fewer than the most of the batch


class ToMe(Reducer):
    """A reducer that merges `r` tokens of an image, or all but `rate` of them, in every block, before its MLP.

    `r` may be a sequence with a number for each block: `msvit.fit_reducer` finds one by images.

    Tokens are taken alternately into two sets; each of the first finds the most alike of the second, by the keys of the
    attention just run, and the r best pairs become their mean, weighted by the patches they cover. A merged token
    counts in attention as often as those it was made of together, coarse ones k*k times. No more than half of an
    image's tokens are merged in one block.
    """

    search: Any = None  # of `msvit.fit_reducer`: how the schedule was found; not saved

    def __init__(self, r: int | Sequence[int] | None = None, rate: float | None = None) -> None:
        if (r is None) == (rate is None):
            raise ValueError(f"r is {r} and rate is {rate}, but ToMe needs one of them; pass r=13 or rate=0.95")
        if isinstance(r, list | tuple) and r:
            r = tuple(check_int(f"r[{index}]", num, at_least=0, example=13) for index, num in enumerate(r))
        elif r is not None:
            r = check_int("r", r, at_least=0, example=13)
        super().__init__(r=r, rate=None if rate is None else check_rate(rate, lowest=0.5))
        self.r = r
        self.rate = None if rate is None else as_ratio(rate)

    def begin(self, tokens: TokenBatch) -> TokenBatch:
        """Set the size of each token, and in padded layouts move active tokens to the front."""
        layout, grid = tokens.layout, tokens.layout.grid
        if isinstance(self.r, int) and 2 * self.r > grid.num_patches:
            raise ValueError(
                f"r is {self.r}, but an image of {grid.height}x{grid.width}px has at most {grid.num_patches} tokens, "
                f"of which half can be merged in a block; pass at most r={grid.num_patches // 2}"
            )
        wide = torch.float64 if tokens.x.dtype is torch.float64 else torch.float32
        size = layout.area.clamp(min=1).to(wide)  # prefix tokens cover no patch, and count once
        tokens = changed(tokens, layout=changed(layout, size=size))
        if isinstance(layout, PackedLayout):
            return tokens
        position = (layout.valid.view(layout.batch, -1).long().cumsum(1) - 1).flatten()
        slots = torch.arange(layout.token.shape[0], device=position.device)
        return compact(tokens, layout.valid, slots, layout.max_len, len(slots), position)  # active ones first

    def num_kept(self, index: int, now: Count, first: Count) -> Count:
        return num_unmerged(now, self.num_merged(index), self.rate)

    def num_merged(self, index: int) -> int | None:
        """Return r of block `index`, counted from 0; None where a rate says how many."""
        return self.r[index] if isinstance(self.r, tuple) else self.r

    def num_macs(self, index: int, now: Tensor, num_prefix: int) -> Tensor:
        total = now + num_prefix
        pairs = (total - total // 2) * (total // 2)
        return pairs * self.head_dim if self.acts_between(index) else torch.zeros_like(now)

    def fit(self, host: Any) -> None:
        if isinstance(self.r, tuple) and len(self.r) != len(host.blocks):
            raise ValueError(
                f"r has {len(self.r)} numbers, but the host has {len(host.blocks)} blocks; pass one for each"
            )
        attn = host.blocks[0].attn
        self.head_dim = attn.proj.in_features // attn.num_heads

    def acts_between(self, index: int) -> bool:
        return self.num_merged(index) != 0 and self.rate != (1, 1)

    def between(self, index: int, start: Layout, tokens: TokenBatch, heads: Heads) -> TokenBatch:
        left = self.max_left(index, start.grid)
        max_merged = self.max_left(index - 1, start.grid) - left
        max_kept, max_len = self.max_kept(index, start), start.num_prefix + left
        tokens = with_owners(tokens)
        if can_fuse(tokens, heads.k):
            return merge_fused(tokens, heads.k, self.num_merged(index), self.rate, max_len, max_kept)
        return merge_alike(tokens, heads.k, self.num_merged(index), self.rate, max_merged, max_len, max_kept)


def num_unmerged(now: Count, r: int | None, rate: Ratio | None) -> Count:
    """Return how many of `now` tokens are left after merging r, or all but the rate; at least half."""
    fewer = now - (r or 0) if rate is None else share_of(now, rate)
    return at_least(fewer, now - now // 2)


def can_fuse(tokens: TokenBatch, keys: Float[Tensor, "slots heads head_dim"]) -> bool:
    """Return whether `merge_fused` takes them: on a GPU, packed, active ones only, and without gradients."""
    layout = tokens.layout
    if kernels is None or not tokens.x.is_cuda or not isinstance(layout, PackedLayout) or layout.has_inactive:
        return False
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (tokens.x, keys, layout.weight))
    return not needs_grad and kernels.can_merge(tokens.x.dtype, keys, layout.max_len)


def merge_fused(
    tokens: TokenBatch, keys: Float[Tensor, "slots heads head_dim"], r: int | None, rate: Ratio | None,
    max_len: int, max_kept: int,
) -> TokenBatch:  # fmt: skip
    """Do what `merge_alike` does by our kernels, for packed tokens without gradients."""
    layout = tokens.layout
    assert isinstance(layout, PackedLayout)
    assert layout.size is not None, "begin gives sizes"
    slots, has_padding = max_slots(layout, max_len, max_kept)
    x, token, image, weight, size, cu_seqlens, owner = kernels.merge_tokens(
        tokens.x, keys, layout.token, layout.image, layout.weight, layout.size, layout.cu_seqlens,
        layout.owner, layout.num_prefix, -1 if r is None else r, *(rate or (1, 1)), layout.max_len, slots,
    )  # fmt: skip
    smaller = changed(
        layout,
        token=token,
        image=image,
        weight=weight,
        cu_seqlens=cu_seqlens,
        max_len=max_len,
        has_padding=has_padding,
        size=size,
        patch_to_slot=owner,
    )
    return changed(tokens, x=x, layout=smaller)


@compile_region
def merge_alike(
    tokens: TokenBatch, keys: Float[Tensor, "slots heads head_dim"], r: int | None, rate: Ratio | None,
    max_merged: int, max_len: int, max_kept: int,
) -> TokenBatch:  # fmt: skip
    """Merge as one block does, at most `max_merged` tokens of an image."""
    layout, rows = tokens.layout, Rows(tokens.layout)
    if rows.width < 2:  # one token, and none to merge it with
        return tokens
    num_tokens = rows.spread(layout.valid, False).sum(1)  # (b,)
    count = num_tokens - layout.num_prefix
    metric = rows.spread(F.normalize(keys.mean(1), dim=-1), 0)
    match = bipartite_matching(metric, num_tokens, count - num_unmerged(count, r, rate), max_merged, layout.num_prefix)
    return merge(tokens, rows, match, num_tokens, max_len, max_kept)


@torch.no_grad()
def bipartite_matching(
    metric: Float[Tensor, "b n d"], num_tokens: Int[Tensor, " b"], num_merged: Int[Tensor, " b"], max_merged: int,
    prefix: int,
) -> Match:  # fmt: skip
    """Match each token at an even place with its most similar one at an odd place; keep each image's best pairs."""
    a, b = metric[:, ::2], metric[:, 1::2]
    similarity = torch.bmm(a, b.transpose(1, 2))  # (b, even, odd)
    place = torch.arange(metric.shape[1], device=metric.device)
    free = (place >= prefix) & (place < num_tokens[:, None])  # (b, n): prefix tokens neither go nor take
    similarity = similarity.masked_fill(~(free[:, ::2, None] & free[:, None, 1::2]), -torch.inf)
    best, partner = similarity.max(2)  # (b, even)
    first = best.argsort(dim=1, descending=True, stable=True)[:, :max_merged]
    merged = torch.arange(first.shape[1], device=first.device) < num_merged[:, None]
    return Match(source=2 * first, target=2 * partner.gather(1, first) + 1, merged=merged)


def merge(
    tokens: TokenBatch, rows: Rows, match: Match, num_tokens: Int[Tensor, " b"], max_len: int, max_kept: int
) -> TokenBatch:
    """Merge to means by size: prefix tokens first, then the rest of the first set, then the second, as published."""
    layout = tokens.layout
    assert layout.size is not None, "begin gives sizes"
    source, target = rows.slot(match.source).flatten(), rows.slot(match.target).flatten()
    is_merged = match.merged.flatten()
    source_size = torch.where(is_merged, layout.size[source], 0)
    size = layout.size.index_add(0, target, source_size)
    kept_share, share = (t[:, None].to(tokens.x.dtype) for t in (layout.size / size, source_size / size[target]))
    slots = torch.arange(layout.token.shape[0], device=layout.token.device)
    leaving = torch.where(is_merged, source, len(slots))  # the others: one entry past the end
    merged_into = F.pad(slots, (0, 1)).scatter(0, leaving, target)[:-1]
    removed = merged_into != slots
    position = rows.collect(_order(rows, ~rows.spread(removed, False), num_tokens))
    scaled = changed(tokens, x=tokens.x * kept_share, layout=changed(layout, size=size))
    compacted = compact(scaled, ~removed & layout.valid, merged_into, max_len, max_kept, position)
    # What goes is added in the new places, where there are fewer; to a pair that is not merged nothing is.
    place = compacted.layout.cu_seqlens[layout.image[target]] + position[target]
    place = place.clamp(max=compacted.x.shape[0] - 1)
    return compacted.with_x(compacted.x.index_add(0, place, tokens.x[source] * share))


def _order(rows: Rows, stays: Bool[Tensor, "b n"], num_tokens: Int[Tensor, " b"]) -> Int[Tensor, "b n"]:
    """The new position of each token that stays."""
    prefix = rows.layout.num_prefix
    place = torch.arange(rows.width, device=stays.device)
    first = stays & (place >= prefix) & (place % 2 == 0) & (place < num_tokens[:, None])
    second = (place >= prefix) & (place % 2 == 1) & (place < num_tokens[:, None])
    num_first = first.sum(1, keepdim=True)
    position = torch.where(first, prefix + first.long().cumsum(1) - 1, place)
    return torch.where(second, prefix + num_first + second.long().cumsum(1) - 1, position)
