"""What came of a sweep, in one file of results, and as a table in the docs.

    python benchmarks/collect.py runs/voc-sweep --out benchmarks/results/sweeps/voc.json --commit 1a2b3c4 \\
        --command "msvit sweep voc ..."
    python benchmarks/collect.py            # writes the tables of all such files into docs/

A table stands between <!-- NAME --> and <!-- /NAME --> in docs/*.md, where NAME.json is its file. Runs that differ in
their seed alone are one line: their mean, and each. No number is typed by hand.
"""

import argparse
import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from msvit.atomic import replacing
from msvit.training.run import read_config, write_json

ROOT = Path(__file__).resolve().parents[1]
METRICS = {"classify": ("top1", "top-1"), "segment": ("miou", "mIoU")}
KEPT = ("top1", "top5", "miou", "pixel_accuracy", "class_accuracy", "fine_share", "img_size", "num_images")
KNOWN = ("fine_on_object", "fine_on_ground")  # if the data has masks of what is labelled
MAPS = ("mask_mean", "mask_var")


def collect(folder: Path, command: str, commit: str, maps: bool = False) -> dict[str, Any]:
    """One record of all evaluated runs in a folder; with `maps`, also where their cells are fine, and their priors."""
    runs: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for path in sorted(folder.glob("*/eval.json")):
        found, about = json.loads(path.read_text()), read_config(path.parent)
        run = {"name": path.parent.name, "seed": about["config"].seed, "gate": about["config"].model.gate}
        run |= {"reducer": found.get("reducer")}
        run |= {key: found[key] for key in KEPT if key in found}
        run |= {key: found[key] for key in KNOWN if found.get(key) is not None}
        run |= {"tokens": found["tokens"]["mean"], "gmacs": found["gmacs"]["mean"]}
        if maps:
            run |= {key: rounded(found[key]) for key in MAPS} | {"priors": priors(path.parent)}
        runs.append(run)
    if not runs:
        raise SystemExit(f"{folder} has no evaluated run; finish msvit sweep first")
    task = about["config"].task
    record = {key: about[key] for key in ("recipe", "machine", "versions")}
    return {"task": task, "command": command, "commit": commit, **record, "runs": runs}


def priors(run: Path) -> list[dict[str, Any]]:
    """What a gate loss expected of each cell, whenever it was looked at."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{"step": line["step"], "theta": rounded(line["theta"])} for line in lines if line["kind"] == "prior"]


def rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in rows]


def table(results: dict[str, Any], others: dict[str, Any] | None = None) -> str:
    """Markdown: a line a setting, the dense ones first, then by cost. `others` have dense runs if these have none."""
    key, name = METRICS[results["task"]]
    groups = by_setting(results["runs"])
    dense = {group: runs for group, runs in by_setting((others or results)["runs"]).items() if is_dense(runs[0])}
    curve = sorted((mean(run["gmacs"] for run in runs), mean(run[key] for run in runs)) for runs in dense.values())
    full_cost, full_score = curve[-1]
    lines = [
        f"| run | input | tokens | GMACs | of dense | {name}, mean | against dense | above the dense curve "
        f"| {name}, each seed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for group, runs in sorted(groups.items(), key=lambda item: (not is_dense(item[1][0]), -item[1][0]["gmacs"])):
        gmacs, score = (mean(run[what] for run in runs) for what in ("gmacs", key))
        gain = "" if is_dense(runs[0]) else above(curve, gmacs, score)
        each = ", ".join(f"{100 * run[key]:.1f}" for run in runs)
        lines.append(
            f"| {group} | {runs[0]['img_size']} px | {mean(run['tokens'] for run in runs):.0f} | {gmacs:.2f} "
            f"| {gmacs / full_cost:.0%} | **{100 * score:.1f}** | {100 * (score - full_score):+.1f} | {gain} | {each} |"
        )
    source = f"`{results['command']}`, {results['machine']}, commit {results['commit']}."
    return "\n".join([*lines, "", source])


def by_setting(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ in their seed alone."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        groups.setdefault(re.sub(r"-s\d+$", "", run["name"]), []).append(run)
    return groups


def is_dense(run: dict[str, Any]) -> bool:
    return run["gate"] == "none" and run.get("reducer") is None


def above(curve: list[tuple[float, float]], gmacs: float, score: float) -> str:
    """Points over what the dense runs have at that cost, on the line between two of them; nothing beyond their ends."""
    for (cost, low), (next_cost, high) in pairwise(curve):
        if cost <= gmacs <= next_cost:
            there = low + (high - low) * (gmacs - cost) / (next_cost - cost)
            return f"{100 * (score - there):+.1f}"
    return ""


def tables(results: Path) -> dict[str, str]:
    """Of every file. Those whose runs start from a dense run are held against the curve of NAME_curves.json."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    own = {stem: any(is_dense(run) for run in each["runs"]) for stem, each in found.items()}
    curves = {stem: found.get(f"{stem.split('_')[0]}_curves") for stem in found}
    return {stem: table(each, None if own[stem] else curves[stem]) for stem, each in found.items()}


def write_tables(docs: Path, results: Path) -> None:
    for stem, text in tables(results).items():
        start, end = f"<!-- {stem} -->", f"<!-- /{stem} -->"
        for page in sorted(docs.glob("*.md")):
            before, mark, rest = page.read_text().partition(start)
            if mark:
                after = rest.partition(end)[2]
                with replacing(page) as part:
                    part.write_text(f"{before}{start}\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--command", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--maps", action="store_true", help="keep where cells are fine, for benchmarks/maps.py")
    given = parser.parse_args()
    if given.folder is not None:
        write_json(given.out, collect(given.folder, given.command, given.commit, given.maps))
    write_tables(ROOT / "docs", ROOT / "benchmarks/results/sweeps")


if __name__ == "__main__":
    main()
