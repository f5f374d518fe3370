"""What came of a sweep: collected from its folders, and shown in the docs without a number typed by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script
from smoke_runs import smoke

from msvit.training.run import write_config, write_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def collect() -> Any:
    return load_script("collect")


def write_run(folder: Path, gate: str, seed: int, score: float, gmacs: float) -> None:
    folder.mkdir(parents=True)
    write_config(folder, smoke(task="segment", model__gate=gate, seed=seed), "voc", [])
    found = {"miou": score, "img_size": 64, "tokens": {"mean": 40.0}, "gmacs": {"mean": gmacs}, "latency": []}
    write_json(folder / "eval.json", found)


def test_seeds_are_one_line_with_their_mean_and_dense_comes_first(collect, tmp_path):
    write_run(tmp_path / "t0.5-w1-s0", "learned", 0, 0.61, 6.0)
    write_run(tmp_path / "t0.5-w1-s1", "learned", 1, 0.64, 6.2)
    write_run(tmp_path / "dense-64-s0", "none", 0, 0.66, 10.0)
    write_run(tmp_path / "dense-48-s0", "none", 0, 0.60, 5.0)
    (tmp_path / "begun-s0").mkdir()
    lines = collect.table(collect.collect(tmp_path, "msvit sweep voc", "abc")).splitlines()
    assert lines[2] == "| dense-64 | 64 px | 40 | 10.00 | 100% | **66.0** | +0.0 | 66.0 |"
    assert lines[3] == "| dense-48 | 64 px | 40 | 5.00 | 50% | **60.0** | -6.0 | 60.0 |"
    assert lines[4] == "| t0.5-w1 | 64 px | 40 | 6.10 | 61% | **62.5** | -3.5 | 61.0, 64.0 |"
    assert "`msvit sweep voc`" in lines[-1]
    assert "commit abc" in lines[-1]


def test_a_folder_without_evaluated_runs_is_refused(collect, tmp_path):
    with pytest.raises(SystemExit, match="no evaluated run"):
        collect.collect(tmp_path, "", "")


def test_the_docs_show_the_tables_of_the_results(collect):
    for path in (ROOT / "benchmarks/results/sweeps").glob("*.json"):
        pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
        table = f"<!-- {path.stem} -->\n{collect.table(json.loads(path.read_text()))}\n<!-- /{path.stem} -->"
        assert sum(table in page for page in pages) == 1, path.name
