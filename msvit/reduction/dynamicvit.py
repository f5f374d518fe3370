"""DynamicViT (Rao et al., 2021): small trained predictors choose the tokens that are kept."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.execution.layout import take_rows
from msvit.fast.regions import compile_region
from msvit.gates.logits import straight_through
from msvit.output import MSViTOutput
from msvit.reduction.base import Count, Ratio, Reducer, as_ratio, at_least, check_at, check_depth, check_rate
from msvit.reduction.compact import Rows, candidates, compact, rank, with_owners
from msvit.shapes import Float, Int
from msvit.tokens import dense_map
from msvit.types import Layout, PackedLayout, TokenBatch, changed

RATIO, DISTILL = 2.0, 0.5  # weights of the losses, as published


class DynamicViT(Reducer):
    """A reducer with predictors: before each of the blocks `at`, one scores every token.

    At evaluation an image keeps the best rate, rate^2, rate^3, ... of the tokens it started with. In training all
    tokens run and the choice is drawn: one that is not kept has weight 0 in attention, with a straight-through
    gradient. The first policy is the gate's mask.
    """

    acts_before = True
    needs_teacher = True

    def __init__(self, rate: float = 0.7, at: tuple[int, ...] = (3, 6, 9)) -> None:
        super().__init__(rate=check_rate(rate), at=check_at(at))
        self.shares = [as_ratio(rate, stage + 1) for stage in range(len(self.config["at"]))]
        self.predictors = nn.ModuleList()  # made when the host's width is known

    def fit(self, host: Any) -> None:
        check_depth("DynamicViT", self.config["at"], host)
        weight, width = host.patch_embed.proj.weight, host.embed_dim
        if not self.predictors:
            self.predictors.extend(Predictor(width) for _ in self.config["at"])
            self.predictors.to(weight.device, weight.dtype)
        made_for = self.predictors[0].width
        if made_for != width:
            raise ValueError(
                f"this DynamicViT was made for tokens of {made_for} numbers, but the host's have {width}; "
                "make a new one"
            )

    def num_kept(self, index: int, now: Count, first: Count) -> Count:
        if index not in self.config["at"]:
            return now
        return kept_of(first, self.shares[self.config["at"].index(index)])

    def num_macs(self, index: int, now: Tensor, num_prefix: int) -> Tensor:
        if index not in self.config["at"]:
            return torch.zeros_like(now)
        predictor: Any = self.predictors[0]
        layers = (m for m in predictor.modules() if isinstance(m, nn.Linear))
        shared = predictor.head[0].weight.numel() // 2  # once per image
        return (now + num_prefix) * (sum(layer.weight.numel() for layer in layers) - shared) + shared

    def before(self, index: int, tokens: TokenBatch, start: Layout) -> TokenBatch:
        if index not in self.config["at"]:
            return tokens
        stage = self.config["at"].index(index)
        predictor: Any = self.predictors[stage]
        if self.training:
            rows = Rows(tokens.layout)
            tokens, logit, is_candidate, order = score_tokens(predictor, tokens, rows)
            return self._draw(tokens, logit, rows.collect(~is_candidate | (order == 0)), start)
        max_len = start.num_prefix + self.max_left(index, start.grid)
        max_kept = self.max_kept(index, start)
        return thin_out(predictor, with_owners(tokens), start.count, self.shares[stage], max_len, max_kept)

    def _draw(self, tokens: TokenBatch, logit: Tensor, always_kept: Tensor, start: Layout) -> TokenBatch:
        """Draw a random choice. `always_kept`: prefix tokens, and the best token of each image, which must keep one."""
        _, kept = straight_through(wide(logit), noise=1.0)  # the Gumbel-softmax of two classes
        layout = tokens.layout
        kept = kept + (1 - kept.detach()) * always_kept  # the value 1, with the gradient
        weight = layout.weight * kept.to(layout.weight.dtype)
        gate_weight = torch.where(start.valid, start.weight, 1)  # by the gate, which this share is not about
        policy = torch.where(start.valid, weight / gate_weight, 0)
        share = _total(policy, layout) / _total(start.weight.detach(), start)  # (b,)
        layout = changed(layout, weight=weight)
        layout = changed(layout, has_inactive=True) if isinstance(layout, PackedLayout) else layout
        return changed(tokens, layout=layout, kept=(*tokens.kept, share))

    def losses(self, output: MSViTOutput, teacher: MSViTOutput | None) -> dict[str, Tensor]:
        shares = zip(output.tokens.kept, self.shares, strict=True)
        misses = [(kept - part / whole).square().mean() for kept, (part, whole) in shares]
        terms = {"ratio": RATIO * torch.stack(misses).mean()}
        if teacher is not None:
            student, want = (F.log_softmax(t.float(), dim=-1) for t in (output.logits, teacher.logits))
            terms["distill"] = DISTILL * F.kl_div(student, want, log_target=True, reduction="batchmean")
            terms["features"] = DISTILL * _feature_loss(output.tokens, teacher.tokens)
        return terms


def kept_of(first: Count, share: Ratio) -> Count:
    """Return how many of the `first` tokens are kept: their share, but at least one."""
    return at_least(first * share[0] // share[1], 1)


def score_tokens(predictor: "Predictor", tokens: TokenBatch, rows: Rows) -> tuple[TokenBatch, Tensor, Tensor, Tensor]:
    """Return tokens, a logit per slot and, by image (b, n), candidates and ranks. A NaN token makes its image NaN."""
    layout, is_candidate = tokens.layout, candidates(rows)
    patch = layout.token >= layout.num_prefix  # prefix tokens are scored too: cheaper than selecting the others
    logit = predictor(tokens.x, torch.where(patch, layout.weight, 0), layout.image, layout.batch)
    tokens = tokens.with_x(tokens.x.masked_fill(logit.isnan()[:, None], torch.nan))
    logit = torch.where(patch, logit, 0).nan_to_num()  # (slots,)
    return tokens, logit, is_candidate, rank(rows.spread(logit.detach(), 0).masked_fill(~is_candidate, -torch.inf))


@compile_region
def thin_out(
    predictor: "Predictor", tokens: TokenBatch, first: Int[Tensor, " b"], share: Ratio, max_len: int, max_kept: int
) -> TokenBatch:
    """Keep the share of the `first` tokens of an image that the predictor scores highest."""
    rows = Rows(tokens.layout)
    tokens, _, is_candidate, order = score_tokens(predictor, tokens, rows)
    removed = rows.collect(is_candidate & (order >= kept_of(first, share)[:, None]))
    merged_into = torch.where(removed, -1, torch.arange(removed.shape[0], device=removed.device))
    return compact(tokens, ~removed, merged_into, max_len, max_kept)


class Predictor(nn.Module):
    """A layer that scores each token, from itself and the mean of the tokens that its image still has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.stem = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.head = nn.Sequential(
            nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, width // 4), nn.GELU(),
            nn.Linear(width // 4, 2),
        )  # fmt: skip
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(
        self, x: Float[Tensor, "n d"], policy: Float[Tensor, " n"], image: Int[Tensor, " n"], batch: int
    ) -> Float[Tensor, " n"]:
        """Return the logit of being kept; `policy` is 1 for tokens that still are."""
        local, shared = self.stem(x).chunk(2, dim=-1)
        policy = wide(policy)[:, None]
        total = policy.new_zeros(batch, shared.shape[1]).index_add(0, image, shared.to(policy.dtype) * policy)
        mean = (total / policy.new_zeros(batch, 1).index_add(0, image, policy)).to(local.dtype)
        layers: list[Any] = list(self.head)
        first, others = layers[0], layers[1:]  # as published it sees both side by side; here the mean once an image
        to_local, to_shared = first.weight.chunk(2, dim=1)
        hidden = F.linear(local, to_local, first.bias) + take_rows(F.linear(mean, to_shared), image)
        for layer in others:
            hidden = layer(hidden)
        keep, drop = hidden.unbind(-1)
        return keep - drop


def wide(x: Tensor) -> Tensor:
    """Convert to at least 32 bits: sums of ones in bfloat16 stop at 256."""
    return x if x.dtype is torch.float64 else x.float()


def _total(weight: Tensor, layout: Layout) -> Float[Tensor, " b"]:
    """The weight of an image's tokens, prefix tokens left out."""
    slots, weight = layout.patch_slots, wide(weight)
    return weight.new_zeros(layout.batch).index_add(0, layout.image[slots], weight[slots])


def _feature_loss(tokens: TokenBatch, teacher: TokenBatch) -> Tensor:
    """Mean squared difference over kept tokens; a coarse one is compared with the mean of what it covers."""
    layout, slots = tokens.layout, tokens.layout.patch_slots
    dense = dense_map(teacher).to(tokens.x.dtype)  # (b, d, hf, wf)
    table = torch.cat([F.avg_pool2d(dense, layout.grid.k).flatten(2), dense.flatten(2)], dim=2)  # (b, d, ids)
    want = table.transpose(1, 2)[layout.image[slots], layout.token[slots] - layout.num_prefix]
    kept = layout.valid[slots]
    miss = (tokens.x[slots] - want).square().mean(1)
    return torch.where(kept, miss, 0).sum() / kept.sum()
