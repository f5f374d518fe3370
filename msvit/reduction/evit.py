"""EViT (Liang et al., 2022): keep what the class token attends to, fuse the rest into one token."""

import math
from typing import Any

import torch
from torch import Tensor

from msvit.checks import check_flag
from msvit.execution.attention import key_weight
from msvit.execution.layout import take_rows
from msvit.fast.regions import compile_region
from msvit.reduction.base import Count, Ratio, Reducer, as_ratio, at_least, check_at, check_depth, check_rate, share_of
from msvit.reduction.compact import Rows, candidates, compact, rank, with_owners
from msvit.shapes import Float
from msvit.types import Heads, Layout, TokenBatch, changed

# In training the rate falls from 1 by a half cosine between these shares of the steps: epochs 10 to 110 of 300.
RATE_DECAY = (1 / 30, 11 / 30)


class EViT(Reducer):
    """A reducer by class attention: in each of the blocks `at`, before its MLP, ceil(rate * tokens) are kept.

    Which ones the class token's attention decides, the mean over heads. With `fuse` the others become one token, their
    sum weighted by that attention; it stands in the place of the strongest of them and covers all that they covered.
    Without it nothing covers them any more.
    """

    def __init__(self, rate: float = 0.7, at: tuple[int, ...] = (3, 6, 9), fuse: bool = True) -> None:
        super().__init__(rate=check_rate(rate), at=check_at(at), fuse=check_flag("fuse", fuse))
        self.final_rate = self.current_rate = as_ratio(rate)

    def fit(self, host: Any) -> None:
        check_depth("EViT", self.config["at"], host)
        needs_class_token("EViT", host, "use msvit.DynamicViT or msvit.ToMe")
        self.width: int = host.embed_dim

    @property
    def rate(self) -> Ratio:
        """The share kept now: in training it falls slowly to the rate asked for."""
        return self.current_rate if self.training else self.final_rate

    def at_progress(self, share: float) -> None:
        rate: float = self.config["rate"]
        done = min(max((share - RATE_DECAY[0]) / (RATE_DECAY[1] - RATE_DECAY[0]), 0.0), 1.0)
        self.current_rate = as_ratio(round(rate + (1 - rate) * (1 + math.cos(math.pi * done)) / 2, 4))

    def num_kept(self, index: int, now: Count, first: Count) -> Count:
        if index not in self.config["at"]:
            return now
        kept = at_least(share_of(now, self.rate), 1)
        return kept + (kept < now) if self.config["fuse"] else kept

    def num_macs(self, index: int, now: Tensor, num_prefix: int) -> Tensor:
        fuses = self.config["fuse"] and self.acts_between(index)
        return (now + num_prefix) * self.width if fuses else torch.zeros_like(now)

    def acts_between(self, index: int) -> bool:
        return index in self.config["at"] and self.rate != (1, 1)

    def between(self, index: int, start: Layout, tokens: TokenBatch, heads: Heads) -> TokenBatch:
        max_len = start.num_prefix + self.max_left(index, start.grid)
        return focus(with_owners(tokens), heads, self.rate, self.config["fuse"], max_len, self.max_kept(index, start))


@compile_region
def focus(tokens: TokenBatch, heads: Heads, rate: Ratio, fuse: bool, max_len: int, max_kept: int) -> TokenBatch:
    """Keep the share `rate` of each image that the class token attends to most, and fuse the rest or drop it."""
    layout, rows = tokens.layout, Rows(tokens.layout)
    attention = class_attention(heads, rows)  # (b, n)
    is_candidate = candidates(rows)
    order = rank(attention.detach().masked_fill(~is_candidate, -torch.inf))
    kept = at_least(share_of(is_candidate.sum(1, keepdim=True), rate), 1)  # (b, 1)
    rest = is_candidate & (order >= kept)  # (b, n)
    slots = torch.arange(layout.token.shape[0], device=layout.token.device)
    removed, merged_into = rows.collect(rest), torch.full_like(slots, -1)
    if fuse:
        strongest = rest & (order == kept)
        fusion_weight = attention.masked_fill(~rest, 0).to(tokens.x.dtype)
        with torch.autocast(fusion_weight.device.type, enabled=False):  # tokens stay as wide as they are
            fusion = (fusion_weight[:, None] @ rows.spread(tokens.x, 0))[:, 0]  # (b, d)
        fused = rows.collect(strongest) & layout.valid
        tokens = tokens.with_x(torch.where(fused[:, None], take_rows(fusion, layout.image), tokens.x))
        # Its weight is 1 whatever the gate decides about the token whose place it takes.
        weight = torch.where(fused, layout.weight.detach(), layout.weight)
        tokens = changed(tokens, layout=changed(layout, weight=weight))
        removed = removed & ~fused
        merged_into = rows.slot(strongest.int().argmax(1, keepdim=True))[layout.image, 0].long()
    return compact(tokens, ~removed, torch.where(removed, merged_into, slots), max_len, max_kept)


def needs_class_token(name: str, host: Any, remedy: str) -> None:
    """Raise ValueError unless the host has a class token."""
    if getattr(host, "cls_token", None) is None:
        raise ValueError(
            f"{name} goes by the class token's attention, but this {type(host).__name__} has no class token; "
            f"{remedy}, or build the host with class_token=True"
        )


def class_attention(heads: Heads, rows: Rows) -> Float[Tensor, "b n"]:
    """Return A_0j of Eq. 10, the mean over heads: one product of the class token with all keys."""
    layout = rows.layout
    q = take_rows(heads.q[layout.cu_seqlens[:-1].long()], layout.image)  # (slots, heads, head_dim)
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    score = (q.to(wide) * heads.k.to(wide)).sum(-1) * q.shape[-1] ** -0.5  # (slots, heads)
    weight = rows.spread(key_weight(layout).to(wide)[:, None], 0)  # (b, n, 1)
    score = rows.spread(score, 0)  # (b, n, heads)
    top = score.detach().masked_fill(weight < 0.5, -torch.inf).amax(1, keepdim=True)  # over active keys
    e = weight * (score - top).clamp(max=60).exp()
    return (e / e.sum(1, keepdim=True)).mean(-1)
