"""The experiments of docs/results.md: their runs, not their results."""

from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scripts import load_script

from msvit.lab.config import override
from msvit.lab.recipes import recipe
from msvit.lab.sweep import in_order

experiments = load_script("experiments")
PLACE = experiments.Place("pets", "weights.safetensors", Path("/runs"))


@cache
def jobs_of(name):
    return experiments.EXPERIMENTS[name](PLACE)


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_run_can_be_made_and_comes_after_what_it_starts_from(name):
    jobs = in_order(experiments.unique(jobs_of(name)))
    assert len(jobs) > 1
    known = {job.name: job for job in jobs}

    def waits_for(job):
        return {name for parent in job.after for name in (parent, *waits_for(known[parent]))}

    for job in jobs:
        config = override(recipe("pets"), job.changes)
        assert job.name.endswith(f"-s{config.seed}")
        for folder in (config.model.weights, config.model.gate_from):
            if folder is not None and folder.startswith("/runs/") and not folder.endswith(".safetensors"):
                assert folder.removeprefix("/runs/") in waits_for(job), job.name


def test_experiments_share_runs_but_do_not_disagree_about_them():
    jobs = [job for name in experiments.EXPERIMENTS for job in jobs_of(name)]
    assert len(experiments.unique(jobs)) < len(jobs)
    other = experiments.job("base/dense-224", {"optim.epochs": "3"}, 0)
    with pytest.raises(ValueError, match="two experiments want a run base/dense-224-s0 with different settings"):
        experiments.unique([*jobs, other])


def test_every_group_of_runs_is_collected_by_one_experiment():
    collected = [group for name in experiments.EXPERIMENTS for group in experiments.groups(name)]
    trained = {job.name.split("/")[0] for name in experiments.EXPERIMENTS for job in jobs_of(name)}
    assert set(collected) == trained
    assert [group for group in set(collected) if collected.count(group) > 1] == ["curves"]  # with reducers, one table
    assert experiments.AGAINST.keys() <= trained


def test_half_the_blocks_are_the_first_ones(tmp_path):
    save_file({f"blocks.{i}.w": torch.zeros(1) for i in range(12)}, tmp_path / "w.safetensors")
    path = experiments.halve(experiments.Place("pets", str(tmp_path / "w.safetensors"), tmp_path / "runs"))
    assert sorted(load_file(path)) == [f"blocks.{i}.w" for i in range(6)]


def test_what_is_looked_at_afterwards_was_trained(tmp_path):
    """Every run that an analysis names is one of its experiment's."""
    looked_at = 0
    for name in experiments.EXPERIMENTS:
        trained = {f"/runs/{job.name}" for job in jobs_of(name)}
        for word in experiments.analysis(name, PLACE, tmp_path):
            if word.startswith("/runs/"):
                looked_at += 1
                assert any(fnmatch(run, word) for run in trained), word
    assert looked_at > 10
