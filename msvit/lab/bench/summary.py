"""From times to a record: speed-ups, the ratio of multiply-adds, and the share of it that became time.

"Share" is the speed-up over the baseline divided by the ratio of multiply-adds: 1 means that every multiply-add saved
became time. "Tokens' share" is the same over our own path with all tokens: what fewer tokens save, without what better
kernels do. For batches on a GPU both are computed from calls back to back, else from single calls.
"""

from dataclasses import asdict, dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from msvit.lab.bench.memory import Memory
from msvit.lab.bench.rows import ALL_FINE, ALL_TOKENS, BASELINES
from msvit.lab.timing import Spread, Times, speed_up, spread


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


def summarise(
    work: Work,
    times: dict[str, Times],
    memory: dict[str, Memory | None],
    bounds: dict[str, dict[str, float] | None],
    own_work: dict[str, Work] | None = None,
    *,
    batch: int,
) -> dict[str, Any]:
    """`own_work`: of rows that have other work to do than the gate has left."""
    ratios = {name: done.mac_ratio for name, done in (own_work or {}).items()} | dict.fromkeys(ALL_TOKENS, 1.0)
    baseline = next((name for name in BASELINES if name in times and times[name].trouble is None), None)
    base = times[baseline] if baseline is not None else None
    whole = times[ALL_FINE] if ALL_FINE in times and times[ALL_FINE].trouble is None else None
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
        "basis": "calls back to back" if any(own.burst for own in times.values()) else "single calls",
        "rounds": max(len(own.single) for own in times.values()),
        "rows": [
            row(name, own, base, whole, ratios.get(name, work.mac_ratio), batch)
            | ({} if own.trouble else {
                "tokens": work.dense_tokens if name in ALL_TOKENS else (own_work or {}).get(name, work).mean_tokens,
                "memory": as_numbers(memory.get(name)), "floors": bounds.get(name),
            })
            for name, own in times.items()
        ],
    }  # fmt: skip


def row(
    name: str, own: Times, base: Times | None, whole: Times | None, mac_ratio: float, batch: int
) -> dict[str, Any]:
    """One line; a row that failed has its reason and no numbers. `whole`: our own path with all tokens."""
    if own.trouble is not None:
        return {"name": name, "trouble": own.trouble}
    used = own.burst or own.single
    faster, fewer = (None if other is None else speed_up(other.burst or other.single, used) for other in (base, whole))
    return {
        "name": name,
        "trouble": None,
        "ms": rounded(spread(own.single)),
        "burst_ms": rounded(spread(own.burst)) if own.burst else None,
        "images_per_second": round(1e3 * batch / spread(used).median, 1),
        "speed_up": None if faster is None else rounded(faster),
        "mac_ratio": round(mac_ratio, 4),
        "share": None if faster is None else round(faster.median / mac_ratio, 4),
        "speed_up_over_all_tokens": None if fewer is None else rounded(fewer),
        "tokens_share": None if fewer is None else round(fewer.median / mac_ratio, 4),
    }


def as_numbers(memory: Memory | None) -> dict[str, float] | None:
    return None if memory is None else {"peak_mb": round(memory.peak_mb, 1), **asdict(memory)}


def rounded(values: Spread) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in values._asdict().items()}
