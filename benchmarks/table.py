"""The README's table of speed, made from the files of `msvit bench` in benchmarks/results.

    python benchmarks/table.py            # writes it between <!-- bench --> and <!-- /bench --> in README.md

The row shown of each workload is the way to run mixed-scale tokens that is meant for use: accelerated, else compiled,
else plain. No number is typed by hand.
"""

import sys
from pathlib import Path
from typing import Any

from msvit.atomic import replacing
from msvit.bench.results import read_results

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- bench -->", "<!-- /bench -->"
SHOWN = ("packed accelerated", "packed compiled", "packed")
NAMES = {"vit_small": "ViT-S", "vit_base": "ViT-B", "vit_large": "ViT-L", "swin_tiny": "Swin-T"}
HEAD = "| | tokens | multiply-adds | dense | msvit | speed-up | share |\n| --- | --- | --- | --- | --- | --- | --- |"


def make_table(files: list[Path]) -> str:
    """Markdown: a line a workload, then where the lines are from."""
    found = [work for path in files for work in read_results(path)]
    found.sort(key=lambda work: work["device"] != "cuda")  # GPUs first
    lines, sources = [], {}
    for work in found:
        source = sources.setdefault(source_of(work), len(sources) + 1)
        if (line := line_of(work, source)) is not None:
            lines.append(line)
    if not lines:
        raise ValueError(f"{len(files)} files of results hold nothing to show; measure with msvit bench --out first")
    notes = [f"<sup>{number}</sup> {text}" for text, number in sources.items()]
    return "\n".join([HEAD, *lines]) + "\n\n" + "<br>\n".join(notes) + "<br>\nCommands are in `benchmarks/results`."


def line_of(work: dict[str, Any], source: int) -> str | None:
    rows = {row["name"]: row for row in work["rows"] if row["trouble"] is None}
    shown = next((rows[name] for name in SHOWN if name in rows), None)
    base = rows.get(work["baseline"])
    if shown is None or base is None:
        return None
    step = ", training step" if work["train"] else ""
    images = "1 image" if work["batch"] == 1 else f"{work['batch']} images"
    name = f"{model_name(work)}, {work['size']} px, {images}{step}"
    return (
        f"| {name} <sup>{source}</sup> | {work['tokens']['mean']:.0f} of {work['tokens']['dense']} "
        f"| {work['mac_ratio']:.2f}x fewer | {milliseconds(base, work)} | {milliseconds(shown, work)} "
        f"| **{shown['speed_up']['median']:.2f}x** | {shown['share']:.2f} |"
    )


def milliseconds(row: dict[str, Any], work: dict[str, Any]) -> str:
    ms = row["burst_ms"] if work["basis"] == "calls back to back" else row["ms"]
    manner = row["name"].removeprefix("dense").removeprefix("packed").strip() or "eager"
    return f"{ms['median']:.3g} ms ({manner})"


def model_name(work: dict[str, Any]) -> str:
    """vit_small_patch16_224 is known as ViT-S/16; other models keep timm's name. A Swin's `merge_at` belongs to it."""
    name, enters = work["model"], work.get("asked", {}).get("settings", {}).get("model.merge_at")
    short = next((short for start, short in NAMES.items() if name.startswith(f"{start}_patch")), f"`{name}`")
    if enters is not None:
        return f"{short}, `merge_at={enters}`"
    return short if short.startswith("`") else f"{short}/{work['fine']}"


def source_of(work: dict[str, Any]) -> str:
    record = work["record"]
    commit = f"commit {record['commit'] or 'unknown'}{' and changes' if record['dirty'] else ''}"
    return f"{record['machine']}, {work['dtype']}, torch {record['versions']['torch']}, {commit}"


def put(text: str, table: str) -> str:
    """The text with the table between the marks."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the README has no place for the table; put {START} and {END} around it")
    return f"{before}{START}\n{table}\n{END}{after}"


def result_files() -> list[Path]:
    return sorted((ROOT / "benchmarks/results").glob("*.json"))


def main() -> None:
    readme = ROOT / "README.md"
    text = put(readme.read_text(), make_table(result_files()))
    with replacing(readme) as part:
        part.write_text(text)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
