"""Trained runs, timed side by side."""

import json

import pytest
from smoke_runs import smoke
from typer.testing import CliRunner

from msvit.lab.bench.trained import find_runs
from msvit.lab.cli import app
from msvit.lab.evaluate import evaluate_run
from msvit.lab.training.loop import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in {
        "dense-64-s0": {"model__gate": "none"},
        "dense-48-s0": {"model__gate": "none", "data__img_size": 48},
        "disc-s0": {"model__gate": "disc"},
        "tome-s0": {"model__gate": "none", "reducer__name": "tome", "reducer__r": 2},
    }.items():
        train(smoke(**changes), folder / name, quiet=True)
        evaluate_run(folder / name, rounds=0)
    (folder / "begun").mkdir()
    return folder


def test_runs_are_found_by_folder_and_by_pattern(runs, tmp_path):
    assert [path.name for path in find_runs(str(runs))] == ["dense-48-s0", "dense-64-s0", "disc-s0", "tome-s0"]
    assert find_runs(str(runs / "dense-64-s0")) == [runs / "dense-64-s0"]
    assert [path.name for path in find_runs(f"{runs}/d*-s0")] == ["dense-48-s0", "dense-64-s0", "disc-s0"]
    with pytest.raises(ValueError, match="has no evaluated run"):
        find_runs(str(tmp_path / "nothing"))


def test_every_run_has_its_accuracy_cost_and_time_and_the_largest_dense_one_is_the_measure(runs, tmp_path):
    arguments = ["bench", "--runs", str(runs), "--batch", "4", "--rounds", "4", "--out", str(tmp_path / "found.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["baseline"] == "dense-64-s0"
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["dense-64-s0"]["speed_up"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    for name, row in rows.items():
        assert row["ms"]["median"] > 0
        known = json.loads((runs / name / "evaluations/val.json").read_text())
        assert (row["top1"], row["gmacs"]) == (known["top1"], known["gmacs"]["mean"])
    assert found["record"]["command"].startswith("msvit")


def test_a_batch_that_is_too_large_is_answered(runs):
    result = CliRunner().invoke(app, ["bench", "--runs", str(runs), "--batch", "64"])
    assert result.exit_code == 2
    assert "has fewer validation images than a batch, 64; give a smaller --batch" in result.output
