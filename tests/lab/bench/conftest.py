"""A few trained runs that the tests of this folder share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from smoke_runs import smoke

import msvit
from msvit_lab.build import make_loader, open_val
from msvit_lab.evaluate import evaluate_run
from msvit_lab.hosts import read_run
from msvit_lab.runs import read_config
from msvit_lab.training.loop import train

RUNS = {
    "gated-s0": {}, "gated-s1": {"seed": 1}, "small-s0": {"data__img_size": 48}, "disc-s0": {"model__gate": "disc"},
    "dense-64-s0": {"model__gate": "none"}, "dense-48-s0": {"model__gate": "none", "data__img_size": 48},
    "tome-s0": {"model__gate": "none", "reducer__name": "tome", "reducer__r": 2},
    "segment-s0": {"task": "segment", "data__scales": "1,1.2", "model__gate": "disc"},
    "segment-dense-s0": {"task": "segment", "data__scales": "1,1.2", "model__gate": "none"},
}  # fmt: skip


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An evaluated run by name, trained when first asked for; learned gates have half of their cells fine."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def make(name: str) -> Path:
        train(smoke(**RUNS[name]), folder / name, quiet=True)
        if name.startswith(("gated", "small")):
            msvit.save(with_share(folder / name, 0.5), folder / name / "model")
        evaluate_run(folder / name, rounds=0)
        return folder / name

    return make


@pytest.fixture
def quarter(run: Callable[[str], Path], tmp_path: Path) -> Path:
    """The gate of gated-s0, saved alone, with a quarter of the cells fine."""
    msvit.save_gate(with_share(run("gated-s0"), 0.25).gate, tmp_path / "alone")
    return tmp_path / "alone"


@torch.no_grad()
def with_share(run: Path, share: float) -> msvit.MSViT:
    """A run's model with that share of fine cells on its images: two steps of training leave all of them fine."""
    model, config = read_run(run)
    loader = make_loader(open_val(config, read_config(run)["classes"]), config, train=False)
    logits = torch.cat([model.gate(batch.image).logits for batch in loader.iterate(0)])
    model.gate.threshold = logits.quantile(1 - share).item()
    return model
