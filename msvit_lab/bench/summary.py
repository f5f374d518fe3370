"""From counts and times to a record: speed-ups, the ratio of multiply-adds, and the share of it that became time.

"Share" is the speed-up over the baseline divided by the ratio of multiply-adds: 1 means that every multiply-add saved
became time. "Tokens' share" is the same over our own path with all tokens: what fewer tokens save, without what better
kernels do. For batches on a GPU both are computed from calls back to back, else from single calls.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from msvit.model import MSViT
from msvit_lab.bench.rows import ALL_FINE, BASELINES
from msvit_lab.timing import Times, speed_up, spread


@dataclass(frozen=True)
class Work:
    """What there is to do for the images that are timed."""

    tokens: Int[Tensor, " n"]  # of each image, prefix not counted
    macs: Int[Tensor, " n"]  # gate included
    fine: Float[Tensor, " n"]  # share of fine cells
    dense_tokens: int
    dense_macs: int
    num_prefix: int

    @property
    def mean_tokens(self) -> float:
        return round(self.tokens.double().mean().item(), 2)

    @property
    def mac_ratio(self) -> float:
        return self.dense_macs / float(self.macs.double().mean())

    def dense(self) -> "Work":
        """With all tokens."""
        tokens, macs = (torch.full_like(self.macs, each) for each in (self.dense_tokens, self.dense_macs))
        return replace(self, tokens=tokens, macs=macs)


@torch.no_grad()
def count(model: MSViT, sets: list[Tensor]) -> Work:
    """What the gate decides for these images: tokens and multiply-adds, gate included."""
    grid = model.grid(sets[0])
    masks = [model.gate(images).mask > 0.5 for images in sets]  # (b, hc, wc)
    macs = torch.cat([model.macs(images, mask) for images, mask in zip(sets, masks, strict=True)])
    fine = torch.cat(masks).flatten(1)  # (n, cells)
    return Work(
        tokens=model.backbone.num_tokens(fine.sum(1), grid).cpu(),
        macs=(macs + model.gate.num_macs(grid.num_cells)).cpu(),
        fine=fine.float().mean(1).cpu(),
        dense_tokens=grid.num_patches,
        dense_macs=model.backbone.dense_macs(grid),
        num_prefix=model.backbone.num_prefix,
    )


@dataclass
class Measured:
    """One row."""

    work: Work
    times: Times
    memory: dict[str, float] | None = None
    floors: dict[str, float] | None = None


def summarise(work: Work, rows: dict[str, Measured], batch: int) -> dict[str, Any]:
    """`work`: what the workload's gate leaves; rows may have other work."""
    timed = {name: row.times for name, row in rows.items() if row.times.error is None}
    baseline = next((name for name in BASELINES if name in timed), None)
    others = (timed.get(baseline or ""), timed.get(ALL_FINE))
    tokens, fine = work.tokens.double(), work.fine.double()
    return {
        "tokens": {
            "mean": work.mean_tokens, "std": round(tokens.std(correction=0).item(), 2),
            "min": int(tokens.min()), "max": int(tokens.max()), "dense": work.dense_tokens,
        },
        "fine_share": {
            "mean": round(fine.mean().item(), 4), "std": round(fine.std(correction=0).item(), 4),
        },
        "gmacs": {"mean": float(work.macs.double().mean()) / 1e9, "dense": work.dense_macs / 1e9},
        "mac_ratio": round(work.mac_ratio, 4),
        "baseline": baseline,
        "basis": "calls back to back" if any(row.times.burst for row in rows.values()) else "single calls",
        "rounds": max(len(row.times.single) for row in rows.values()),
        "rows": [
            {"name": name, "trouble": row.times.error} | ({} if row.times.error else numbers(row, batch, *others))
            for name, row in rows.items()
        ],
    }  # fmt: skip


def numbers(row: Measured, batch: int, baseline: Times | None, all_tokens: Times | None) -> dict[str, Any]:
    """Of a row that could be timed. `all_tokens`: our own path without a gate."""
    own, ratio = row.times, row.work.mac_ratio
    faster, fewer = (None if other is None else speed_up(other.used, own.used) for other in (baseline, all_tokens))
    return {
        "ms": spread(own.single).rounded(),
        "burst_ms": spread(own.burst).rounded() if own.burst else None,
        "images_per_second": round(1e3 * batch / spread(own.used).median, 1),
        "speed_up": None if faster is None else faster.rounded(),
        "mac_ratio": round(ratio, 4),
        "share": None if faster is None else round(faster.median / ratio, 4),
        "speed_up_over_all_tokens": None if fewer is None else fewer.rounded(),
        "tokens_share": None if fewer is None else round(fewer.median / ratio, 4),
        "tokens": row.work.mean_tokens,
        "memory": row.memory,
        "floors": row.floors,
    }
