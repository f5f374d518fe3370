"""A run that was stopped, in whatever way, goes on as if nothing had happened: to the bit."""

import errno
import math
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from smoke_runs import EDGES, call, command, done, files, lines, num_lines, refused, smoke, wait_for
from torch import nn

from msvit.saving import file
from msvit_lab.config import Config
from msvit_lab.interrupts import RESUME_CODE, Interrupted, Stopped
from msvit_lab.runs import read_config
from msvit_lab.training import loop, state
from msvit_lab.training.loop import train

# Three steps an epoch, a checkpoint every two: most of them lie within an epoch.
LONG = {"data.num_train": "56", "data.num_val": "4", "optim.epochs": "2", "checkpoint_every": "0.666"}
LONG |= {"eval_every": "0.5"}
REDUCED = {"model.gate": "learned", "gate.loss": "gbas", "reducer.rate": "0.6", "reducer.at": "0,1"}


def long(**changes: object) -> Config:
    return smoke(**LONG | changes)


CASES = {
    "adamw": long(),
    "sgd, packed": long(optim__name="sgd", model__mode="packed"),
    "EMA, accumulation": long(optim__ema="0.9", optim__accumulate="2", gate__sampled="true", data__crops="light"),
    "attention": smoke("pets", **LONG),
    "edges": long(**EDGES | {"eval_every": "2"}),
    "dynamicvit": smoke("pets", **LONG, **REDUCED, reducer__name="dynamicvit"),
    "evit": smoke("pets", **LONG, **REDUCED, reducer__name="evit"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], Path]:
    """Runs that nothing happened to, by the name of their case."""
    return cache(lambda name: train(CASES[name], tmp_path_factory.mktemp("whole"), quiet=True))


def same(one: Path, other: Path) -> None:
    assert lines(one) == lines(other)
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        ours, theirs = load_file(one / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), key
    assert [path.read_text() for path in (one / "model").glob("*.json")] == [
        path.read_text() for path in (other / "model").glob("*.json")
    ]  # the gate's threshold


@contextmanager
def at_line(number: int, happens: Callable[[], None]) -> Iterator[None]:
    """Something happens in the step that writes this line of metrics, before anything of it is written."""
    seen, measure = [], loop.measure

    def patched(*args):
        seen.append(args)
        if len(seen) == number:
            happens()
        return measure(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "measure", patched)
        yield


def crash(config: Config, folder: Path, line: int, **options: object) -> None:
    def power_off():
        assert num_lines(folder) >= line - 1, "each is written at once"
        raise RuntimeError("the power went off")

    with at_line(line, power_off), pytest.raises(RuntimeError, match="power"):
        train(config, folder, quiet=True, **options)


# Before the first checkpoint, in the second epoch, in the last step; with every kind of gate objective and teacher.
@pytest.mark.parametrize(
    ("case", "step"),
    [
        ("EMA, accumulation", 6), ("edges", 4), ("dynamicvit", 5),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in
          (("sgd, packed", 2), ("sgd, packed", 5), ("EMA, accumulation", 2), ("EMA, accumulation", 5),
           ("attention", 5), ("evit", 5))),
    ],
)  # fmt: skip
def test_a_run_that_died_goes_on_to_the_same_numbers(tmp_path, whole, case, step):
    run = whole(case)
    crash(CASES[case], tmp_path / "cut", step)
    with (tmp_path / "cut/metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # cut by the kill
    torch.manual_seed(99)  # nothing may depend on what the process did before
    train(CASES[case], tmp_path / "cut", quiet=True, resume=True)
    same(run, tmp_path / "cut")


@pytest.mark.parametrize(("number", "line"), [(signal.SIGINT, 1), (signal.SIGTERM, 5)])
def test_a_signal_ends_the_run_after_the_step_and_a_checkpoint(tmp_path, whole, number, line):
    """And it goes on to the same numbers."""
    words = r"interrupted at step \d of 6; the last good checkpoint is .*go on with --resume"
    with at_line(line, lambda: os.kill(os.getpid(), number)), pytest.raises(Interrupted, match=words) as stopped:
        train(CASES["adamw"], tmp_path, quiet=True)
    saved = state.read_step(tmp_path / "checkpoint.safetensors")
    assert saved in (line, line + 1)
    assert f"step {saved} of 6" in str(stopped.value)
    assert lines(tmp_path, "train")[-1]["step"] == saved
    if number is signal.SIGTERM:
        train(CASES["adamw"], tmp_path, quiet=True, resume=True)
        same(whole("adamw"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_was_killed_or_preempted_goes_on_to_the_same_numbers(tmp_path, sign):
    endless = LONG | {"optim.epochs": "400", "data.cache": "false", "data.workers": "1"}
    settings = [part for name, value in endless.items() for part in ("--set", f"{name}={value}")]
    run = tmp_path / "run"
    arguments = command("train", "scenes", "--smoke", *settings, "--out", run)
    process = subprocess.Popen(**arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(lambda: num_lines(run) >= 12)
    finally:
        os.killpg(process.pid, sign)  # everything of that job, the loader's worker too
    output = process.communicate(timeout=60)[0]
    done, saved = lines(run, "train")[-1]["step"], state.read_step(run / "checkpoint.safetensors")
    if sign == signal.SIGKILL:
        assert (process.returncode, done - 2 <= saved) == (-sign, True), output
    else:
        assert (process.returncode, saved >= done) == (RESUME_CODE, True), output
        assert "interrupted at step" in output
        assert f"go on with --resume --out {run}" in output
    for folder, first in ((run, saved), (tmp_path / "whole", 0)):  # both are cut some steps later
        crash(smoke(**endless), folder, done + 5 - first, resume=first > 0)
    assert lines(run, "train")[-1]["step"] == done + 4
    assert lines(run) == lines(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_checkpoint_is_read_is_not_taken_for_damage(tiny_run, monkeypatch, number):
    """Readers written in C make an error of their own of any exception."""
    before, kept = files(tiny_run), state.read_tensors

    def read(path):
        try:
            os.kill(os.getpid(), number)
            return kept(path)
        except KeyboardInterrupt:
            raise state.Damaged(f"{path} is damaged; start anew") from None

    monkeypatch.setattr(state, "read_tensors", read)
    found = call("train", "scenes", "--smoke", "--resume", "--out", tiny_run, "--set", "optim.epochs=2")
    assert found.exit_code == RESUME_CODE, found.output
    assert "interrupted before the first step; the last good checkpoint is" in found.output
    assert files(tiny_run) == before


def test_a_finished_run_is_left_alone_or_made_longer_and_its_evaluations_go(tiny_run, capsys):
    before = files(tiny_run)
    train(smoke(), tiny_run, resume=True)
    assert "is finished: it has done 2 of 2 steps" in capsys.readouterr().out
    assert files(tiny_run) == before
    train(smoke(optim__epochs=2), tiny_run, quiet=True, resume=True)
    assert [line["step"] for line in lines(tiny_run, "train")] == [1, 2, 3, 4]
    assert not (tiny_run / "evaluations").exists()  # they were of other weights


def test_a_run_is_not_overwritten_by_accident_but_may_start_anew_before_its_first_checkpoint(tmp_path, capsys):
    crash(smoke(), tmp_path, 1)
    train(smoke(), tmp_path, resume=True)
    assert "holds no checkpoint yet: starting from the beginning" in capsys.readouterr().out
    assert [line["step"] for line in lines(tmp_path, "train")] == [1, 2]
    with pytest.raises(ValueError, match=r"holds a run already; go on with --resume"):
        train(smoke(), tmp_path, quiet=True)


def test_nothing_goes_on_with_other_settings_unless_that_is_accepted(tmp_path):
    run = train(smoke(optim__name="sgd"), tmp_path / "run", recipe="scenes", quiet=True)
    before = files(run)
    words = r"run began with other settings: optim\.name was sgd, now adamw; optim\.lr was .*, now 0\.5; seed was 0"
    with pytest.raises(ValueError, match=words):
        train(smoke(optim__lr=0.5, seed=3, optim__name="adamw"), run, quiet=True, resume=True)
    with pytest.raises(ValueError, match=r"does not fit this configuration \(.*size mismatch.*choose another --out"):
        train(smoke(model__options__embed_dim=64, optim__name="sgd"), run, quiet=True, resume=True, force=True)
    arguments = ["train", "scenes", "--smoke", "--resume", "--out", run, "--no-evaluate", "--seed", 3]
    assert "seed was 0, now 3" in refused(*arguments)
    assert files(run) == before
    changes = ["--set", "optim.epochs=2", "--set", "optim.name=adamw"]  # of sgd, whose state it cannot use
    done(*arguments, "--force", *changes)
    assert read_config(run)["config"].seed == 3
    assert [line["step"] for line in lines(run, "train")] == [1, 2, 3, 4]


def test_a_full_disk_stops_the_run_and_the_last_good_checkpoint_survives(tmp_path, monkeypatch, whole):
    writes, kept = [], file.save_file

    def save(tensors, path, metadata=None):
        if writes:
            Path(path).write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        writes.append(path)
        kept(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(file, "save_file", save)
        with pytest.raises(Stopped, match=r"No space left on device.*last good checkpoint is .*go on with --resume"):
            train(CASES["adamw"], tmp_path, quiet=True)
    assert state.read_step(tmp_path / "checkpoint.safetensors") == 2
    assert not list(tmp_path.glob(".*"))
    train(CASES["adamw"], tmp_path, quiet=True, resume=True)
    same(whole("adamw"), tmp_path)


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


def cut(whole: bytes) -> bytes:
    return whole[:1000]


def flip(whole: bytes) -> bytes:
    return whole[:-5000] + bytes([whole[-5000] ^ 4]) + whole[-4999:]


def test_a_damaged_checkpoint_is_not_used_and_the_one_before_is(tmp_path, capsys):
    """With one more step to do, after a damaged checkpoint of step 2: again from that of step 1."""
    config = smoke(checkpoint_every=0.5)
    run = train(config, tmp_path / "whole", quiet=True)
    for damage in (cut, flip):
        copy = shutil.copytree(run, tmp_path / damage.__name__)
        latest, previous = copy / state.CHECKPOINT, copy / state.PREVIOUS
        assert (state.read_step(latest), state.read_step(previous)) == (2, 1)
        latest.write_bytes(damage(latest.read_bytes()))
        with pytest.raises(ValueError, match=r"checkpoint\.safetensors is (damaged|truncated)"):
            state.read_step(latest)
        capsys.readouterr()
        train(config, copy, resume=True)
        said = capsys.readouterr().out
        assert "checkpoint.safetensors is " in said
        assert "checkpoint.previous.safetensors, written after 1 steps" in said
        assert "is finished" not in said
        same(run, copy)
        assert state.read_step(previous) == 1  # the damaged one did not take its place


def test_a_kill_between_two_checkpoints_leaves_one_and_without_a_good_one_nothing_is_resumed(tiny_run):
    (tiny_run / state.CHECKPOINT).rename(tiny_run / state.PREVIOUS)  # where links do not exist, there is this moment
    with pytest.raises(ValueError, match="holds a run already"):
        train(smoke(), tiny_run, quiet=True)
    train(smoke(), tiny_run, quiet=True, resume=True)
    assert "last good checkpoint" in state.how_to_resume(tiny_run)
    for path in tiny_run.glob("checkpoint*"):
        path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(ValueError, match=r"no checkpoint can be read: .*safetensors is truncated.*start anew"):
        train(smoke(), tiny_run, quiet=True, resume=True)


def test_a_nan_stops_the_run_with_the_step_and_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    seen, kept = [], loop.compute_losses

    def losses(*args):
        found = kept(*args)
        seen.append(found)
        return {**found, "loss": found["loss"] * (math.nan if len(seen) == 4 else 1)}

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


def test_what_was_learned_survives_an_evaluation_that_fails(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of memory")

    config = smoke(checkpoint_every=20)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "packed", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            train(config, tmp_path, quiet=True)
    assert state.read_step(tmp_path / "checkpoint.safetensors") == 2
    train(config, tmp_path, resume=True, quiet=True)
    assert (tmp_path / "model/model.safetensors").is_file()
    assert [line["step"] for line in lines(tmp_path, "train")] == [1, 2]  # none was done again


def parts(scale: float) -> state.Parts:
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=5)
    return state.Parts(model, None, torch.optim.SGD(model.parameters()), None, scaler)


def test_the_scale_of_fp16_goes_on(tmp_path):
    written = parts(1024.0)
    for _ in range(3):
        loss = written.scaler.scale(written.model(torch.ones(1, 2)).sum())
        loss.backward()
        written.scaler.step(written.optimizer)
        written.scaler.update()
    state.write_state(tmp_path / "checkpoint.safetensors", written, step=3)
    found = parts(2.0)
    assert state.read_state(tmp_path / "checkpoint.safetensors", found).step == 3
    assert found.scaler.state_dict() == written.scaler.state_dict()
    assert found.scaler.state_dict()["_growth_tracker"] == 3


class Three:
    """Stands in for the first of three processes that gather."""

    num_processes, device = 3, torch.device("cpu")

    def gather(self, own):
        return torch.cat([own, own + 1, own + 2])


def test_every_process_gets_its_own_random_state_back_if_it_was_saved(tmp_path, monkeypatch):
    path, own, restored = tmp_path / "checkpoint.safetensors", torch.get_rng_state(), []
    random = state.random_states(Three())
    state.write_state(path, parts(1.0), step=3, random=random)
    monkeypatch.setattr(torch, "set_rng_state", restored.append)
    assert [state.read_state(path, parts(1.0), rank).has_random_state for rank in range(4)] == [True] * 3 + [False]
    assert [torch.equal(found, own + rank) for rank, found in enumerate(restored)] == [True] * 3
    state.write_state(path, parts(1.0), step=3)  # of one process
    assert [state.read_state(path, parts(1.0), rank).has_random_state for rank in range(2)] == [True, False]
