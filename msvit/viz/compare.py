"""Several runs side by side: what the best gate gives, and what a dense host gives for the same.

    answer(runs)[0]                    # "gbas: 93.1 % top-1 at 0.31 GMACs, 58 % of dense; dense 93.9 %"
    by_metric(runs)                    # runs of one task compare: top-1 and mIoU do not
    how = common_setting(runs)         # ("cuda", "bfloat16", "batch 256"): only times of one setting compare
    fastest(run, how)                  # its row of measured time, or None
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from msvit.viz.figures import Point
from msvit.viz.runs import Metric, Run, finite

Setting: TypeAlias = tuple[str, str, str]  # device, precision, batch
NONE = "–"  # noqa: RUF001  (a dash in a table: no number)


def by_metric(runs: Sequence[Run]) -> dict[Metric, list[Run]]:
    """Runs that compare with each other, in the order they came."""
    return {metric: [run for run in runs if run.metric == metric] for metric in dict.fromkeys(r.metric for r in runs)}


def answer(runs: Sequence[Run]) -> list[str]:
    """The best gated run of one task in one line, then how it stands against the dense curve."""
    name = runs[0].metric.name
    points = [point for run in runs if (point := as_point(run)) and point.gmacs is not None]
    if not points:
        return [f"No {name} yet: of {len(runs)} run(s), none has one."]
    gated = [point for point in points if not point.dense]
    best = max(gated or points, key=lambda point: point.score)
    line = f"{best.name}: {percent(best.score)} {name} at {short(best.gmacs)} GMACs"
    if not gated:
        return [f"{line}, dense; no run with a gate has been evaluated"]
    share = next(run.share for run in runs if run.name == best.name)
    line += "" if share is None else f", {percent(share, 0)} of dense"
    peers = [point.score for point in points if point.dense and point.img_size == best.img_size]
    line += f"; dense {percent(max(peers))}" if peers else f"; no dense run at {best.img_size or '?'} px"
    note = f"The best {name} of {len(gated)} runs with a gate." if len(gated) > 1 else ""
    return [line, f"{note} {against_curve(best, points)}".strip()]


def against_curve(best: Point, points: Sequence[Point]) -> str:
    """What the dense runs give at the GMACs of `best`, between their points."""
    curve = sorted((point.gmacs, point.score) for point in points if point.dense and point.gmacs is not None)
    if best.gmacs is None or len(curve) < 2 or not curve[0][0] <= best.gmacs <= curve[-1][0]:
        return "There are no dense runs on both sides of its GMACs to compare with."
    there = float(np.interp(best.gmacs, [x for x, _ in curve], [y for _, y in curve]))
    gap = 100 * (best.score - there)
    verb = "gains" if gap >= 0 else "loses"
    return f"At the same GMACs the dense curve gives {percent(there)}: the gate {verb} {abs(gap):.1f} points."


def as_point(run: Run, how: Setting | None = None) -> Point | None:
    """A run for the curves, with its speed under `how`; None without a score."""
    if (score := run.score) is None:
        return None
    row = fastest(run, how) if how else None
    speed = finite(row["images_per_second"]) if row else None
    return Point(run.name, run.dense, run.img_size, run.metric, score, run.number("gmacs", "mean"), speed)


def common_setting(runs: Sequence[Run]) -> Setting | None:
    """Device, precision and batch that most runs were timed with; of equals the largest batch."""
    seen = Counter(how for run in runs for how in dict.fromkeys(map(_setting, _own_times(run))))
    return max(seen, key=lambda how: (seen[how], len(how[2]), how[2])) if seen else None


def fastest(run: Run, how: Setting) -> dict[str, Any] | None:
    """The run's row of measured time with the most images per second under `how`."""
    rows = [row for row in _own_times(run) if _setting(row) == how]
    return max(rows, key=lambda row: float(row["images_per_second"]), default=None)


def _setting(row: dict[str, Any]) -> Setting:
    return str(row.get("device", "?")), str(row.get("dtype", "?")), f"batch {row.get('batch', '?')}"


def _own_times(run: Run) -> list[dict[str, Any]]:
    """Rows that timed the run itself: a gated run may also hold those of its dense host."""
    return [row for row in run.times if str(row.get("what", "")).startswith("dense") == run.dense]


def percent(share: float | None, digits: int = 1) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f}\u00a0%"  # the sign stays on the line


def short(number: float | None) -> str:
    """Three digits, more for large whole numbers."""
    return NONE if number is None else f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
