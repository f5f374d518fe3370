"""One plot of a sweep: accuracy against multiply-adds and, where runs were timed, against the time they take.

    R=benchmarks/results
    python benchmarks/curves.py $R/sweeps/pets_curves.json --times $R/times/pets.json $R/times/pets_reducers.json \\
        --out docs/images/pets.svg

The first file is of benchmarks/collect.py, the others of `msvit bench --runs`; of a run that was timed twice the last
counts. Times are shares of what the dense run of the largest input took beside it. A point is the mean over seeds, its
bar goes from the lowest to the highest. Runs that differ in one amount alone, such as EViT 0.7 and 0.5, are one curve.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from msvit.reduction import REDUCERS
from msvit_lab.evaluation_files import METRICS


class Point(NamedTuple):
    cost: float
    scores: list[float]  # one per seed


def setting(name: str) -> str:
    """A run's name without its seed."""
    return re.sub(r"-s\d+$", "", name)


def readable(name: str) -> str:
    """What a run is, for readers: t0.65-w1-dynamicvit-0.7-s0 is "gate 0.65 + DynamicViT 0.7"."""
    words = re.sub(r"^t([\d.]+)-w1(?=-|$)", r"gate \1", setting(name))
    words = re.sub(r"^t([\d.]+)-w([\d.]+)", r"gate \1, weight \2", words)
    words = re.sub(r"^shipped-(?=[\d.]+$)", "shipped gate ", words)
    words = re.sub(r"^dense-(\d+)", r"dense \1 px", words)
    words = re.sub(rf"-({'|'.join(REDUCERS)})\b", lambda found: f" + {REDUCERS[found[1]].__name__}", words)
    return words.replace("-", " ")


def family(name: str) -> str:
    """The curve a run belongs to: dense-224-evit-0.7-s0 is EViT, t0.3-w1-evit-0.7-s0 is gate + EViT."""
    kinds = [re.split(r" r?\d", part)[0] for part in readable(name).split(" + ")]
    return " + ".join(kinds[1:] if kinds[0] == "dense" and kinds[1:] else kinds)


def by_setting(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ in their seed alone, together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(setting(run["name"]), []).append(run)
    return groups


def curves(runs: list[dict[str, Any]], cost: dict[str, float], key: str) -> dict[str, list[Point]]:
    """`cost` of each setting; those without one are left out."""
    found: dict[str, list[Point]] = {}
    for name, own in by_setting(runs).items():
        if name in cost:
            found.setdefault(family(name), []).append(Point(cost[name], [100 * run[key] for run in own]))
    return {name: sorted(points) for name, points in found.items()}


def palette(names: Iterable[str]) -> dict[str, str]:
    """A colour for each curve, the same in every panel."""
    coloured = sorted(set(names) - {"dense"}, key=str.lower)
    return {name: f"C{index}" for index, name in enumerate(coloured)} | {"dense": "black"}


def draw(axes: Any, found: dict[str, list[Point]], colours: dict[str, str] | None = None) -> None:
    colours = colours or palette(found)
    for name, points in sorted(found.items(), key=lambda item: (item[0] != "dense", item[0].lower())):
        means, low, high = (np.array([each(point.scores) for point in points]) for each in (mean, min, max))
        bars = {"yerr": (means - low, high - means), "elinewidth": 0.6, "marker": "o", "markersize": 4}
        style: dict[str, Any] = {"linewidth": 2} if name == "dense" else {}
        style |= {"color": colours[name], "linestyle": "--" if "+" in name else "-"}
        axes.errorbar([point.cost for point in points], means, label=name, **bars, **style)


def plot(sweep: dict[str, Any], times: list[dict[str, Any]], out: Path) -> None:
    metric = METRICS[sweep["task"]]
    panels = [(f"GMACs per {metric.per}", mean_cost(sweep["runs"]))]
    if times:
        about = f"time over that of {readable(times[0]['baseline'])}, {times[0]['record']['machine']}"
        panels.append((f"{about}, batch {times[0]['batch']}", time_taken(*times)))
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="tight")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    colours = palette(family(run["name"]) for run in sweep["runs"])
    for axes, (words, cost) in zip(all_axes, panels, strict=True):
        draw(axes, curves(sweep["runs"], cost, metric.key), colours)
        axes.set_xlabel(words)
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel(f"{metric.name}, %")
    all_axes[0].legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def time_taken(*times: dict[str, Any]) -> dict[str, float]:
    """Of each setting, over the baseline of its file."""
    return {setting(row["name"]): 1 / row["speed_up"]["median"] for each in times for row in each["rows"]}


def mean_cost(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {name: mean(run["gmacs"] for run in own) for name, own in by_setting(runs).items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--times", type=Path, nargs="*", default=[])
    parser.add_argument("--only", default="", help="of runs with this in their name")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    sweep = json.loads(given.sweep.read_text())
    sweep["runs"] = [run for run in sweep["runs"] if given.only in run["name"]]
    if not sweep["runs"]:
        raise SystemExit(f"{given.sweep} has no runs with {given.only!r} in their name; see its list of runs")
    plot(sweep, [json.loads(path.read_text()) for path in given.times], given.out)
