"""Several runs side by side: what the best gate gives, and what a dense host gives for the same.

    names = labels(runs)                  # {run: "gate 0.25"}, {run: "dense 64 px"}: for readers
    record(run, runs, names[run])         # a run in a few numbers: what tables and --json show
    speed_ups(run)                        # over the dense host that was timed beside it, in one measurement
    result(runs).sentence                 # "The mixed-scale model answers 99.3 % right (dense 99.8 %) with 53 % ..."

Times of different evaluations are never compared: they were measured at different moments.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from msvit.reduction import REDUCERS
from msvit.speed_report import wilson
from msvit_lab.config import TRAINED_GATES
from msvit_lab.evaluation_files import Metric
from msvit_lab.runs import Run

Setting: TypeAlias = tuple[str, str]  # device, precision
NONE = "–"  # noqa: RUF001  (a dash in a table: no number)
FEW = 1000  # images below which a share of them gets an interval
NEAR = 0.015  # of top-1 or mIoU below dense: a run that is within it is as good


@dataclass(frozen=True, eq=False)
class Point:
    """A run, or the means of runs that differ in their seed alone."""

    name: str
    run: Run  # the first of them
    num_seeds: int
    score: float
    gmacs: float
    share: float | None  # of the dense host's multiply-adds at the same input
    speed_ups: dict[int, float]  # by batch, the largest first


class Result(NamedTuple):
    """What came of some runs of one task: one sentence, what qualifies it, and the run it is about."""

    sentence: str
    notes: list[str]
    run: Run | None = None


def by_metric(runs: Sequence[Run]) -> dict[Metric, list[Run]]:
    """Runs that compare with each other, in the order they came."""
    return {metric: [run for run in runs if run.metric == metric] for metric in dict.fromkeys(r.metric for r in runs)}


def setting(name: str) -> str:
    """A run's name without its seed."""
    return re.sub(r"-s\d+$", "", name)


def readable(name: str) -> str:
    """What a run is, for readers: t0.65-w1-dynamicvit-0.7-s0 is "gate 0.65 + DynamicViT 0.7"."""
    folder, slash, words = setting(name).rpartition("/")
    words = re.sub(r"^t([\d.]+)-w1(?=-|$)", r"gate \1", words)
    words = re.sub(r"^t([\d.]+)-w([\d.]+)", r"gate \1, weight \2", words)
    words = re.sub(r"^dense-(\d+)", r"dense \1 px", words)
    words = re.sub(rf"-({'|'.join(REDUCERS)})\b", lambda found: f" + {REDUCERS[found[1]].__name__}", words)
    return folder + slash + words.replace("-", " ")


def labels(runs: Sequence[Run]) -> dict[Run, str]:
    """What each run is, for readers, by its folder's name; where runs differ in their seed alone, with the seed."""
    words = {run: readable(run.name) for run in runs}
    taken = Counter(words.values())
    seeds = {run: run.name.removeprefix(setting(run.name)).replace("-s", ", seed ") for run in runs}
    return {run: words[run] + (seeds[run] if taken[words[run]] > 1 else "") for run in runs}


def target_lines(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """Lines with their names: points that differ in their target alone are one, any other is one by itself.

    As in the paper's figure 11: a line for each gate weight and input size, a point for each target.
    """
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(settings_but_target(point.run), []).append(point)
    lines = []
    for own in groups.values():
        by_target = {point.run.config.gate.target: point for point in own}
        if len(own) == 1 or len(by_target) < len(own):  # runs of equal settings are no line
            lines += [(point.name, [point]) for point in own]
            continue
        targets = sorted(by_target)
        words = f"gate {own[0].run.config.gate.target:g}", f"gate {', '.join(map(short, targets))}"
        lines.append((own[0].name.replace(*words, 1), [by_target[target] for target in targets]))
    return lines


def settings_but_target(run: Run) -> str:
    """All settings of a run but its gate's target, as a key; a run that learns none has a key of its own."""
    if run.config.model.gate not in TRAINED_GATES:
        return str(run.folder)
    return repr(replace(run.config, gate=replace(run.config.gate, target=0.5)))


def share_of_dense(run: Run, runs: Sequence[Run]) -> tuple[float, str] | None:
    """GMACs as a share, and of what: of the dense host at the same input; for a dense run, of the largest one."""
    own = run.number("gmacs", "mean")
    if not run.dense:
        full, words = run.number("gmacs", "dense"), "its dense host"
    else:
        dense = [(cost, other) for other in runs if other.dense and (cost := other.number("gmacs", "mean"))]
        full, largest = max(dense, key=lambda pair: pair[0], default=(None, run))
        words = f"{largest.img_size} px"
    return None if own is None or not full else (own / full, words)


def share_words(found: dict[str, Any]) -> str:
    """Of a `record`; of a smaller dense run also what it is a share of."""
    other = found["dense"] and found["of_dense"] is not None and found["of_dense"] < 1
    return percent(found["of_dense"], 0) + (f" of {found['dense_is']}" if other else "")


def speed_ups(run: Run, how: Setting | None = None) -> list[dict[str, Any]]:
    """The run's speed against its dense host's, both measured in turn in one evaluation; largest batches first.

    None where the dense host was not timed beside the run. `how`: on this device and in this precision alone.
    """
    keys = ("device", "dtype", "batch", "images_per_second", "speed_up")
    timed = (row for row in run.evaluation.get("latency", []) if row["speed_up"] is not None)
    found = [{key: row[key] for key in keys} for row in timed if how in (None, setting_of(row))]
    return sorted(found, key=lambda row: -row["batch"])


def setting_of(row: dict[str, Any]) -> Setting:
    return row["device"], row["dtype"]


def common_setting(runs: Sequence[Run]) -> Setting | None:
    """Device and precision that most runs were timed with; of equals the last, the lower precision."""
    seen = Counter(how for run in runs for how in dict.fromkeys(map(setting_of, speed_ups(run))))
    return max(reversed(seen), key=lambda how: seen[how], default=None)


def record(run: Run, runs: Sequence[Run], name: str, how: Setting | None = None) -> dict[str, Any]:
    """A run in a few numbers; with `how`, its speed-ups on that device and in that precision alone."""
    share, dense_is = share_of_dense(run, runs) or (None, None)
    return {
        "run": name, "folder": str(run.folder), "task": run.metric.task, "dense": run.dense, "img_size": run.img_size,
        **{key: run.number(key) for _, key in run.metric.columns},
        "tokens": {key: run.number("tokens", key) for key in ("mean", "std", "dense")},
        "gmacs": run.number("gmacs", "mean"), "of_dense": share, "dense_is": dense_is,
        "speed_ups": speed_ups(run, how),
        **{f"fine_on_{what}": run.number(f"fine_on_{what}") for what in ("object", "ground")},
    }  # fmt: skip


def result(runs: Sequence[Run]) -> Result:
    """What the best run with a gate or a reducer gives against the dense one, in one sentence."""
    metric, how = runs[0].metric, common_setting(runs)
    points = make_points(runs, {run: readable(run.name) for run in runs}, how)
    mixed = [point for point in points if not point.run.dense]
    if not points:
        return Result(f"No {metric.name} yet: of {len(runs)} run(s), none has one.", [])
    if not mixed:
        best = max(points, key=lambda point: point.score)
        about = f"The dense model at {best.run.img_size} px {scores(best.score, metric)}"
        notes = [f"GMACs are billions of multiply-adds per {metric.per}.", *seeds_note(best)]
        return Result(f"{about} at {short(best.gmacs)} GMACs; no run with a gate has been evaluated.", notes, best.run)
    fixed = [point for point in mixed if point.run.config.model.gate not in (*TRAINED_GATES, "none")]
    mixed = [point for point in mixed if point not in fixed] or mixed
    best, notes = choose(mixed, points, metric)
    peer = peer_of(best, points)
    is_gate, reducer = best.run.config.model.gate != "none", best.run.evaluation.get("reducer")
    subject = "The mixed-scale model" if is_gate else f"The model with {reducer or 'a reducer'}"
    sentence = f"{subject}{f' ({best.name})' if is_gate and len(mixed) > 1 else ''} {scores(best.score, metric)}"
    sentence += f" (dense {percent(peer.score)})" if peer else ""
    if best.share is not None:
        sentence += f" with {percent(best.share, 0)} of the dense model's multiply-adds"
    notes += against_dense(best, peer, points, metric)
    if best not in fixed and fixed:
        near = min(fixed, key=lambda point: abs(point.gmacs - best.gmacs))
        cost = f"{short(near.gmacs)} GMACs"
        notes.append(f"A gate that was not trained ({near.name}) {scores(near.score, metric)} at {cost}.")
    notes += seeds_note(best)
    if peer is None:
        notes.append(f"No dense run of the same input is among these; {dense_command(best.run)}.")
    if best.num_seeds == 1 and (words := interval_words(best.run)):
        notes.append(f"Measured on {short(best.run.number('num_images'))} images: {words}.")
    if best.speed_ups and how:
        notes.append(f"Speed: {', '.join(how)}; the dense model was timed beside it, in turn, on the same images.")
    return Result(f"{sentence}{speed_words(best.speed_ups)}.", notes, best.run)


def make_points(runs: Sequence[Run], names: dict[Run, str], how: Setting | None = None) -> list[Point]:
    """Runs that have a score; those of one name are one point."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.score is not None:
            groups.setdefault(names[run], []).append(run)
    points = []
    for name, own in groups.items():
        speeds = [{row["batch"]: row["speed_up"] for row in speed_ups(run, how)} for run in own]
        batches = [batch for batch in speeds[0] if all(batch in each for each in speeds)]
        faster = {batch: mean(each[batch] for each in speeds) for batch in batches}
        costs = [run.evaluation["gmacs"]["mean"] for run in own]
        shares = [share[0] for run in own if (share := share_of_dense(run, runs))]
        score = mean(run.score for run in own if run.score is not None)
        points.append(Point(name, own[0], len(own), score, mean(costs), mean(shares) if shares else None, faster))
    return points


def choose(mixed: Sequence[Point], points: Sequence[Point], metric: Metric) -> tuple[Point, list[str]]:
    """The cheapest point that is about as good as dense; where there is none, the best. And a sentence that says so."""
    if len(mixed) == 1:
        return mixed[0], []
    near = [point for point in mixed if (peer := peer_of(point, points)) and point.score >= peer.score - NEAR]
    if near:
        best = min(near, key=lambda point: point.gmacs)
        return best, [f"The cheapest of {len(mixed)} settings that is at most {100 * NEAR:g} points below dense."]
    return max(mixed, key=lambda point: point.score), [f"The best {metric.name} of {len(mixed)} settings."]


def peer_of(point: Point, points: Sequence[Point]) -> Point | None:
    """The dense runs of the same input; of several kinds the one that costs most."""
    same = [other for other in points if other.run.dense and other.run.img_size == point.run.img_size]
    return max(same, key=lambda other: other.gmacs, default=None)


def scores(score: float, metric: Metric) -> str:
    return f"answers {percent(score)} right" if metric.task == "classify" else f"reaches {percent(score)} {metric.name}"


def speed_words(faster: dict[int, float]) -> str:
    if not faster:
        return ""
    (batch, ratio), *rest = faster.items()
    others = "".join(f" ({other:.2f} at batch {size})" for size, other in rest)
    if ratio >= 1:
        return f" and runs {ratio:.2f} times as fast at batch {batch}{others}"
    return f", but is slower: {ratio:.2f} times the speed at batch {batch}{others}"


def against_dense(best: Point, peer: Point | None, points: Sequence[Point], metric: Metric) -> list[str]:
    """What dense models of other inputs give: at the same cost, between two of them, or the nearest as it is."""
    dense = sorted((point for point in points if point.run.dense), key=lambda point: point.gmacs)
    if len(dense) > 1 and dense[0].gmacs <= best.gmacs <= dense[-1].gmacs:
        there = float(np.interp(best.gmacs, [point.gmacs for point in dense], [point.score for point in dense]))
        gap = 100 * (best.score - there)
        more = f"{abs(gap):.1f} points {'more' if gap >= 0 else 'less'}"
        return [f"Dense models with smaller inputs give {percent(there)} for as many multiply-adds: this one {more}."]
    others = [point for point in dense if point is not peer]
    if not others or peer is None or not peer.gmacs:
        return []
    near = min(others, key=lambda point: abs(point.gmacs - best.gmacs))
    share = f"{percent(near.gmacs / peer.gmacs, 0)} of the multiply-adds"
    return [f"A dense model at {near.run.img_size} px {scores(near.score, metric)} with {share}."]


def seeds_note(point: Point) -> list[str]:
    return [f"Means over {point.num_seeds} seeds."] if point.num_seeds > 1 else []


def dense_command(run: Run) -> str:
    """How to get the dense run that a run is compared with."""
    recipe, data = run.about["recipe"] or "RECIPE", run.config.data.source
    source = "" if data == "scenes" else f" --data {data}"
    return f"train one, msvit train {recipe}{source} --img-size {run.img_size} --gate none, and report on both"


def interval_words(run: Run) -> str:
    """Where the share of right answers of a classifier lies, if it was measured on few images; else nothing."""
    num, score = run.number("num_images"), run.score
    if run.metric.task != "classify" or num is None or score is None or num >= FEW:
        return ""
    low, high = wilson(score, num)
    return f"95\u00a0% interval {100 * low:.1f} to {percent(high)}"


def percent(share: float | None, digits: int = 1) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f}\u00a0%"  # the sign stays on the line


def short(number: float | None) -> str:
    """Three digits, more for large whole numbers."""
    return NONE if number is None else f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
