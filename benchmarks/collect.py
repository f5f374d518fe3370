"""What came of a sweep, in one file of results, and as a table in the docs.

    python benchmarks/collect.py runs/voc-sweep --out benchmarks/results/sweeps/voc.json --commit 1a2b3c4 \\
        --command "msvit sweep voc ..."
    python benchmarks/collect.py            # writes the tables of all such files

A table stands between <!-- NAME --> and <!-- /NAME --> in results/TABLES.md or docs/*.md, where sweeps/NAME.json is its
file. Runs that differ in their seed alone are one line: their mean, and each. Files in times/, of `msvit bench --runs`,
have tables too, with the accuracies of their sweep (times/NAME.json has the runs of sweeps/NAME.json or
NAME_curves.json, others are in `TIMED`), and some those of the scripts that made them (`MADE`).
"""

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import agreement
import numpy as np
import robustness
from shared import ROOT, by_setting, markdown, put, readable, script_parser, setting, source_line

from msvit_lab.evaluation_files import METRICS, OWN
from msvit_lab.json_values import write_json
from msvit_lab.runs import Run, is_evaluated, read_config

KEPT = (
    "top1", "top5", "miou", "pixel_accuracy", "class_accuracy", "fine_share", "img_size", "num_images",
    "fine_on_object", "fine_on_ground",
)  # fmt: skip
TIMED = {  # files of times: the sweep whose runs they are, and the file that has the times of its dense runs
    "times/pets_reducers": ("pets_curves", "times/pets"), "times/pets_cpu": ("pets_curves", "times/pets_cpu"),
}
MADE = {
    "gates/robustness": robustness.table, "gates/cub_robustness": robustness.table,
    "gates/cub_agreement": agreement.table,
}  # fmt: skip


def collect(folder: Path, command: str, commit: str, against: str | None = "own") -> dict[str, Any]:
    """One record of all evaluated runs in a folder, also at other sizes than they were trained at.

    `against`: whose dense runs they are compared with, their own or those of another file, by its name; or None.
    """
    runs: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for path in sorted(filter(is_evaluated, folder.glob("*"))):
        evaluations, about = Run(path).evaluations, read_config(path)
        config = about["config"]
        for name in (OWN, *sorted(each.stem for each in path.glob("evaluations/[0-9]*px.json"))):
            found = evaluations[name]
            run_name = path.name if name == OWN else f"{setting(path.name)}-at-{name}-s{config.seed}"
            run = {"name": run_name, "seed": config.seed, "gate": config.model.gate, "reducer": found.get("reducer")}
            run |= {"trained_at": config.data.img_size} if name != OWN else {}
            run |= {key: found[key] for key in KEPT if found.get(key) is not None}
            runs.append(run | {"tokens": found["tokens"]["mean"], "gmacs": found["gmacs"]["mean"]})
    if not runs:
        raise SystemExit(f"{folder} has no evaluated run; finish msvit sweep first")
    task = about["config"].task
    record = {key: about[key] for key in ("recipe", "machine", "versions")}
    return {"task": task, "command": command, "commit": commit, "against": against, **record, "runs": runs}


def table(results: dict[str, Any], others: dict[str, Any] | None) -> str:
    """Markdown: a line per setting, the dense ones first, then by cost.

    `others` have the dense runs to compare with, each setting with those of its seeds.
    """
    key, name = METRICS[results["task"]].key, METRICS[results["task"]].name
    compared = ["of dense", "against dense", "above the dense curve"] if others else []
    heads = ["run", "input", "tokens", "GMACs", *compared, f"{name}, mean", f"{name}, each seed"]
    rows = []
    in_order = sorted(results["runs"], key=lambda run: run["seed"])
    groups = {group: (mean_of(runs, "gmacs"), runs) for group, runs in by_setting(in_order).items()}
    for group, (gmacs, runs) in sorted(groups.items(), key=lambda item: (not is_dense(item[1][1][0]), -item[1][0])):
        score, tokens = mean_of(runs, key), mean_of(runs, "tokens")
        cells = [readable(group), f"{runs[0]['img_size']} px", f"{tokens:.0f}", f"{gmacs:.2f}"]
        if others:
            costs = {name: mean_of(own, "gmacs") for name, own in by_setting(others["runs"]).items()}
            curve = dense_curve(others["runs"], {run["seed"] for run in runs}, key, costs)
            cells += [f"{gmacs / curve[-1][0]:.0%}", f"{100 * (score - curve[-1][1]):+.1f}"]
            cells.append("" if is_dense(runs[0]) else above(curve, gmacs, score))
        each = ", ".join(f"{100 * run[key]:.1f}" for run in runs)
        rows.append([*cells, f"**{100 * score:.1f}**", each])
    return markdown(heads, rows, source_line(results))


def dense_curve(
    runs: list[dict[str, Any]], seeds: set[int], key: str, cost: dict[str, float]
) -> list[tuple[float, float]]:
    """Cost and score of dense runs, means over these seeds, the largest input last."""
    groups = by_setting([run for run in runs if is_dense(run) and run["seed"] in seeds])
    if not groups:
        raise SystemExit(f"there are no dense runs of the seeds {sorted(seeds)} to compare with; train them first")
    return sorted((cost[name], mean_of(own, key)) for name, own in groups.items() if name in cost)


def mean_of(runs: list[dict[str, Any]], key: str) -> float:
    return mean(run[key] for run in runs)


def is_dense(run: dict[str, Any]) -> bool:
    return run["gate"] == "none" and run.get("reducer") is None and "trained_at" not in run


def above(curve: list[tuple[float, float]], cost: float, score: float) -> str:
    """Points over what the dense runs have at that cost, on the line between two of them; nothing beyond their ends."""
    if not curve[0][0] <= cost <= curve[-1][0]:
        return ""
    there = float(np.interp(cost, *zip(*curve, strict=True)))
    return f"{round(100 * (score - there), 1) + 0.0:+.1f}"  # + 0: not -0.0


def time_table(times: dict[str, Any], sweep: dict[str, Any], dense: dict[str, Any]) -> str:
    """Markdown: a line per timed run, with the accuracy of its setting in the sweep.

    Time is held against the baseline of the same file, so that runs can be compared with the dense ones of another.
    """
    metric, groups = METRICS[sweep["task"]], by_setting(sweep["runs"])
    heads = ["run", "tokens", "GMACs", "ms", "images a second", "speed-up", f"{metric.name}, mean"]
    heads.append("above the dense curve at equal time")
    rows = []
    taken = {setting(row["name"]): 1 / row["speed_up"]["median"] for row in dense["rows"]}  # over its file's baseline
    plain = {name for name, runs in groups.items() if is_dense(runs[0])}
    for row in sorted(times["rows"], key=lambda row: (setting(row["name"]) not in plain, row["speed_up"]["median"])):
        name, faster = setting(row["name"]), row["speed_up"]["median"]
        score = mean_of(groups[name], metric.key)
        cells = [readable(name), f"{row['tokens']:.0f}", f"{row['gmacs']:.2f}", f"{row['ms']['median']:.2f}"]
        cells += [f"{row['images_per_second']:,.0f}", f"{faster:.2f}x", f"**{100 * score:.1f}**"]
        curve = dense_curve(sweep["runs"], {run["seed"] for run in groups[name]}, metric.key, taken)
        cells.append("" if name in plain else above(curve, 1 / faster, score))
        rows.append(cells)
    made = times["record"]
    how = f"{made['machine']}, {times['dtype']}, batch {times['batch']}"
    return markdown(heads, rows, source_line({**made, "machine": how}))


def tables(results: Path) -> dict[str, str]:
    """Of all sweeps, and of the files named above."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("sweeps/*.json"))}
    others = {stem: each if each["against"] == "own" else found.get(each["against"]) for stem, each in found.items()}
    texts = {stem: table(each, others[stem]) for stem, each in found.items()}
    timed = {f"times/{path.stem}": timed_runs(path.stem, set(found)) for path in sorted(results.glob("times/*.json"))}
    if lost := [stem for stem, (sweep, _) in timed.items() if sweep not in found]:
        raise SystemExit(f"TIMED does not say whose runs {', '.join(lost)} has times of; add it there")
    made = {stem: make for stem, make in MADE.items() if (results / f"{stem}.json").is_file()}
    more = {stem: json.loads((results / f"{stem}.json").read_text()) for stem in (*timed, *made)}
    texts |= {stem: time_table(more[stem], found[sweep], more[dense]) for stem, (sweep, dense) in timed.items()}
    return texts | {stem: make(more[stem]) for stem, make in made.items()}


def timed_runs(name: str, sweeps: set[str]) -> tuple[str, str]:
    """The sweep whose runs times/NAME.json has, and the file with the times of its dense runs: mostly itself."""
    own = name if name in sweeps else re.sub(r"(384)?$", r"_curves\1", name, count=1)
    return TIMED.get(f"times/{name}", (own, f"times/{name}"))


def main() -> None:
    parser = script_parser(__doc__, results=False)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--command", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--against", default="own", help="whose dense runs: own, another file's name, or none")
    given = parser.parse_args()
    if (given.folder is None) != (given.out is None):
        parser.error("a folder and --out go together")
    if given.folder is not None:
        against = None if given.against == "none" else given.against
        write_json(given.out, collect(given.folder, given.command, given.commit, against))
    results = ROOT / "benchmarks/results"
    for stem, text in tables(results).items():
        for page in sorted([*(ROOT / "docs").glob("*.md"), *results.glob("*.md")]):
            if f"<!-- {stem} -->" in page.read_text():
                put(page, stem, text)


if __name__ == "__main__":
    main()
