"""Tables of what gate_study.py and gate_release.py measured: rows of their JSON, a line per method.

    python benchmarks/gate_tables.py cub_s0.json cub_s1.json --out benchmarks/results/gate_study/seeds.json \\
        --command "python benchmarks/gate_study.py evaluate --dense cub=RUN,RUN --gates GATES"

Such a command puts the rows of several files into one, which benchmarks/collect.py makes a table of; rows of other sets
and seeds that this one had before stay in it.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from shared import markdown, run_script, script_parser, source_line

from msvit_lab.json_values import write_json

BASELINES = ("disc", "random")
SHIPPED = "shipped"
LEGEND = "Top-1 in %; KL: divergence from the dense model x 1000; tokens +- std between images. Means over models."
BRIEF = ("top-1", "KL", "tokens")  # in a table of all sets


CELLS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "top-1": lambda rows: f"{100 * mean_of(rows, 'top1'):.2f}",
    "each model": lambda rows: ", ".join(f"{100 * row['top1']:.2f}" for row in rows),
    "KL": lambda rows: f"{1000 * mean_of(rows, 'kl'):.1f}",
    "tokens": lambda rows: f"{mean_of(rows, 'tokens'):.0f} +- {mean_of(rows, 'tokens_std'):.0f}",
}


def tables(results: dict[str, Any]) -> str:
    """For each set a line per method: top-1 at every budget, and more of the one in the middle."""
    text = []
    for name, rows in grouped(results["rows"], lambda row: row["set"]).items():
        budgets = [1.0, *sorted({row["wanted"] for row in rows} - {None}, reverse=True)]
        middle = budgets[len(budgets) // 2]
        columns = [(name, wanted, "top-1") for wanted in budgets]
        columns += [(name, middle, what) for what in ("each model", "KL", "tokens")]
        heads = [shown_set(name), *(f"{100 * wanted:.0f} %" for wanted in budgets)]
        heads += [f"{what}, {100 * middle:.0f} %" for _, _, what in columns[len(budgets) :]]
        text.append(markdown(heads, method_lines(rows, columns), "").rstrip())
    return "\n\n".join([*text, f"{LEGEND}\n{source_line(results)}"])


def target_table(results: dict[str, Any], wanted: float = 0.6) -> str:
    """A line per method, with all sets side by side, at one budget that images share freely if they can.

    Of proportional attention only what it does with the gate that is shipped.
    """
    rows = [row for row in results["rows"] if row["budget"] != "per_image" or row["method"] in BASELINES]
    rows = [row for row in rows if ", area" not in row["method"] or row["method"].startswith(SHIPPED)]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    columns = [(name, *each) for name in sets for each in ((1.0, "top-1"), *((wanted, what) for what in BRIEF))]
    heads = [f"{shown_set(name)}, {100 * part:.0f} %: {what}" for name, part, what in columns]
    return markdown(["", *heads], method_lines(rows, columns), f"{LEGEND}\n{source_line(results)}")


def method_lines(rows: list[dict[str, Any]], columns: list[tuple[str, float, str]]) -> list[list[str]]:
    """A line per method, with a cell for each column: of a set, at a share of the multiply-adds, what.

    Methods that choose the same cells, as levels of attention do, are one line: the first.
    """
    lines: dict[tuple[str, ...], list[str]] = {}
    for method, own in grouped(rows, shown_method).items():
        found = [[row for row in own if row["set"] == name and near(row, part)] for name, part, _ in columns]
        cells = tuple(CELLS[column[2]](at) if at else "" for column, at in zip(columns, found, strict=True))
        lines.setdefault(cells, [method, *cells])
    return [line for cells, line in lines.items() if any(cells)]


def grouped(rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def near(row: dict[str, Any], part: float) -> bool:
    """Whether a row has this share of the multiply-adds, or wanted it."""
    return abs((row["wanted"] or row["macs"]) - part) < 0.005


def mean_of(rows: list[dict[str, Any]], key: str) -> float:
    return mean(row[key] for row in rows)


def shown_set(name: str) -> str:
    return {"pets": "Pets", "cub": "CUB", "voc": "VOC"}.get(name, name)


def shown_method(row: dict[str, Any]) -> str:
    """What readers call it. A dense model on all sizes of its input is one method."""
    if row["budget"] == "dense":
        return "dense, smaller inputs"
    name, _, area = row["method"].partition(", area ")
    words = ["shipped gate" if name == SHIPPED else name if name in BASELINES or "oracle" in name else f"gate {name}"]
    words += [f"proportional attention {area}"] if area else []
    words += ["`per_image`"] if row["budget"] == "per_image" and name not in BASELINES else []
    return ", ".join(words)


def joined(files: list[dict[str, Any]], command: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """One file of results with the rows of several, and of `before` those of other sets and seeds; by set and seed."""
    new = {origin(row) for file in files for row in file["rows"]}
    old = before or {"rows": []}
    stay = [row for row in old["rows"] if origin(row) not in new]
    parts = [old, *files] if stay else files
    sets = list(dict.fromkeys(origin(row)[0] for part in (old, *files) for row in part["rows"]))
    rows = [*stay, *(row for file in files for row in file["rows"])]
    return files[0] | {
        "commit": ", ".join(dict.fromkeys(name for part in parts for name in str(part["commit"]).split(", "))),
        "command": command,
        "commands": list(dict.fromkeys(line for part in parts for line in part.get("commands", [part["command"]]))),
        "rows": sorted(rows, key=lambda row: (sets.index(origin(row)[0]), origin(row)[1])),
    }  # fmt: skip


def origin(row: dict[str, Any]) -> tuple[str, int]:
    """The set and the seed of the model that a row is of; rows of Segmenters have no set."""
    seed = re.search(r"-s(\d+)$", row.get("model") or row["run"])
    return row.get("set", ""), int(seed[1]) if seed else -1


def main() -> None:
    parser = script_parser(__doc__, results=False)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--command", required=True, help="shown below the table")
    args = parser.parse_args()
    before = json.loads(args.out.read_text()) if args.out.is_file() else None
    found = [json.loads(file.read_text()) for file in args.files]
    if empty := [str(file) for file, part in zip(args.files, found, strict=True) if not part.get("rows")]:
        raise ValueError(f"{', '.join(empty)} has no rows; leave it out")
    write_json(args.out, joined(found, args.command, before))


if __name__ == "__main__":
    run_script(main)
