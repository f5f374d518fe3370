"""Results: a JSON file of workloads, written anew after each, so that a run that is stopped keeps what it has.

    write_result(Path("benchmarks/results/h200.json"), found)     # takes the place of the same workload, if it is there
    read_results(path)                                            # a list of workloads
"""

import json
from pathlib import Path
from typing import Any

from msvit.lab.runs import write_json

FORMAT = 1
SAME = ("model", "size", "batch", "train", "device", "dtype", "asked")  # records that agree here are of one workload


def read_results(path: Path) -> list[dict[str, Any]]:
    try:
        about = json.loads(path.read_text())
        found, workloads = about["format"], about["workloads"]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no file of msvit bench ({type(error).__name__}); choose another --out") from None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, but this msvit reads format {FORMAT}; measure again")
    return workloads


def write_result(path: Path, found: dict[str, Any]) -> None:
    before = read_results(path) if path.exists() else []
    kept = [other for other in before if key(other) != key(found)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, "workloads": [*kept, found]})


def key(found: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(json.dumps(found.get(name), sort_keys=True) for name in SAME)
