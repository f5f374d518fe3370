"""The README's tables of speed: each made from one file, by one command, on one machine, at one commit.

    msvit bench --suite readme --images PHOTOS --out benchmarks/results/readme.json      # on a GPU
    msvit bench --suite cpu --images PHOTOS --out benchmarks/results/readme_cpu.json
    python benchmarks/table.py            # writes them between <!-- bench --> and <!-- /bench --> in README.md, and
                                          # what else the files know in docs/performance.md

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
PAGES = {"README.md": False, "docs/performance.md": True}  # with details?
START, END = "<!-- bench -->", "<!-- /bench -->"
NAMES = {"vit_small": "ViT-S", "vit_base": "ViT-B", "vit_large": "ViT-L", "swin_tiny": "Swin-T", "deit_small": "DeiT-S"}
HEAD = """| | gate | tokens | MACs | dense | all tokens | msvit | over dense | over all tokens |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
DETAILS = """| | gate | share | share of fewer tokens | floor | MB dense | MB all tokens | MB msvit |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
MANNERS = {"dense": "the host as it is", "dense compiled": "the host under `torch.compile`"}
GATES = {PACKED: "learned", SHIPPED: "shipped"}


def make_tables(folder: Path, details: bool = False) -> str:
    """Markdown: one table for each file, or a sentence that says there is none."""
    files = sorted(folder.glob(FILES))
    return "\n\n".join(make_table(path, details) for path in files) or NOTHING


def make_table(path: Path, details: bool = False) -> str:
    """A line for each workload and gate, then where the lines are from."""
    works = [work for work in read_results(path) if not work["asked"].get("reducers")]
    lines = [line for work in works for line in lines_of(work, details)]
    sources = {source_of(work) for work in works}
    if not lines:
        raise ValueError(f"{path} holds nothing to show; measure with msvit bench --suite readme --out {path}")
    if len(sources) > 1:
        raise ValueError(f"{path} mixes {'; '.join(sorted(sources))}; measure all of it again, at one commit")
    command, dense = (works[0]["record"]["command"], works[0]["baseline"])
    source = f"{sources.pop()}; dense is {MANNERS[dense]}; `{command}`."
    return "\n".join([DETAILS if details else HEAD, *lines, "", source])


def lines_of(work: dict[str, Any], details: bool = False) -> list[str]:
    rows = {row["name"]: row for row in work["rows"] if row["trouble"] is None}
    base, whole = rows.get(work["baseline"]), rows.get(ALL_FINE)
    if base is None or whole is None:
        return []
    step = ", training step" if work["train"] else ""
    images = "1 image" if work["batch"] == 1 else f"{work['batch']} images"
    name = f"{model_name(work)}, {work['size']} px, {images}{step}"
    lines = []
    for shown, gate in GATES.items():
        if (row := rows.get(shown)) is None:
            continue
        if details:
            shares = f"{row['share']:.2f} | {row['tokens_share']:.2f}"
            memory = " | ".join(megabytes(each) for each in (base, whole, row))
            lines.append(f"| {name} | {gate} | {shares} | {floor(row)} | {memory} |")
        else:
            lines.append(
                f"| {name} | {gate} | {row['tokens']:.0f} of {work['tokens']['dense']} | 1/{row['mac_ratio']:.2f} "
                f"| {milliseconds(base, work)} | {milliseconds(whole, work)} | {milliseconds(row, work)} "
                f"| **{row['speed_up']['median']:.2f}x** | {row['speed_up_over_all_tokens']['median']:.2f}x |"
            )
    return lines


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
    for name, details in PAGES.items():
        page = ROOT / name
        text = put(page.read_text(), make_tables(ROOT / RESULTS, details))
        with replacing(page) as part:
            part.write_text(text)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
