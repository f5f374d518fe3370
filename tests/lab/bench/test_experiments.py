"""The experiments of docs/results.md: their runs, not their results."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from scripts import load_script, run_script

from msvit_lab.config import override
from msvit_lab.json_values import write_json
from msvit_lab.recipes import recipe
from msvit_lab.runs import write_config
from msvit_lab.sweep import in_order

collect, experiments, runs = map(load_script, ("collect", "experiments", "experiment_runs"))
CUB = experiments.Place("cub", "weights.safetensors", Path("/runs"))
IMAGENET, PETS, SCENES = (
    experiments.Place(None, None, Path("/runs"), recipe=name) for name in ("imagenet_vit", "pets", "scenes")
)
CASES = [(CUB, name) for name in runs.EXPERIMENTS] + [(IMAGENET, "paper"), (IMAGENET, "losses"), (SCENES, "paper")]


@pytest.mark.parametrize(("place", "name"), CASES, ids=lambda each: getattr(each, "recipe", each))
def test_every_run_can_be_made_and_comes_after_what_it_needs(place, name):
    jobs = in_order(runs.EXPERIMENTS[name](place))
    assert len(jobs) > 1
    done = set()
    for job in jobs:
        config = override(recipe(place.recipe), job.changes)
        assert job.name.endswith(f"-s{config.seed}")
        assert config.model.weights == place.weights
        assert config.model.share_of is None or config.model.share_of.removeprefix("/runs/") in done
        assert done.issuperset(job.after)
        done.add(job.name)


def test_every_group_of_runs_is_collected():
    trained = {job.name.split("/")[0] for name in runs.EXPERIMENTS for job in runs.EXPERIMENTS[name](CUB)}
    assert {group for name in runs.EXPERIMENTS for group in experiments.groups(name)} == trained
    assert experiments.AGAINST.keys() <= trained


def test_some_runs_alone_come_with_those_they_need():
    chosen = [each.name for each in experiments.only(runs.paper(CUB), r"/disc-like-0\.25-s[12]$")]
    assert chosen == [f"paper/{kind}-0.25-s{seed}" for kind in ("masked-gbas", "disc-like") for seed in (1, 2)]
    assert experiments.only(runs.paper(CUB), "") == runs.paper(CUB)


@pytest.mark.parametrize("place", [CUB, IMAGENET, PETS, SCENES], ids=lambda place: place.recipe)
def test_the_paper_is_trained_in_the_recipes_mode_and_for_as_many_steps_as_what_it_is_compared_with(place):
    """A disc has as many fine cells as the gate of its target and seed."""
    jobs = {job.name: job for job in runs.paper(place)}
    discs = {f"paper/disc-like-{target}-s{seed}" for target in (0.5, 0.25, 0.1) for seed in range(3)}
    assert {name for name in jobs if "/disc-" in name} == discs
    for name in discs:
        gate = name.replace("disc-like", f"{place.mode}-gbas")
        assert gate in jobs[name].after
        assert jobs[name].changes["model.share_of"] == f"/runs/{gate}"
    found = {name: override(recipe(place.recipe), job.changes) for name, job in jobs.items()}
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


def finish(folder, name="val", **found):
    (folder / "evaluations").mkdir(parents=True, exist_ok=True)
    gate = "none" if folder.name.startswith("dense") else "learned"
    write_config(folder, override(recipe("cub"), {"model.gate": gate, "seed": folder.name[-1]}), "cub", [])
    write_json(folder / f"evaluations/{name}.json", {"task": "classify"} | found)


def start(monkeypatch, tmp_path, train, *arguments):
    monkeypatch.setattr(experiments, "train", train)
    paths = ["--data", "P", "--weights", "W", "--runs", tmp_path / "runs", "--results", tmp_path]
    run_script(experiments, monkeypatch, *arguments, *paths)


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
        job = next(each for each in jobs if each.name == "paper/dense-224-s0")
        progress.started(job)
        finish(out / job.name, top1=0.9, tokens={"mean": 196}, gmacs={"mean": 4.6})
        progress.ended(job, None)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    monkeypatch.setattr(experiments, "run_jobs", run_jobs)
    with pytest.raises(KeyboardInterrupt):
        start(monkeypatch, tmp_path, experiments.train, "paper")
    (found,) = json.loads((tmp_path / "sweeps/cub_paper.json").read_text())["runs"]
    assert (found["top1"], found["tokens"], found["gmacs"]) == (0.9, 196, 4.6)


def test_trained_runs_are_looked_at_further(tmp_path):
    place = replace(CUB, runs=tmp_path)
    assert experiments.analyses("paper", place, tmp_path) == []
    for job in runs.paper(place):
        if "-0.1-" not in job.name:  # as with --only
            finish(tmp_path / job.name)
    *larger, moved, alike = ({Path(word).name for word in words if "/paper/" in word}
                             for words in experiments.analyses("paper", place, tmp_path))  # fmt: skip
    assert set.union(*larger) == moved | {"dense-224-s0"}
    assert moved == {"masked-gbas-0.25-s0", "disc-like-0.25-s0", "context-gbas-0.25-s0"}
    assert alike == moved - {"disc-like-0.25-s0"} | {"masked-gbas-0.5-s0", "trimmed-gbas-0.25-s0"}


def test_one_look_that_fails_does_not_stop_the_next(tmp_path, monkeypatch):
    def call(command):
        called.append(Path(command[1]).name)
        if "--size" in command:
            finish(Path(command[4]), "384px", top1=0.9, tokens={"mean": 576}, gmacs={"mean": 15.0})
        return 1

    def train(place, jobs, given):
        for job in jobs:
            finish(place.runs / job.name, top1=0.8, tokens={"mean": 196}, gmacs={"mean": 4.6})
        return []

    called = []
    monkeypatch.setattr(experiments.subprocess, "call", call)
    with pytest.raises(SystemExit, match="not all were looked at further"):
        start(monkeypatch, tmp_path, train, "paper")
    assert called == ["-m"] * 4 + ["robustness.py", "agreement.py"]
    found = {run["name"]: run for run in json.loads((tmp_path / "sweeps/cub_paper.json").read_text())["runs"]}
    assert found["dense-224-at-384px-s0"]["tokens"] == 576
    assert [name for name in found if "dense" in name and collect.is_dense(found[name])] == sorted(
        f"dense-{size}-s{seed}" for size in (128, 160, 192, 224) for seed in range(3)
    ), "what was trained smaller is not on the dense curve"
