"""Several runs side by side: what the best gate gives, and what a dense host gives for the same.

    names = labels(runs)                  # {run: "gate 0.25"}, {run: "dense 64 px"}: for readers
    record(run, runs)                     # a run in a few numbers: what tables and --json show
    share_of_dense(run, runs)             # Share(0.53, of="its dense host")
    speed_ups(run)                        # over the dense host that was timed beside it, in one measurement
    result(runs).sentence                 # "The mixed-scale model answers 99.3 % right (dense 99.8 %) with 53 % ..."

Times of different evaluations are never compared: they were measured at different moments.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, TypeAlias

import numpy as np

from msvit.lab.runs import Metric, Run, finite
from msvit.lab.viz.figures import Point

Setting: TypeAlias = tuple[str, str]  # device, precision
NONE = "–"  # noqa: RUF001  (a dash in a table: no number)
NEAR = 0.015  # of top-1 or mIoU below dense: a run that is within it is as good
GATES = {"learned": "gate", "context": "context gate"}  # that learn a target


@dataclass(frozen=True)
class Share:
    """Of the multiply-adds of a dense model, and of which."""

    value: float
    of: str


@dataclass(frozen=True)
class SpeedUp:
    """A run's time against its dense host's, both measured in turn in one run."""

    setting: Setting
    batch: int
    images_per_second: float
    dense_images_per_second: float
    ratio: float


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone, as means."""

    name: str
    runs: list[Run]
    score: float
    gmacs: float
    share: float | None  # of the dense host's multiply-adds at the same input
    speed_ups: dict[int, float]  # by batch

    @property
    def dense(self) -> bool:
        return self.runs[0].dense

    @property
    def img_size(self) -> int | None:
        return self.runs[0].img_size


@dataclass(frozen=True)
class Result:
    """What came of some runs of one task: one sentence, what qualifies it, and the run it speaks of."""

    sentence: str
    notes: list[str]
    run: Run | None = None


def by_metric(runs: Sequence[Run]) -> dict[Metric, list[Run]]:
    """Runs that compare with each other, in the order they came."""
    return {metric: [run for run in runs if run.metric == metric] for metric in dict.fromkeys(r.metric for r in runs)}


def labels(runs: Sequence[Run], seeds: bool = True) -> dict[Run, str]:
    """What each run is, in words for readers; what else differs, and at last its folder, tell equal ones apart.

    Without `seeds`, runs that differ in their seed alone have the same label.
    """
    found = {run: label(run) for run in runs}
    more: list[Callable[[Run], str]] = [
        lambda run: "" if run.dense else str(run.setting("gate", "loss") or ""),
        lambda run: "" if run.dense else f"weight {short(finite(run.setting('gate', 'weight')))}",
        lambda run: f"{run.img_size} px",
        lambda run: str(run.about.get("recipe", "")),
    ]
    for words in more:
        for same in equal(found):
            if len({words(run) for run in same}) > 1:
                found |= {run: f"{found[run]}, {words(run)}" for run in same if words(run)}
    for same in equal(found):
        taken = Counter(run.setting("seed") for run in same)
        found |= {run: f"{found[run]} ({run.name})" for run in same if taken[run.setting("seed")] > 1}
    if seeds:
        for same in equal(found):
            found |= {run: f"{found[run]}, seed {run.setting('seed')}" for run in same}
    return found


def equal(names: dict[Run, str]) -> list[list[Run]]:
    """The runs that have the same name, where several have."""
    groups = ([run for run, own in names.items() if own == name] for name in dict.fromkeys(names.values()))
    return [group for group in groups if len(group) > 1]


def label(run: Run) -> str:
    """gate 0.25, dense 64 px, gate 0.65 + DynamicViT 0.7, disc 0.3; the folder's name if its settings do not say."""
    gate, reducer = run.setting("model", "gate"), reducer_label(run)
    if gate is None:
        return run.name
    if gate == "none":
        name = f"dense {run.img_size or '?'} px"
    elif gate not in GATES:
        share = finite(run.setting("model", "share"))
        name = f"{gate} {share:g}" if share is not None and gate != "all-coarse" else str(gate)
    else:
        target = finite(run.setting("gate", "target"))
        name = GATES[gate] if target is None else f"{GATES[gate]} {target:g}"
    return f"{name} + {reducer}" if reducer else name


def reducer_label(run: Run) -> str:
    from msvit.reduction import REDUCERS

    name = run.setting("reducer", "name")
    if name is None or name == "none":
        return ""
    title = REDUCERS[name].__name__ if name in REDUCERS else str(name)
    amount, r = finite(run.setting("reducer", "rate")), finite(run.setting("reducer", "r"))
    return f"{title} {amount:g}" if amount is not None else f"{title} r{r:g}" if r is not None else title


def share_of_dense(run: Run, runs: Sequence[Run]) -> Share | None:
    """GMACs of a mean image over those of the dense host at the same input, and of a dense run over the largest's."""
    own = run.number("gmacs", "mean")
    if own is None:
        return None
    if run.dense:
        dense = [(cost, other) for other in runs if other.dense and (cost := other.number("gmacs", "mean"))]
        full, largest = max(dense, key=lambda pair: pair[0], default=(0.0, run))
        return Share(own / full, f"{largest.img_size or '?'} px") if full else None
    host = run.number("gmacs", "dense")
    return Share(own / host, "its dense host") if host else None


def share_words(found: dict[str, Any]) -> str:
    """Of a `record`; of a smaller dense run also what it is a share of."""
    other = found["dense"] and found["of_dense"] is not None and found["of_dense"] < 1
    return percent(found["of_dense"], 0) + (f" of {found['dense_is']}" if other else "")


def speed_ups(run: Run) -> list[SpeedUp]:
    """Largest batches first; none where the dense host was not timed beside the run."""
    hosts = {(*setting(row), row.get("batch")): row for row in run.times if is_host(row)}
    found = []
    for row in run.times:
        host = hosts.get((*setting(row), row.get("batch")))
        if is_host(row) or host is None or not isinstance(row.get("batch"), int):
            continue
        own, dense = float(row["images_per_second"]), float(host["images_per_second"])
        found.append(SpeedUp(setting(row), row["batch"], own, dense, finite(row.get("speed_up")) or own / dense))
    return sorted(found, key=lambda faster: -faster.batch)


def setting(row: dict[str, Any]) -> Setting:
    return str(row.get("device", "?")), str(row.get("dtype", "?"))


def is_host(row: dict[str, Any]) -> bool:
    return str(row.get("what", "")).startswith("dense")


def common_setting(runs: Sequence[Run]) -> Setting | None:
    """Device and precision that most runs were timed with; of equals the last, the lower precision."""
    seen = Counter(how for run in runs for how in dict.fromkeys(faster.setting for faster in speed_ups(run)))
    order = list(seen)
    return max(seen, key=lambda how: (seen[how], order.index(how))) if seen else None


def faster_by_batch(run: Run, how: Setting | None) -> dict[int, SpeedUp]:
    """Under `how`, the largest batch first; of several modes the fastest."""
    found: dict[int, SpeedUp] = {}
    for faster in speed_ups(run):
        if faster.setting == how and (faster.batch not in found or faster.ratio > found[faster.batch].ratio):
            found[faster.batch] = faster
    return found


def record(run: Run, runs: Sequence[Run], name: str, how: Setting | None = None) -> dict[str, Any]:
    """A run in a few numbers; with `how`, its speed-ups on that device and in that precision alone."""
    share = share_of_dense(run, runs)
    return {
        "run": name, "folder": str(run.folder), "task": run.metric.task, "dense": run.dense, "img_size": run.img_size,
        **{key: run.number(key) for _, key in run.metric.columns},
        "tokens": {key: run.number("tokens", key) for key in ("mean", "std", "dense")},
        "gmacs": run.number("gmacs", "mean"),
        "of_dense": None if share is None else share.value, "dense_is": None if share is None else share.of,
        "speed_ups": [
            {
                "device": faster.setting[0], "dtype": faster.setting[1], "batch": faster.batch,
                "images_per_second": faster.images_per_second,
                "dense_images_per_second": faster.dense_images_per_second, "speed_up": faster.ratio,
            }
            for faster in (speed_ups(run) if how is None else faster_by_batch(run, how).values())
        ],
        **{f"fine_on_{what}": run.number(f"fine_on_{what}") for what in ("object", "ground")},
    }  # fmt: skip


def result(runs: Sequence[Run]) -> Result:
    """What the best run with a gate or a reducer gives against the dense one, in one sentence."""
    metric, how = runs[0].metric, common_setting(runs)
    groups = make_groups(runs, how)
    if not groups:
        return Result(f"No {metric.name} yet: of {len(runs)} run(s), none has one.", [])
    mixed = [group for group in groups if not group.dense]
    if not mixed:
        best = max(groups, key=lambda group: group.score)
        return Result(
            f"The dense model at {best.img_size or '?'} px {scores(best.score, metric)} at {short(best.gmacs)} GMACs; "
            "no run with a gate has been evaluated.",
            ["GMACs are billions of multiply-adds per " f"{metric.per}.", *seeds_note(best)],
            best.runs[0],
        )  # fmt: skip
    best, why = choose(mixed, groups, metric)
    peer = peer_of(best, groups)
    is_gate = best.runs[0].setting("model", "gate") not in (None, "none")
    subject = "The mixed-scale model" if is_gate else f"The model with {reducer_label(best.runs[0]) or 'a reducer'}"
    sentence = f"{subject}{f' ({best.name})' if is_gate and len(mixed) > 1 else ''} {scores(best.score, metric)}"
    sentence += f" (dense {percent(peer.score)})" if peer else ""
    if best.share is not None:
        sentence += f" with {percent(best.share, 0)} of the dense model's multiply-adds"
    sentence += speed_words(best.speed_ups)
    notes = [*([why] if why else []), *against_dense(best, peer, groups, metric), *seeds_note(best)]
    if best.speed_ups and how:
        notes.append(f"Speed: {', '.join(how)}; the dense model was timed beside it, in turn, on the same images.")
    return Result(f"{sentence}.", notes, best.runs[0])


def make_groups(runs: Sequence[Run], how: Setting | None = None) -> list[Group]:
    """Runs with a score and a cost; those that differ in their seed alone are one group."""
    groups: dict[str, list[Run]] = {}
    for run, name in labels(runs, seeds=False).items():
        if run.score is not None and run.number("gmacs", "mean") is not None:
            groups.setdefault(name, []).append(run)
    return [make_group(name, own, runs, how) for name, own in groups.items()]


def make_group(name: str, own: list[Run], runs: Sequence[Run], how: Setting | None) -> Group:
    speeds = [faster_by_batch(run, how) for run in own]
    batches = [batch for batch in speeds[0] if all(batch in each for each in speeds)]
    shares = [share.value for run in own if (share := share_of_dense(run, runs))]
    return Group(
        name=name, runs=own, score=mean(known(run.score for run in own)),
        gmacs=mean(known(run.number("gmacs", "mean") for run in own)), share=mean(shares) if shares else None,
        speed_ups={batch: mean(each[batch].ratio for each in speeds) for batch in batches},
    )  # fmt: skip


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def choose(mixed: Sequence[Group], groups: Sequence[Group], metric: Metric) -> tuple[Group, str]:
    """The cheapest run that is about as good as dense; where there is none, the best. And a sentence that says so."""
    if len(mixed) == 1:
        return mixed[0], ""
    peers = [(group, peer_of(group, groups)) for group in mixed]
    near = [group for group, peer in peers if peer and group.score >= peer.score - NEAR]
    if near:
        best = min(near, key=lambda group: group.gmacs)
        return best, f"The cheapest of {len(mixed)} settings that is at most {100 * NEAR:g} points below dense."
    return max(mixed, key=lambda group: group.score), f"The best {metric.name} of {len(mixed)} settings."


def peer_of(group: Group, groups: Sequence[Group]) -> Group | None:
    """The dense runs of the same input; of several kinds the one that costs most."""
    same = [other for other in groups if other.dense and other.img_size == group.img_size]
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


def against_dense(best: Group, peer: Group | None, groups: Sequence[Group], metric: Metric) -> list[str]:
    """What dense models of other inputs give: at the same cost, between two of them, or the nearest as it is."""
    dense = sorted((group for group in groups if group.dense), key=lambda group: group.gmacs)
    curve = [group.gmacs for group in dense], [group.score for group in dense]
    if len(dense) > 1 and dense[0].gmacs <= best.gmacs <= dense[-1].gmacs:
        there = float(np.interp(best.gmacs, *curve))
        gap = 100 * (best.score - there)
        more = f"{abs(gap):.1f} points {'more' if gap >= 0 else 'less'}"
        return [f"Dense models with smaller inputs give {percent(there)} for as many multiply-adds: this one {more}."]
    others = [group for group in dense if group is not peer]
    if not others or peer is None:
        return []
    near = min(others, key=lambda group: abs(group.gmacs - best.gmacs))
    share = f"{percent(near.gmacs / peer.gmacs, 0)} of the multiply-adds"
    return [f"A dense model at {near.img_size or '?'} px {scores(near.score, metric)} with {share}."]


def seeds_note(group: Group) -> list[str]:
    num = len(group.runs)
    return [f"Means over {num} seeds."] if num > 1 else []


def as_point(run: Run, runs: Sequence[Run], name: str, how: Setting | None = None) -> Point | None:
    """A run for the curves, with its speed-up under `how` at the largest batch; None without a score.

    A dense run is its own host: its speed-up is 1 where a run with a gate has the same input.
    """
    if (score := run.score) is None:
        return None
    faster = next(iter(faster_by_batch(run, how).values()), None)
    ratio = None if faster is None else faster.ratio
    if run.dense and any(other.img_size == run.img_size and faster_by_batch(other, how) for other in runs):
        ratio = 1.0
    return Point(name, run.dense, run.img_size, run.metric, score, run.number("gmacs", "mean"), ratio)


def percent(share: float | None, digits: int = 1) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f}\u00a0%"  # the sign stays on the line


def short(number: float | None) -> str:
    """Three digits, more for large whole numbers."""
    return NONE if number is None else f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
