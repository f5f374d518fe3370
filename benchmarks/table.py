"""The tables of speed in README and docs: each made from one file, by one command, on one machine, at one commit.

    msvit bench --suite readme --images PHOTOS --out benchmarks/results/readme.json      # on a GPU
    msvit bench --suite cpu --images PHOTOS --out benchmarks/results/readme_cpu.json
    python benchmarks/table.py            # writes them between <!-- bench --> and <!-- /bench --> in README.md (in
                                          # brief, where they are from at its end) and docs/performance.md

Beside the compiled host stands our own path with all tokens: the first speed-up is what a user gains, the second what
fewer tokens alone save. For one image the host is timed as CUDA graphs too (`torch.compile(mode="reduce-overhead")`);
files from before that have no such column. No number is typed by hand.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shared import ROOT, markdown, put, run_script

from msvit_lab.bench.results import read_results
from msvit_lab.bench.rows import ALL_FINE, DENSE_GRAPHS, PACKED, SHIPPED

RESULTS = "benchmarks/results"
FILES = {"brief": "readme.json", "full": "readme*.json"}
NOTHING = "Nothing has been measured at this commit yet."
PAGES = {"README.md": "brief", "docs/performance.md": "full"}
NAMES = {"vit_small": "ViT-S", "vit_base": "ViT-B", "vit_large": "ViT-L", "swin_tiny": "Swin-T", "deit_small": "DeiT-S"}
MANNERS = {"dense": "the host as it is", "dense compiled": "the host under `torch.compile`"}
GATES = {"brief": {SHIPPED: "shipped"}, "full": {PACKED: "learned", SHIPPED: "shipped"}}

Row = dict[str, Any]


class Line(NamedTuple):
    work: dict[str, Any]
    gate: str
    dense: Row
    graphs: Row | None  # dense by CUDA graphs, where it was timed: for one image
    whole: Row  # all tokens
    row: Row  # what the line is of


COLUMNS: list[tuple[str | None, str, Callable[[Line], str]]] = [  # head in brief, if it is there; head in full; cell
    ("", "", lambda line: work_name(line.work)),
    (None, "gate", lambda line: line.gate),
    ("tokens", "tokens", lambda line: f"{line.row['tokens']:.0f} of {line.work['tokens']['dense']}"),
    ("multiply-adds", "MACs", lambda line: f"1/{line.row['mac_ratio']:.2f}"),
    ("dense", "dense", lambda line: milliseconds(line.dense, line.work)),
    (None, "dense, CUDA graphs", lambda line: "" if line.graphs is None else milliseconds(line.graphs, line.work)),
    (None, "all tokens", lambda line: milliseconds(line.whole, line.work)),
    ("msvit", "msvit", lambda line: milliseconds(line.row, line.work)),
    ("speed-up", "over dense", lambda line: f"{line.row['speed_up']['median']:.2f}x"),
    (
        "by fewer tokens alone",
        "over all tokens",
        lambda line: f"**{line.row['speed_up_over_all_tokens']['median']:.2f}x**",
    ),
    (None, "share", lambda line: f"{line.row['share']:.2f}"),
    (None, "share of fewer tokens", lambda line: f"{line.row['tokens_share']:.2f}"),
    (None, "floor", lambda line: floor(line.row)),
    (None, "MB dense", lambda line: megabytes(line.dense)),
    (None, "MB all tokens", lambda line: megabytes(line.whole)),
    (None, "MB msvit", lambda line: megabytes(line.row)),
]


def make_table(path: Path, kind: str) -> str:
    """A line for each workload and gate, then where the lines are from. Brief: inference with the shipped gate."""
    works = [work for work in read_results(path) if not work["asked"].get("reducers")]
    shown = [(brief if kind == "brief" else full, cell) for brief, full, cell in COLUMNS]
    columns = {head: cell for head, cell in shown if head is not None}
    found = [line for work in works if kind == "full" or not work["train"] for line in lines(work, GATES[kind])]
    sources = {source_of(work) for work in works}
    if not found:
        raise ValueError(f"{path} holds nothing to show; measure with msvit bench --suite readme --out {path}")
    if len(sources) > 1:
        raise ValueError(f"{path} mixes {'; '.join(sorted(sources))}; measure all of it again, at one commit")
    source = f"{sources.pop()}; dense is {MANNERS[works[0]['baseline']]};\n`{works[0]['record']['command']}`."
    cells = {head: [cell(line) for line in found] for head, cell in columns.items()}
    cells = {head: column for head, column in cells.items() if any(column)}  # what no line has is no column
    rows = [list(row) for row in zip(*cells.values(), strict=True)]
    return markdown(list(cells), rows, source).replace("|  |", "| |")


def lines(work: dict[str, Any], gates: dict[str, str]) -> list[Line]:
    """Of a workload; none where host or all tokens could not be timed."""
    rows = {row["name"]: row for row in work["rows"] if row["trouble"] is None}
    if work["baseline"] not in rows or ALL_FINE not in rows:
        return []
    beside = (rows[work["baseline"]], rows.get(DENSE_GRAPHS), rows[ALL_FINE])
    return [Line(work, gate, *beside, rows[name]) for name, gate in gates.items() if name in rows]


def work_name(work: dict[str, Any]) -> str:
    images = "1 image" if work["batch"] == 1 else f"{work['batch']} images"
    return f"{model_name(work)}, {work['size']} px, {images}{', training step' if work['train'] else ''}"


def megabytes(row: Row) -> str:
    """There are none on a CPU."""
    return f"{row['memory']['peak_mb']:,.0f}" if row["memory"] else ""


def floor(row: Row) -> str:
    """Multiply-adds and bytes at the machine's measured rates, one after the other."""
    floors = row["floors"]
    return "" if floors is None else f"{floors['matrix_ms'] + floors['traffic_ms']:.3g} ms"


def milliseconds(row: Row, work: dict[str, Any]) -> str:
    ms = row["burst_ms"] if work["basis"] == "calls back to back" else row["ms"]
    return f"{ms['median']:.3g} ms"


def model_name(work: dict[str, Any]) -> str:
    """vit_small_patch16_224 is known as ViT-S/16; other models keep timm's name. A Swin's `merge_at` belongs to it."""
    name, enters = work["model"], work["asked"].get("settings", {}).get("model.merge_at")
    short = next((short for start, short in NAMES.items() if name.startswith(f"{start}_patch")), f"`{name}`")
    if enters is not None:
        return f"{short}, `merge_at={enters}`"
    return short if short.startswith("`") else f"{short}/{work['fine']}"


def source_of(work: dict[str, Any]) -> str:
    record = work["record"]
    commit = f"commit {record['commit'] or 'unknown'}{' and changes' if record['dirty'] else ''}"
    return f"{record['machine']}, {work['dtype']}, torch {record['versions']['torch']}, {commit}"


def parts(folder: Path, kind: str) -> dict[str, str]:
    """What stands between the marks of a page: one table for each file, or a sentence that says there is none.

    In brief tables have no caption: their source is at the page's end.
    """
    made = "\n\n".join(make_table(path, kind) for path in sorted(folder.glob(FILES[kind]))) or NOTHING
    if kind == "full":
        return {"bench": made}
    shown, _, source = made.partition("\n\n")
    return {"bench": shown, "bench-source": source}


def main() -> None:
    for name, kind in PAGES.items():
        for mark, text in parts(ROOT / RESULTS, kind).items():
            put(ROOT / name, mark, text)


if __name__ == "__main__":
    run_script(main)
