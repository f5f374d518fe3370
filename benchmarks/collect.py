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
from pathlib import Path
from statistics import mean
from typing import Any

from msvit.atomic import replacing
from msvit.training.run import read_config, write_json

ROOT = Path(__file__).resolve().parents[1]
METRICS = {"classify": ("top1", "top-1"), "segment": ("miou", "mIoU")}
KEPT = ("top1", "top5", "miou", "pixel_accuracy", "class_accuracy", "fine_share", "img_size", "num_images")


def collect(folder: Path, command: str, commit: str) -> dict[str, Any]:
    """One record of all evaluated runs in a folder."""
    runs: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for path in sorted(folder.glob("*/eval.json")):
        found, about = json.loads(path.read_text()), read_config(path.parent)
        run = {"name": path.parent.name, "seed": about["config"].seed, "gate": about["config"].model.gate}
        run |= {key: found[key] for key in KEPT if key in found}
        run |= {"tokens": found["tokens"]["mean"], "gmacs": found["gmacs"]["mean"]}
        runs.append(run)
    if not runs:
        raise SystemExit(f"{folder} has no evaluated run; finish msvit sweep first")
    task = about["config"].task
    record = {key: about[key] for key in ("recipe", "machine", "versions")}
    return {"task": task, "command": command, "commit": commit, **record, "runs": runs}


def table(results: dict[str, Any]) -> str:
    """Markdown: a line a setting, the dense ones first, then by cost."""
    key, name = METRICS[results["task"]]
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(results["runs"], key=lambda run: run["seed"]):
        groups.setdefault(re.sub(r"-s\d+$", "", run["name"]), []).append(run)
    dense = {group: runs for group, runs in groups.items() if runs[0]["gate"] == "none"}
    full = max((runs for runs in dense.values()), key=lambda runs: runs[0]["gmacs"])
    lines = [f"| run | input | tokens | GMACs | of dense | {name}, mean | against dense | {name}, each seed |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for group, runs in sorted(groups.items(), key=lambda item: (item[0] not in dense, -item[1][0]["gmacs"])):
        gmacs, score = (mean(run[what] for run in runs) for what in ("gmacs", key))
        share, gap = gmacs / mean(run["gmacs"] for run in full), score - mean(run[key] for run in full)
        each = ", ".join(f"{100 * run[key]:.1f}" for run in runs)
        lines.append(
            f"| {group} | {runs[0]['img_size']} px | {mean(run['tokens'] for run in runs):.0f} | {gmacs:.2f} "
            f"| {share:.0%} | **{100 * score:.1f}** | {100 * gap:+.1f} | {each} |"
        )
    source = f"`{results['command']}`, {results['machine']}, commit {results['commit']}."
    return "\n".join([*lines, "", source])


def write_tables(docs: Path, results: Path) -> None:
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text())
        start, end = f"<!-- {path.stem} -->", f"<!-- /{path.stem} -->"
        for page in sorted(docs.glob("*.md")):
            before, mark, rest = page.read_text().partition(start)
            if mark:
                after = rest.partition(end)[2]
                with replacing(page) as part:
                    part.write_text(f"{before}{start}\n{table(found)}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--command", default="")
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    if given.folder is not None:
        write_json(given.out, collect(given.folder, given.command, given.commit))
    write_tables(ROOT / "docs", ROOT / "benchmarks/results/sweeps")


if __name__ == "__main__":
    main()
