"""Tables of what gate_study.py and gate_release.py measured: rows of their JSON, a line per method."""

from collections import defaultdict
from collections.abc import Callable
from statistics import mean
from typing import Any

from shared import markdown, source_line

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
