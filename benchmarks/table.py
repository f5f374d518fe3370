"""The tables of speed in README and docs: each made from one file, by one command, on one machine, at one commit.

    msvit bench --suite readme --images PHOTOS --out benchmarks/results/readme.json      # on a GPU
    msvit bench --suite cpu --images PHOTOS --out benchmarks/results/readme_cpu.json
    python benchmarks/table.py            # writes them between <!-- bench --> and <!-- /bench --> in README.md (in
                                          # brief) and docs/performance.md

Beside the compiled host stands our own path with all tokens: the first speed-up is what a user gains, the second what
fewer tokens alone save. No number is typed by hand.
"""

import sys
from pathlib import Path
from typing import Any

from msvit.atomic import replacing
from msvit.lab.bench.results import read_results
from msvit.lab.bench.rows import ALL_FINE, PACKED, SHIPPED

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
FILES = "readme*.json"
NOTHING = "Nothing has been measured at this commit yet."
PAGES = {"README.md": "brief", "docs/performance.md": "full"}
START, END = "<!-- bench -->", "<!-- /bench -->"
NAMES = {"vit_small": "ViT-S", "vit_base": "ViT-B", "vit_large": "ViT-L", "swin_tiny": "Swin-T", "deit_small": "DeiT-S"}
HEADS = {
    "brief": ["", "tokens", "multiply-adds", "dense", "msvit", "speed-up", "by fewer tokens alone"],
    "full": [
        "", "gate", "tokens", "MACs", "dense", "all tokens", "msvit", "over dense", "over all tokens",
        "share", "share of fewer tokens", "floor", "MB dense", "MB all tokens", "MB msvit",
    ],
}  # fmt: skip
MANNERS = {"dense": "the host as it is", "dense compiled": "the host under `torch.compile`"}
GATES = {PACKED: "learned", SHIPPED: "shipped"}


def make_tables(folder: Path, kind: str) -> str:
    """Markdown: one table for each file, or a sentence that says there is none."""
    files = sorted(folder.glob(FILES))
    return "\n\n".join(make_table(path, kind) for path in files) or NOTHING


def make_table(path: Path, kind: str) -> str:
    """A line for each workload and gate, then where the lines are from. Brief: inference with the shipped gate."""
    works = [work for work in read_results(path) if not work["asked"].get("reducers")]
    make = {"brief": brief_cells, "full": full_cells}[kind]
    rows = [row for work in works if not (kind == "brief" and work["train"]) for row in make(work)]
    sources = {source_of(work) for work in works}
    if not rows:
        raise ValueError(f"{path} holds nothing to show; measure with msvit bench --suite readme --out {path}")
    if len(sources) > 1:
        raise ValueError(f"{path} mixes {'; '.join(sorted(sources))}; measure all of it again, at one commit")
    command, dense = (works[0]["record"]["command"], works[0]["baseline"])
    source = f"{sources.pop()}; dense is {MANNERS[dense]};\n`{command}`."
    head = HEADS[kind]
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows), "", source])


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def timed(work: dict[str, Any]) -> dict[str, Any] | None:
    """The rows of a workload by name, where host and all tokens could be timed."""
    rows = {row["name"]: row for row in work["rows"] if row["trouble"] is None}
    return rows if work["baseline"] in rows and ALL_FINE in rows else None


def brief_cells(work: dict[str, Any]) -> list[list[str]]:
    rows = timed(work)
    if rows is None or SHIPPED not in rows:
        return []
    row = rows[SHIPPED]
    return [[
        work_name(work), *cost(row, work), milliseconds(rows[work["baseline"]], work), milliseconds(row, work),
        f"**{row['speed_up']['median']:.2f}x**", f"{row['speed_up_over_all_tokens']['median']:.2f}x",
    ]]  # fmt: skip


def full_cells(work: dict[str, Any]) -> list[list[str]]:
    rows = timed(work)
    if rows is None:
        return []
    base, whole = rows[work["baseline"]], rows[ALL_FINE]
    return [
        [
            work_name(work), gate, *cost(row, work), *(milliseconds(each, work) for each in (base, whole, row)),
            f"**{row['speed_up']['median']:.2f}x**", f"{row['speed_up_over_all_tokens']['median']:.2f}x",
            f"{row['share']:.2f}", f"{row['tokens_share']:.2f}", floor(row), *map(megabytes, (base, whole, row)),
        ]
        for shown, gate in GATES.items()
        if (row := rows.get(shown)) is not None
    ]  # fmt: skip


def work_name(work: dict[str, Any]) -> str:
    images = "1 image" if work["batch"] == 1 else f"{work['batch']} images"
    return f"{model_name(work)}, {work['size']} px, {images}{', training step' if work['train'] else ''}"


def cost(row: dict[str, Any], work: dict[str, Any]) -> list[str]:
    return [f"{row['tokens']:.0f} of {work['tokens']['dense']}", f"1/{row['mac_ratio']:.2f}"]


def megabytes(row: dict[str, Any]) -> str:
    """There are none on a CPU."""
    return f"{row['memory']['peak_mb']:,.0f}" if row["memory"] else ""


def floor(row: dict[str, Any]) -> str:
    """Multiply-adds and bytes at the machine's measured rates, one after the other."""
    floors = row["floors"]
    return "" if floors is None else f"{floors['matrix_ms'] + floors['traffic_ms']:.3g} ms"


def milliseconds(row: dict[str, Any], work: dict[str, Any]) -> str:
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


def put(text: str, table: str) -> str:
    """The text with the table between the marks."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"there is no place for the table; put {START} and {END} around it")
    return f"{before}{START}\n{table}\n{END}{after}"


def main() -> None:
    for name, kind in PAGES.items():
        page = ROOT / name
        text = put(page.read_text(), make_tables(ROOT / RESULTS, kind))
        with replacing(page) as part:
            part.write_text(text)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
