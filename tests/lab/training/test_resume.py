"""A run that was stopped, in whatever way, goes on as if nothing had happened: to the bit."""

import errno
import math
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from smoke_runs import command, lines, smoke
from typer.testing import CliRunner

from msvit import checked_file
from msvit.lab.cli import app
from msvit.lab.config import Config, override
from msvit.lab.interrupts import RESUME_CODE, Interrupted, Stopped
from msvit.lab.training import loop, state
from msvit.lab.training.errors import how_to_resume
from msvit.lab.training.loop import train

# Three steps an epoch, a checkpoint every two: most of them lie within an epoch.
LONG = {"data.num_train": "56", "optim.epochs": "3", "checkpoint_every": "0.666", "eval_every": "0.5"}
PLAIN = {"optim.name": "sgd", "model.mode": "packed"}
ALL = {"optim.ema": "0.9", "optim.accumulate": "2", "gate.sampled": "true", "data.crops": "light"}


def long(**changes: str) -> Config:
    return override(smoke(), LONG | changes)


def same(one: Path, other: Path) -> None:
    assert lines(one) == lines(other)
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        ours, theirs = load_file(one / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), key


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The power goes off in a step, before anything of it is written."""
    seen = []

    def measure(*args):
        seen.append(args)
        if len(seen) == step:
            raise RuntimeError("the power went off")
        return kept(*args)

    kept = loop.measure
    monkeypatch.setattr(loop, "measure", measure)


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory) -> tuple[Config, Path]:
    """A run that nothing happened to."""
    config = long(**request.param)
    return config, train(config, tmp_path_factory.mktemp("whole"), quiet=True)


# Before the first checkpoint, in the second epoch, in the last step.
@pytest.mark.parametrize(
    ("whole", "step"),
    [
        pytest.param(changes, step, id=f"{name}, step {step}", marks=() if everyday else pytest.mark.slow)
        for name, changes in (("sgd, packed", PLAIN), ("adamw, EMA, accumulation", ALL))
        for step in (2, 6, 9)
        for everyday in [(step == 2) == (changes is PLAIN)]
    ],
    indirect=["whole"],
    scope="module",
)
def test_a_run_that_died_goes_on_to_the_same_numbers(tmp_path, monkeypatch, whole, step):
    config, run = whole
    assert len(lines(run, "train")) == 9
    with monkeypatch.context() as patch:
        crash_at(step, patch)
        with pytest.raises(RuntimeError, match="power"):
            train(config, tmp_path / "cut", quiet=True)
    torch.manual_seed(99)  # nothing may depend on what the process did before
    train(config, tmp_path / "cut", quiet=True, resume=True)
    same(run, tmp_path / "cut")


def wait_for_lines(run: Path, num: int) -> None:
    start = time.monotonic()
    while not (run / "metrics.jsonl").is_file() or (run / "metrics.jsonl").read_bytes().count(b"\n") < num:
        assert time.monotonic() < start + 240, "the run does not come on"
        time.sleep(0.005)


SIGNALS = {"killed": signal.SIGKILL, "preempted": signal.SIGTERM}
ENDLESS = {**LONG, "optim.epochs": "400", "data.cache": "false", "data.workers": "1"}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> dict[str, tuple[Path, int, str]]:
    """Two runs that would take minutes: one killed, one asked to end as a scheduler does before it takes a machine."""
    folder = tmp_path_factory.mktemp("stopped")
    settings = [part for name, value in ENDLESS.items() for part in ("--set", f"{name}={value}")]
    processes = {}
    for name in SIGNALS:
        arguments = command("train", "scenes", "--smoke", *settings, "--out", folder / name)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        processes[name] = subprocess.Popen(**arguments, **pipes)
    found = {}
    for name, sign in SIGNALS.items():
        try:
            wait_for_lines(folder / name, 12)
        finally:
            os.killpg(processes[name].pid, sign)  # everything of that job, the loader's worker too
        output = processes[name].communicate(timeout=60)[0]
        found[name] = folder / name, processes[name].returncode, output
    return found


def test_an_interrupted_run_ends_its_step_and_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    seen, kept = [], loop.measure

    def measure(*args):
        seen.append(args)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)  # in the middle of a step
        return kept(*args)

    train(long(), tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "measure", measure)
        with pytest.raises(Stopped, match=r"interrupted at step \d of 9; .* go on with --resume") as stopped:
            train(long(), tmp_path / "cut", quiet=True)
    done = state.read_step(tmp_path / "cut/checkpoint.safetensors")
    assert f"step {done:.0f} of 9" in str(stopped.value)
    train(long(), tmp_path / "cut", quiet=True, resume=True)
    same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("how", SIGNALS)
def test_a_stopped_process_goes_on_to_the_same_numbers(tmp_path, stopped, how):
    run, code, output = stopped[how]
    done = lines(run, "train")[-1]["step"]
    assert code == (-signal.SIGKILL if how == "killed" else RESUME_CODE), output
    if how != "killed":
        assert "interrupted at step" in output
        assert f"go on with --resume --out {run}" in output
    saved = int(state.read_step(run / "checkpoint.safetensors"))
    assert done - 2 <= saved if how == "killed" else saved >= done
    # Nobody waits for the end: both are cut some steps later.
    for folder, first in ((run, saved), (tmp_path / "whole", 0)):
        with pytest.MonkeyPatch.context() as patch:
            crash_at(done + 5 - first, patch)
            with pytest.raises(RuntimeError, match="power"):
                train(override(smoke(), ENDLESS), folder, quiet=True, resume=first > 0)
    assert lines(run, "train")[-1]["step"] == done + 4
    assert lines(run) == lines(tmp_path / "whole")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_run_after_the_step_and_a_checkpoint(tmp_path, monkeypatch, number):
    seen = []

    def measure(*args):
        seen.append(args)
        if len(seen) == 5:
            os.kill(os.getpid(), number)
        return kept(*args)

    kept = loop.measure
    with monkeypatch.context() as patch:
        patch.setattr(loop, "measure", measure)
        with pytest.raises(Interrupted, match=r"interrupted at step [56] of 9; the last good checkpoint is .*--resume"):
            train(long(), tmp_path / "cut", quiet=True)
    saved = state.read_step(tmp_path / "cut/checkpoint.safetensors")
    assert lines(tmp_path / "cut", "train")[-1]["step"] == saved >= 5
    train(long(), tmp_path / "cut", quiet=True, resume=True)
    train(long(), tmp_path / "whole", quiet=True)
    same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_checkpoint_is_read_is_not_taken_for_damage(tmp_path, monkeypatch, number):
    """Readers written in C make an error of their own of any exception."""
    train(smoke(), tmp_path / "run", recipe="scenes", quiet=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = state.read_tensors

    def read(path):
        try:
            os.kill(os.getpid(), number)
            return kept(path)
        except KeyboardInterrupt:
            raise state.Damaged(f"{path} is damaged; start anew") from None

    monkeypatch.setattr(state, "read_tensors", read)
    arguments = ["train", "scenes", "--smoke", "--resume", "--out", str(tmp_path / "run"), "--set", "optim.epochs=2"]
    found = CliRunner().invoke(app, arguments, terminal_width=300)
    assert found.exit_code == RESUME_CODE, found.output
    assert "interrupted before the first step; the last good checkpoint is" in found.output
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_finished_run_is_left_alone_and_says_so(tmp_path, capsys):
    train(smoke(), tmp_path / "run", quiet=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    train(smoke(), tmp_path / "run", resume=True)
    assert "is finished: it has done 2 of 2 steps" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_run_may_be_made_longer(tmp_path):
    train(smoke(), tmp_path, quiet=True)
    (tmp_path / "evaluations").mkdir()
    old = [tmp_path / name for name in ("eval.json", "samples.safetensors", "evaluations/flip.json")]
    for path in old:
        path.write_text("{}")
    train(smoke(optim__epochs=2), tmp_path, quiet=True, resume=True)
    assert [line["step"] for line in lines(tmp_path, "train")] == [1, 2, 3, 4]
    assert not any(path.exists() for path in old)  # they were of other weights


def test_a_run_is_not_overwritten_by_accident_but_may_start_anew_before_its_first_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        crash_at(1, patch)
        with pytest.raises(RuntimeError, match="power"):
            train(smoke(), tmp_path, quiet=True)
    train(smoke(), tmp_path, quiet=True)
    with pytest.raises(ValueError, match=r"holds a run already; go on with --resume"):
        train(smoke(), tmp_path, quiet=True)


def test_another_model_does_not_go_on_from_this_checkpoint(tmp_path):
    train(smoke(), tmp_path, quiet=True)
    with pytest.raises(ValueError, match=r"does not fit this configuration \(.*size mismatch.*choose another --out"):
        train(override(smoke(), {"model.options.embed_dim": "64"}), tmp_path, quiet=True, resume=True, force=True)


def full_disk(tensors, path, metadata=None):
    Path(path).write_bytes(b"half a file")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_stops_the_run_and_the_last_good_checkpoint_survives(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        writes = []
        kept = checked_file.save_file
        fails = lambda *a, **k: (full_disk if writes else kept)(*a, **k) or writes.append(a)  # noqa: E731
        patch.setattr(checked_file, "save_file", fails)
        with pytest.raises(Stopped, match=r"No space left on device.*last good checkpoint is .*go on with --resume"):
            train(long(), tmp_path / "cut", quiet=True)
    assert state.read_step(tmp_path / "cut/checkpoint.safetensors") == 2
    assert not list((tmp_path / "cut").glob(".*"))
    train(long(), tmp_path / "cut", quiet=True, resume=True)
    train(long(), tmp_path / "whole", quiet=True)
    same(tmp_path / "whole", tmp_path / "cut")


def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path):
    """The same with a real limit of the system, whatever error the library makes of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # less than a checkpoint needs
    try:
        with pytest.raises(Stopped, match=r"reading or writing failed.*no checkpoint was written yet"):
            train(smoke(), tmp_path, quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["config.json", "metrics.jsonl"]
    assert lines(tmp_path)


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    place = whole.index(b'"step":"') + 8
    changed = {
        "cut": whole[:1000],
        "one bit": whole[:-5000] + bytes([whole[-5000] ^ 4]) + whole[-4999:],
        "edited": whole[:place] + b"7" + whole[place + 1 :],
    }
    path.write_bytes(changed[how])


@pytest.mark.parametrize("whole", [PLAIN], ids=[""], indirect=True, scope="module")
@pytest.mark.parametrize("how", ["cut", "one bit", "edited"])
def test_a_damaged_checkpoint_is_not_used_and_the_one_before_is(tmp_path, capsys, whole, how):
    """With one more step to do, after a damaged checkpoint of step 9: again from that of step 8."""
    config, run = whole
    train(config, tmp_path / "cut", quiet=True)
    assert [state.read_step(tmp_path / "cut" / name) for name in (state.CHECKPOINT, state.PREVIOUS)] == [9, 8]
    damage(tmp_path / "cut" / state.CHECKPOINT, how)
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is (damaged|truncated)"):
        state.read_step(tmp_path / "cut" / state.CHECKPOINT)
    capsys.readouterr()
    train(config, tmp_path / "cut", resume=True)
    said = capsys.readouterr().out
    assert "checkpoint.safetensors is " in said
    assert "checkpoint.previous.safetensors, written after 8 steps" in said
    assert "is finished" not in said
    same(run, tmp_path / "cut")
    assert state.read_step(tmp_path / "cut" / state.PREVIOUS) == 8  # the damaged one did not take its place


def test_without_a_good_checkpoint_nothing_is_resumed(tmp_path):
    train(smoke(), tmp_path, quiet=True)
    for path in tmp_path.glob("checkpoint*"):
        damage(path, "cut")
    with pytest.raises(ValueError, match=r"no checkpoint can be read: .*safetensors is truncated.*start anew"):
        train(smoke(), tmp_path, quiet=True, resume=True)


def test_a_checkpoint_of_an_earlier_version_is_still_read(tmp_path):
    train(long(**PLAIN, **{"optim.epochs": "2"}), tmp_path / "cut", quiet=True)
    path = tmp_path / "cut" / state.CHECKPOINT
    save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, path, {"step": "6"})
    assert state.read_step(path) == 6


def test_a_kill_between_the_two_checkpoints_leaves_one(tmp_path, monkeypatch):
    """Where links do not exist, there is a moment without the last one."""
    train(smoke(), tmp_path, quiet=True)
    (tmp_path / state.CHECKPOINT).rename(tmp_path / state.PREVIOUS)
    with pytest.raises(ValueError, match="holds a run already"):
        train(smoke(), tmp_path, quiet=True)
    train(smoke(), tmp_path, quiet=True, resume=True)
    assert "last good checkpoint" in how_to_resume(tmp_path)


def test_a_nan_stops_the_run_with_the_step_and_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    seen = []

    def losses(*args):
        found = kept(*args)
        seen.append(found)
        return {**found, "loss": found["loss"] * (math.nan if len(seen) == 4 else 1)}

    kept = loop.compute_losses
    monkeypatch.setattr(loop, "compute_losses", losses)
    with pytest.raises(Stopped, match=r"step 4: the loss is NaN.*last good checkpoint is .*checkpoint\.safetensors"):
        train(long(), tmp_path, quiet=True)
    assert state.read_step(tmp_path / "checkpoint.safetensors") == 2
    assert [line["step"] for line in lines(tmp_path, "train")] == [1, 2, 3]


@pytest.mark.parametrize("step", [1, 2])
def test_weights_that_burst_are_not_saved(tmp_path, monkeypatch, step):
    """The loss of a step is older than its weights: a checkpoint of that step would be no good one."""
    seen = []

    def burst(accelerator, model, gate_loss, config):
        seen.append(model)
        if len(seen) == step:
            model.host.head.weight.grad.fill_(math.inf)

    monkeypatch.setattr(loop, "clip", burst)
    what = {1: "step 2: an output of the model", 2: "step 2: a weight"}[step]
    with pytest.raises(Stopped, match=f"{what} is NaN or infinite; no checkpoint was written"):
        train(long(log_every="100"), tmp_path, quiet=True)
    assert not (tmp_path / "checkpoint.safetensors").exists()
