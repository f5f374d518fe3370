from pathlib import Path

import pytest
from smoke_runs import smoke

from msvit_lab.evaluate import evaluate_run
from msvit_lab.training.loop import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, as a sweep leaves it: one gated, one dense, one not evaluated."""
    folder = tmp_path_factory.mktemp("sweep")
    for name, gate in (("gated", "learned"), ("dense", "none"), ("begun", "learned")):
        train(smoke(model__gate=gate), folder / name, recipe="scenes", quiet=True)
        if name != "begun":
            evaluate_run(folder / name, rounds=2)
    return folder
