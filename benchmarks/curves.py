"""One plot of a sweep: accuracy against multiply-adds and, where runs were timed, against the time they take.

    R=benchmarks/results
    python benchmarks/curves.py $R/sweeps/pets_curves.json --times $R/times/pets.json $R/times/pets_reducers.json \\
        --out docs/images/pets.svg

The first file is of benchmarks/collect.py, the others of `msvit bench --runs`; of a run that was timed twice the last
counts. Times are shares of what the dense run of the largest input took beside it. A point is the mean over seeds, its
bar goes from the lowest to the highest. Runs that differ in one amount alone, such as evit-0.7 and evit-0.5, are one
curve.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from msvit.lab.runs import METRICS


class Point(NamedTuple):
    cost: float
    scores: list[float]  # one a seed


def family(name: str) -> str:
    """The curve a run belongs to: dense-224-evit-0.7-s0 is evit, t0.3-w1-evit-0.7-s0 is gate + evit."""
    parts = [part for part in re.split(r"-", setting(name)) if re.fullmatch(r"[a-z]+", part)]
    gate = "gate" if re.match(r"t[\d.]+-w", name) else parts.pop(0)
    if gate == "dense":
        return parts[0] if parts else "dense"
    return " + ".join([gate, *parts])


def setting(name: str) -> str:
    """Without its seed."""
    return re.sub(r"-s\d+$", "", name)


def by_setting(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ in their seed alone, together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(setting(run["name"]), []).append(run)
    return groups


def curves(runs: list[dict[str, Any]], cost: dict[str, float], key: str) -> dict[str, list[Point]]:
    """`cost` of each setting; those without one are left out."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if setting(run["name"]) in cost:
            found.setdefault(family(run["name"]), {}).setdefault(setting(run["name"]), []).append(100 * run[key])
    return {
        name: sorted(Point(cost[each], scores) for each, scores in settings.items()) for name, settings in found.items()
    }


def palette(names: Iterable[str]) -> dict[str, str]:
    """A colour for each curve, the same in every panel."""
    return {name: f"C{index}" for index, name in enumerate(sorted(set(names) - {"dense"}))} | {"dense": "black"}


def draw(axes: Any, found: dict[str, list[Point]], colours: dict[str, str] | None = None) -> None:
    colours = colours or palette(found)
    for name, points in sorted(found.items(), key=lambda item: (item[0] != "dense", item[0])):
        costs, means = [p.cost for p in points], [mean(p.scores) for p in points]
        spread = [[m - min(p.scores) for m, p in zip(means, points, strict=True)],
                  [max(p.scores) - m for m, p in zip(means, points, strict=True)]]  # fmt: skip
        style: dict[str, Any] = {"linewidth": 2} if name == "dense" else {}
        style |= {"color": colours[name], "linestyle": "--" if "+" in name else "-"}
        axes.errorbar(costs, means, yerr=spread, marker="o", markersize=4, elinewidth=0.6, label=name, **style)


def plot(sweep: dict[str, Any], times: list[dict[str, Any]], out: Path) -> None:
    metric = METRICS[sweep["task"]]
    panels = [("GMACs an image", mean_cost(sweep["runs"]))]
    if times:
        about = f"time over that of {setting(times[0]['baseline'])}, {times[0]['record']['machine']}"
        panels.append((f"{about}, batch {times[0]['batch']}", time_taken(*times)))
    figure, all_axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), sharey=True, squeeze=False)
    colours = palette(family(run["name"]) for run in sweep["runs"])
    for axes, (words, cost) in zip(all_axes[0], panels, strict=True):
        draw(axes, curves(sweep["runs"], cost, metric.key), colours)
        axes.set_xlabel(words)
        axes.grid(alpha=0.3)
    all_axes[0][0].set_ylabel(f"{metric.name}, %")
    all_axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def time_taken(*times: dict[str, Any]) -> dict[str, float]:
    """Of each setting, over the baseline of its file."""
    return {setting(row["name"]): 1 / row["speed_up"]["median"] for each in times for row in each["rows"]}


def mean_cost(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {name: mean(run["gmacs"] for run in own) for name, own in by_setting(runs).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--times", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    plot(json.loads(given.sweep.read_text()), [json.loads(path.read_text()) for path in given.times], given.out)


if __name__ == "__main__":
    main()
