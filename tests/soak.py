"""Kill trainings at random moments, and compare the results with runs that were not killed.

    python tests/soak.py --kills 100          # what `make soak` does: minutes

Each kill is SIGKILL, SIGTERM or SIGINT, to the command alone or to its whole process group, at a random moment or while
a file is being written. After it, the same command with --resume goes on, until it is finished. Then another begins.

- lost: a checkpoint goes back, or a signal that can be handled leaves a step behind that was done, or another exit code
- corrupt: a checkpoint, model, configuration or evaluation that cannot be read
- left over: temporary files, locks or processes after the command was finished by a next start
- different: final weights or metrics that differ by a bit from those of a run that was not killed

Trainings and segmentations are forked from this process, which has imported everything: they start at once. Sweeps are
processes of their own, as their workers are.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import torch
from safetensors.torch import load_file
from smoke_runs import command, lines

import msvit_lab.evaluate
import msvit_lab.recipes
import msvit_lab.training.loop  # noqa: F401  (what commands import, so that they start at once)
from msvit import load
from msvit_lab.cli import app
from msvit_lab.folder_lock import find_holder, wait_until_free
from msvit_lab.interrupts import RESUME_CODE
from msvit_lab.training.state import CHECKPOINT, PREVIOUS, read_step

SETTINGS = ["optim.epochs=8", "checkpoint_every=1", "eval_every=4", "log_every=1"]
TRAIN = ["train", "scenes", "--smoke", "--rounds", "0", "--resume"]
SEGMENT = [*TRAIN, "--set", "task=segment", "--set", "data.scales=1,1.2", "--set", "data.max_share=1"]
SWEEP = ["sweep", "scenes", "--smoke", "--target", "0.25", "--gate-weight", "20", "--dense-sizes", "48"]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
SHORTEST = 1.0  # seconds within which a command is killed that had only little left to do
PATIENCE = 900.0  # seconds for one command


@dataclass
class Job:
    """A command, and how its process is started."""

    name: str
    arguments: list[str]
    start: Callable[[list[str], Path], int]  # command and log -> process
    weight: float  # how often it is chosen
    seconds: float = 0.0  # that it takes without a kill


@dataclass
class Found:
    kills: int = 0
    chains: int = 0  # commands that were killed until they were finished
    problems: list[str] = field(default_factory=list)  # "lost: ...", "corrupt: ...", "left over: ...", "different: ..."


def fork(arguments: list[str], log: Path) -> int:
    """A process that has everything imported."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        found = app(arguments, standalone_mode=False)
        code = found if isinstance(found, int) else 0
    except KeyboardInterrupt:
        code = -signal.SIGINT  # before the command began
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code % 256)


def spawn(arguments: list[str], log: Path) -> int:
    with open(log, "a") as file:
        process = subprocess.Popen(**command(*arguments), stdout=file, stderr=file, start_new_session=True)
    process.returncode = 0  # `wait` below waits for it
    return process.pid


def start(job: Job, out: Path) -> int:
    settings = [part for each in SETTINGS for part in ("--set", each)]
    return job.start([*job.arguments, *settings, "--out", str(out)], out.with_suffix(".log"))


def wait(pid: int, until: Callable[[], bool] = lambda: False) -> int | None:
    """The exit code of a process; None if it is running when `until()` is true."""
    end = time.monotonic() + PATIENCE
    while not until():
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            raise SystemExit(f"process {pid} did not end within {PATIENCE:.0f} s")
        time.sleep(0.0005)
    return None


def runs_in(out: Path) -> list[Path]:
    """A training's own folder, or those of a sweep."""
    return [out] if (out / "config.json").is_file() else sorted(p.parent for p in out.glob("*/config.json"))


def last_step(run: Path) -> int:
    """The last step that metrics.jsonl has a line of."""
    found = 0
    with suppress(FileNotFoundError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            with suppress(ValueError, KeyError):
                found = max(found, json.loads(line)["step"])
    return found


def is_writing(out: Path) -> bool:
    return any(True for run in (out, *out.glob("*/")) for _ in run.glob(".*.part"))


def kill(job: Job, pid: int, out: Path, draw: random.Random, found: Found) -> tuple[signal.Signals | None, int]:
    """Kill at a random moment, or while a file is written. The signal (None: it was finished before) and exit code."""
    moment = time.monotonic() + draw.random() * max(job.seconds, SHORTEST)
    while_writing, group = draw.random() < 0.4, draw.random() < 0.5
    number = draw.choice(SIGNALS)
    code = wait(pid, until=lambda: time.monotonic() >= moment and (not while_writing or is_writing(out)))
    if code is not None:
        return None, code
    with suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, number)
    found.kills += 1
    code = wait(pid)
    assert code is not None
    return number, code


def check_after_kill(
    job: Job, out: Path, number: signal.Signals, code: int, before: dict, marks: dict, found: Found
) -> None:
    """`before`: the steps of the checkpoints after the last kill; `marks`: the steps done when this process began."""
    where = f"{job.name}, kill {found.kills}, {number.name}, code {code}, {out}"
    before_or_after = {-number, 128 + number, 256 - number}  # the command proper, where nothing can be lost
    if code not in before_or_after | {0} | ({RESUME_CODE} if number != signal.SIGKILL else set()):
        found.problems.append(f"lost: {where}: exit code")
    for run in runs_in(out):
        wait_until_free(run, 60)
        if (holder := find_holder(run)) is not None:
            found.problems.append(f"left over: {where}: process {holder.pid} still trains in {run}")
        step = 0
        for name in (CHECKPOINT, PREVIOUS):
            if (run / name).is_file():
                try:
                    step = max(step, read_step(run / name))
                except ValueError as error:
                    found.problems.append(f"corrupt: {where}: {error}")
        if step < before.get(run, 0):
            found.problems.append(f"lost: {where}: {run} goes back from step {before[run]} to {step}")
        if number != signal.SIGKILL and last_step(run) > max(step, marks.get(run, 0)):
            found.problems.append(f"lost: {where}: {run} did step {last_step(run)}, but saved {step}")
        before[run] = step


def check_end(job: Job, out: Path, whole: Path, code: int, found: Found) -> None:
    where = f"{job.name}, after {found.kills} kills, {out}"
    if code != 0:
        found.problems.append(f"lost: {where}: exit code {code}; {out.with_suffix('.log')}")
        return
    if rest := [str(path) for pattern in (".*", "*.tmp*") for path in out.rglob(pattern)]:
        found.problems.append(f"left over: {where}: {rest}")
    if [run.relative_to(out) for run in runs_in(out)] != [run.relative_to(whole) for run in runs_in(whole)]:
        found.problems.append(f"lost: {where}: other runs")
        return
    for run, twin in zip(runs_in(out), runs_in(whole), strict=True):
        try:
            load(run / "model")
            json.loads((run / "evaluations/val.json").read_text())
            weights, wanted = (load_file(folder / "model/model.safetensors") for folder in (run, twin))
        except Exception as error:
            found.problems.append(f"corrupt: {where}: {run}: {error}")
            continue
        if weights.keys() != wanted.keys() or not all(torch.equal(weights[key], wanted[key]) for key in wanted):
            found.problems.append(f"different: {where}: weights of {run}")
        if lines(run) != lines(twin):
            found.problems.append(f"different: {where}: metrics of {run}")


def soak(num: int, seed: int, folder: Path, jobs: list[Job]) -> Found:
    draw, found = random.Random(seed), Found()
    for job in jobs:
        whole, begin = folder / f"{job.name}-whole", time.monotonic()
        if wait(start(job, whole)) != 0:
            raise SystemExit(f"{job.name} fails without a kill: {whole}.log")
        job.seconds = time.monotonic() - begin
        print(f"{job.name}: {job.seconds:.1f} s without a kill", flush=True)
    while found.kills < num:
        job = draw.choices(jobs, [job.weight for job in jobs])[0]
        out = folder / f"{job.name}-{found.chains}"
        before: dict[Path, int] = {}
        while True:
            marks = {run: last_step(run) for run in runs_in(out)}
            begin, pid = time.monotonic(), start(job, out)
            number, code = kill(job, pid, out, draw, found) if found.kills < num else (None, wait(pid))
            if number is None:
                job.seconds = min(job.seconds, time.monotonic() - begin)  # else kills come too late
                break
            check_after_kill(job, out, number, code, before, marks, found)
        check_end(job, out, folder / f"{job.name}-whole", code, found)
        found.chains += 1
        print("\n".join([f"{found.kills} kills, {found.chains} finished", *found.problems]), flush=True)
        if not found.problems:
            shutil.rmtree(out, ignore_errors=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", type=float, default=0.1, help="share of sweeps, which take longest")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rest = 1 - given.sweep
    jobs = [Job("train", TRAIN, fork, 0.7 * rest), Job("segment", SEGMENT, fork, 0.3 * rest)]
    jobs += [Job("sweep", SWEEP, spawn, given.sweep)] if given.sweep else []
    folder = Path(mkdtemp(prefix="msvit-soak-"))
    begin = time.monotonic()
    found = soak(given.kills, given.seed, folder, jobs)
    print(f"{found.kills} kills, {len(found.problems)} problems; {time.monotonic() - begin:.0f} s")
    if found.problems:
        sys.exit(f"what was left is in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
