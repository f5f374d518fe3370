"""A sweep is many runs: one that fails does not stop the others, and what is finished is not done again."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from threading import Event

import pytest
import torch
from golden import assert_golden
from safetensors.torch import load_file
from smoke_runs import call, command, lines, num_lines, smoke, wait_for

from msvit_lab.folder_lock import LOCK, exists, find_holder
from msvit_lab.interrupts import RESUME_CODE
from msvit_lab.on_ray import share
from msvit_lab.runs import write_config
from msvit_lab.sweep import Job, SweepProgress, check_folders, grid, run_jobs
from msvit_lab.training.state import read_step

ARGUMENTS = ["sweep", "scenes", "--smoke", "--target", "0.25", "--gate-weight", "20", "--dense-sizes", "48"]


def listed(jobs: list[Job], out: Path) -> str:
    """A line for each run and one for each of its settings."""
    lines = []
    for job in jobs:
        lines.append(f"{job.name} after {', '.join(job.after)}" if job.after else job.name)
        lines += [f"    {name}={value}" for name, value in job.changes.items()]
    return "".join(f"{line}\n" for line in lines).replace(str(out.resolve()), "OUT")


def test_the_grid_has_dense_sizes_targets_by_weights_fixed_gates_and_each_again_with_every_reducer(tmp_path):
    """Runs of another size have it in their name, start from the dense run of their size and learn from it."""
    jobs = grid(
        "voc", [0.3], [4.0], sizes=[352, 320], gates=["disc"], shares=[0.5], gated_sizes=[320, 352], seeds=[3],
        reducers=["tome-r8"], from_dense=True, changes={"model.gate_from": "runs/gate-s{seed}"}, out=tmp_path,
    )  # fmt: skip
    assert_golden("sweep_voc.txt", listed(jobs, tmp_path))
    jobs = grid("pets", [0.3, 0.3], [1.0], sizes=[224], reducers=["evit-0.7", "dynamicvit-0.5"], out=tmp_path)
    assert_golden("sweep_pets.txt", listed(jobs, tmp_path))
    assert [job.name for job in grid("scenes", [], [])] == [f"dense-{size}-s0" for size in (128, 112, 96, 80)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"from_dense": True}, "add 224 to the dense sizes"),
        ({"reducers": ["evit-0.7"]}, "add 224 to the dense sizes"),
        ({"sizes": [224], "reducers": ["evit"]}, "'evit' is no reducer with its amount; write for example"),
        ({"sizes": [224], "reducers": ["evit-1.5"]}, "rate is 1.5"),
        ({"sizes": [224], "reducers": ["tome-r"]}, "ToMe needs one of them"),
    ],
)
def test_a_grid_that_cannot_be_is_an_error(wrong, words):
    with pytest.raises(ValueError, match=words):
        grid("pets", [0.3], [1.0], **({"sizes": [128]} | wrong))


class InProcess:
    """Stands in for a process: the same commands without seconds of imports."""

    def __init__(self, decoded=None):
        pass

    def run(self, arguments, log):
        result = call(*arguments)
        log.write_text(result.output)
        return result.output if result.exit_code else None

    def stop(self):
        pass

    def close(self):
        pass


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr("msvit_lab.sweep.Worker", InProcess)


def test_a_run_waits_for_all_it_needs_and_an_exception_stops_the_rest(tmp_path, monkeypatch):
    ended, closed = [], []

    class Slow(InProcess):
        def run(self, arguments, log):
            name = log.parent.name
            assert {"both": {"a", "b"}}.get(name, set()) <= set(ended), name
            time.sleep(0.2 if name == "a" else 0)
            ended.append(name)

        def close(self):
            closed.append(self)

    monkeypatch.setattr("msvit_lab.sweep.Worker", Slow)
    jobs = [Job("both", after=("b", "a")), Job("a"), Job("b")]
    assert run_jobs("scenes", jobs, tmp_path, SweepProgress(jobs, tmp_path), at_once=3) == []
    assert ended[-1] == "both"
    assert len(closed) == 3

    class Broken(SweepProgress):
        def started(self, job):
            raise RuntimeError("no words")

    with pytest.raises(RuntimeError, match="no words"):
        run_jobs("scenes", [Job("c"), Job("d", after=("c",))], tmp_path, Broken([], tmp_path))
    assert len(closed) == 4
    assert not list(tmp_path.glob(".decoded-*"))


def test_runs_that_wait_for_others_keep_no_place_from_those_that_do_not(tmp_path, monkeypatch):
    ended = []

    class Fast(InProcess):
        def run(self, arguments, log):
            name = log.parent.name
            wait_for(lambda: name != "first" or "free" in ended, seconds=20)
            ended.append(name)

    monkeypatch.setattr("msvit_lab.sweep.Worker", Fast)
    jobs = [Job("first"), *(Job(name, after=("first",)) for name in ("second", "third")), Job("free")]
    assert run_jobs("scenes", jobs, tmp_path, SweepProgress(jobs, tmp_path), at_once=2) == []
    assert ended[:2] == ["free", "first"]
    assert len(ended) == 4


def test_one_failed_run_does_not_lose_the_others_and_the_next_sweep_does_only_what_is_missing(tmp_path, in_process):
    bad = tmp_path / "dense-48-s0"
    bad.mkdir()
    (bad / "checkpoint.safetensors").write_bytes(b"torn")
    first = call(*ARGUMENTS, "--out", tmp_path)
    assert first.exit_code == 1, first.output
    assert "1 of 2 runs failed (dense-48-s0)" in first.output
    assert f"run 1 of 2, dense-48-s0: training, log in {bad / 'log.txt'}" in first.output
    assert re.search(r"(?s)run 1 of 2, dense-48-s0: failed: .*, about [\d:]+ left\nrun 2 of 2, t0", first.output)
    assert re.search(r"run 2 of 2, t0.25-w20-s0: finished, top-1 [\d.]+%\n", first.output)
    good = json.loads((tmp_path / "t0.25-w20-s0/evaluations/val.json").read_text())
    assert len(lines(tmp_path / "t0.25-w20-s0", "train")) == 2

    (bad / "checkpoint.safetensors").unlink()
    second = call(*ARGUMENTS, "--json", "--out", tmp_path)
    assert second.exit_code == 0, second.output
    assert "run 1 of 2, dense-48-s0: training" in second.stderr
    assert "t0.25-w20-s0: finished before" in second.stderr
    assert json.loads((tmp_path / "t0.25-w20-s0/evaluations/val.json").read_text()) == good
    assert json.loads((bad / "evaluations/val.json").read_text())["img_size"] == 48
    found = json.loads(second.stdout)  # it prints nothing else there
    assert [row["run"] for row in found["runs"]] == ["dense 48 px", "gate 0.25, weight 20"]
    assert [row["of_dense"] for row in found["runs"]] == [1.0, good["gmacs"]["mean"] / good["gmacs"]["dense"]]


def test_runs_of_other_settings_are_not_taken_for_finished_ones(tmp_path):
    (tmp_path / "a").mkdir()
    write_config(tmp_path / "a", smoke(), "scenes", [])
    check_folders("scenes", [Job("a"), Job("b")], tmp_path, smoke=True)
    with pytest.raises(ValueError, match=r"optim\.lr was 0\.001, now 0\.1; choose another --out"):
        check_folders("scenes", [Job("a", {"optim.lr": "0.1"})], tmp_path, smoke=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_sweep_passes_a_signal_on_and_prints_how_to_resume(tmp_path, monkeypatch, number):
    stopped = Event()

    class Long(InProcess):
        def run(self, arguments, log):
            os.kill(os.getpid(), number)
            assert stopped.wait(20)
            return "interrupted at step 3"

        def stop(self):
            os.kill(os.getpid(), signal.SIGTERM)  # a scheduler that repeats itself
            stopped.set()

    monkeypatch.setattr("msvit_lab.sweep.Worker", Long)
    found = call(*ARGUMENTS, "--out", tmp_path)
    assert stopped.is_set()
    assert found.exit_code == RESUME_CODE, found.output
    assert "interrupted; the same command goes on from there" in found.output
    assert "failed" not in found.output
    assert not list(tmp_path.glob(".decoded-*"))


def test_on_ray_a_run_reserves_its_share_of_a_gpu_or_of_a_machine_without_one():
    gpus, cpus = [{"CPU": 64.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}], [{"CPU": 16.0}, {"CPU": 12.0}]
    assert share(gpus) == {"num_gpus": 1, "num_cpus": 4}
    assert share(gpus, at_once=4) == {"num_gpus": 0.25, "num_cpus": 1}
    assert share(gpus, at_once=8) == {"num_gpus": 0.125, "num_cpus": 0.5}, "eight fit"
    assert share(cpus, at_once=3) == {"num_gpus": 0, "num_cpus": 4}
    assert share([], at_once=2) == {"num_cpus": 1}, "machines are started on demand"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_ends_leaves_no_run_behind_and_goes_on_to_the_same_weights(tmp_path, number):
    arguments = [*ARGUMENTS, "--set", "optim.epochs=60", "--set", "checkpoint_every=50", "--set", "log_every=1"]
    processes = []
    for name in ("cut", "whole"):
        found = command(*arguments, "--out", tmp_path / name)
        processes.append(subprocess.Popen(**found, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    cut, whole = processes
    run = tmp_path / "cut/dense-48-s0"
    wait_for(lambda: num_lines(run) >= 6)  # a line of priors, five of training
    assert list((tmp_path / "cut").glob(".decoded-*"))
    worker = find_holder(run)
    assert worker.pid != cut.pid
    cut.send_signal(number)
    output = cut.communicate(timeout=60)[0]
    assert cut.returncode == (RESUME_CODE if number == signal.SIGTERM else -number), output
    wait_for(lambda: exists(worker) is False)  # it saves, and it is gone
    assert not (run / LOCK).exists()
    assert f"go on with --resume --out {run}" in (run / "log.txt").read_text().replace("\n", "")
    assert read_step(run / "checkpoint.safetensors") >= 5  # long before the first one that was due
    same = command(*arguments, "--out", tmp_path / "cut")
    again = subprocess.run(**same, capture_output=True, timeout=200, check=False)
    assert again.returncode == 0, again.stdout
    whole.communicate(timeout=200)
    assert whole.returncode == 0
    for name in ("dense-48-s0", "t0.25-w20-s0"):
        ours, theirs = (load_file(tmp_path / which / name / "model/model.safetensors") for which in ("cut", "whole"))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert not list((tmp_path / "cut").rglob(".*"))
