"""The experiments of docs/results.md: their runs, not their results."""

import json
import os
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from scripts import load_script, run_script

from msvit_lab.config import override
from msvit_lab.json_values import write_json
from msvit_lab.recipes import recipe
from msvit_lab.runs import write_config
from msvit_lab.sweep import in_order

experiments, runs = map(load_script, ("experiments", "experiment_runs"))
PLACE = experiments.Place("pets", "weights.safetensors", Path("/runs"))
CUB = experiments.Place("cub", "weights.safetensors", Path("/runs"), recipe="cub", name="cub")
OTHERS = {name: experiments.Place(None, None, Path("/runs"), recipe=name) for name in ("imagenet_vit", "scenes")}
CASES = [(PLACE, name) for name in runs.EXPERIMENTS]
CASES += [(CUB, name) for name in ("paper", "regime", "curves")]  # `paper` and `regime` from the weights
CASES += [(OTHERS["imagenet_vit"], name) for name in ("paper", "losses")]  # all from timm's weights
CASES += [(OTHERS["scenes"], "paper")]  # from nothing, patches of 8 px


@cache
def jobs_of(name):
    return runs.EXPERIMENTS[name](PLACE)


@pytest.mark.parametrize(("place", "name"), CASES, ids=lambda each: getattr(each, "recipe", each))
def test_every_run_can_be_made_and_comes_after_what_it_starts_from(place, name):
    jobs = in_order(experiments.unique(jobs_of(name) if place is PLACE else runs.EXPERIMENTS[name](place)))
    assert len(jobs) > 1
    known = {job.name: job for job in jobs}

    def waits_for(job):
        return {name for parent in job.after for name in (parent, *waits_for(known[parent]))}

    for job in jobs:
        config = override(recipe(place.recipe), job.changes)
        assert job.name.endswith(f"-s{config.seed}")
        for folder in (config.model.weights, config.model.gate_from):
            if folder is not None and folder.startswith("/runs/") and not folder.endswith(".safetensors"):
                assert folder.removeprefix("/runs/") in waits_for(job), job.name


def test_experiments_share_runs_but_do_not_disagree_about_them():
    jobs = [job for name in runs.EXPERIMENTS for job in jobs_of(name)]
    assert len(experiments.unique(jobs)) < len(jobs)
    other = runs.job("base/dense-224", {"optim.epochs": "3"}, 0)
    with pytest.raises(ValueError, match="two experiments want a run base/dense-224-s0 with different settings"):
        experiments.unique([*jobs, other])


def test_some_runs_alone_come_with_those_they_need():
    chosen = [each.name for each in experiments.only(runs.paper(CUB), r"/disc-like-0\.25-s[12]$")]
    assert chosen == [f"paper/{kind}-0.25-s{seed}" for kind in ("masked-gbas", "disc-like") for seed in (1, 2)]
    assert experiments.only(runs.paper(CUB), "") == runs.paper(CUB)


def test_every_group_of_runs_is_collected_by_one_experiment():
    collected = [group for name in runs.EXPERIMENTS for group in experiments.groups(name)]
    trained = {job.name.split("/")[0] for name in runs.EXPERIMENTS for job in jobs_of(name)}
    assert set(collected) == trained
    shared = {group for group in collected if collected.count(group) > 1}
    assert shared == {"base", "curves", "paper"}  # curves and reducers are one table; regime has dense runs of paper
    assert experiments.AGAINST.keys() <= trained


@pytest.mark.parametrize("place", [PLACE, *OTHERS.values(), CUB], ids=lambda place: place.recipe)
def test_the_paper_is_trained_in_the_recipes_mode_and_for_as_many_steps_as_what_it_is_compared_with(place):
    found = {job.name: override(recipe(place.recipe), job.changes) for job in runs.paper(place)}
    own = {name.removeprefix("paper/"): config for name, config in found.items() if name.startswith("paper/")}
    gated = {name: config for name, config in own.items() if config.model.gate == "learned"}
    masked = place.recipe in ("scenes", "cub")
    kinds = {(c.model.mode, c.gate.loss, c.gate.target, c.seed) for c in gated.values()}
    wanted = {("masked" if masked else "trimmed", "gbas", target) for target in (0.5, 0.25, 0.1)}
    wanted |= {("trimmed", loss, 0.25) for loss in ("gbas", "bas", "l0")}
    assert kinds == {(*kind, seed) for kind in wanted for seed in range(3)}
    assert {c.gate.clip for c in gated.values()} == {None}
    assert not any(c.model.mode == "masked" for c in own.values() if c.model.gate in ("none", "disc"))
    assert len({(c.optim.epochs, c.optim.lr) for c in own.values()}) == 1
    assert len({c.data.img_size for c in own.values() if c.model.gate == "none"}) >= 4
    from_weights = place.recipe in ("imagenet_vit", "cub")  # timm's or a file, from which all start
    assert from_weights != any(name.startswith("base/") for name in found)
    assert len({config.model.weights for config in own.values()}) == (1 if from_weights else len(place.seeds))


def test_runs_of_the_regime_differ_in_what_their_names_say_alone():
    place = replace(CUB, seeds=(0,), changes={"optim.epochs": "3", "gate.target": "0.5"})
    found = {job.name: override(recipe("cub"), job.changes) for job in runs.regime(place)}
    gated = {name: config for name, config in found.items() if config.model.gate != "none" and "disc" not in name}
    assert (len(found), len(gated)) == (22, 16)
    assert len({repr(config.optim) for name, config in found.items() if "large" not in name}) == 1
    assert {config.optim.epochs for config in found.values()} == {3}, "--set precedes the schedule"
    assert [c.optim.batch_size for name, c in found.items() if "large" in name] == [512]
    own = [(c.model.mode, c.optim.batch_size, c.model.gate, repr(c.gate)) for c in gated.values()]
    assert len(set(own)) == len(gated)
    assert {c.gate.target for name, c in gated.items() if name.startswith("regime/")} == {0.5}
    trimmed = [job.name for job in runs.paper(replace(CUB, changes={"model.mode": "trimmed"}))]
    assert not any("masked" in name for name in trimmed)


def finish(folder, **found):
    (folder / "evaluations").mkdir(parents=True)
    write_config(folder, recipe("pets"), "pets", [])
    write_json(folder / "evaluations/val.json", {"task": "classify"} | found)


def start(monkeypatch, tmp_path, train, *arguments):
    monkeypatch.setattr(experiments, "train", train)
    paths = ["--data", "P", "--weights", "W", "--runs", tmp_path / "runs", "--results", tmp_path]
    run_script(experiments, monkeypatch, *arguments, *paths)


@pytest.mark.parametrize("place", [PLACE, CUB], ids=lambda place: place.recipe)
def test_a_disc_has_as_many_fine_cells_as_the_gate_of_its_target_and_seed(place):
    found = {job.name: job for job in runs.paper(place) if "/disc-" in job.name}
    assert found.keys() == {f"paper/disc-like-{target}-s{seed}" for target in (0.5, 0.25, 0.1) for seed in range(3)}
    for name, job in found.items():
        gate = name.replace("disc-like", f"{place.mode}-gbas")
        assert gate in job.after
        assert job.changes["model.share_of"] == f"/runs/{gate}"


def test_an_interrupted_experiment_has_whole_seeds(tmp_path, monkeypatch):
    names = []

    def train(place, jobs, given):
        names.extend(job.name for job in in_order(jobs))
        return []

    start(monkeypatch, tmp_path, train, "paper", "--seeds", "0,1")
    assert [name[-1] for name in names] == ["0"] * 14 + ["1"] * 14
    assert sum("/disc-" in name for name in names[:14]) == 3


def test_an_interrupted_experiment_has_the_results_of_what_is_finished(tmp_path, monkeypatch):
    def run_jobs(recipe, jobs, out, progress, **options):
        job = next(each for each in jobs if each.name == "curves/dense-224-s0")
        progress.started(job)
        finish(out / job.name, top1=0.9, tokens={"mean": 196}, gmacs={"mean": 4.6})
        progress.ended(job, None)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    monkeypatch.setattr(experiments, "run_jobs", run_jobs)
    with pytest.raises(KeyboardInterrupt):
        start(monkeypatch, tmp_path, experiments.train, "curves")
    (found,) = json.loads((tmp_path / "sweeps/pets_curves.json").read_text())["runs"]
    assert (found["top1"], found["tokens"], found["gmacs"]) == (0.9, 196, 4.6)


def test_what_is_looked_at_afterwards_was_trained(tmp_path):
    trained = {f"/runs/{job.name}" for job in jobs_of("robustness")}
    looked_at = {word for word in experiments.analysis("robustness", PLACE, tmp_path) if word.startswith("/runs/")}
    assert len(looked_at) == 6
    assert looked_at <= trained
