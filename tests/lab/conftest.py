"""Runs that the tests of the laboratory share: trained once, and copied before anything in them is changed."""

import shutil
from pathlib import Path

import pytest
from smoke_runs import smoke

from msvit_lab.evaluate import evaluate_run
from msvit_lab.training.loop import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, as a sweep leaves it: one gated, one dense, one not evaluated. Not to be changed."""
    folder = tmp_path_factory.mktemp("sweep")
    for name, gate in (("gated", "learned"), ("dense", "none")):
        train(smoke(model__gate=gate), folder / name, recipe="scenes", quiet=True)
        evaluate_run(folder / name, rounds=2)
    shutil.copytree(folder / "gated", folder / "begun", ignore=shutil.ignore_patterns("evaluations"))
    return folder


@pytest.fixture
def tiny_run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the gated run, to be changed."""
    return shutil.copytree(trained / "gated", tmp_path / "run")
