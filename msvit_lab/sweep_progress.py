"""Progress of a running sweep: which run of how many, its steps, its metric, and the time left.

    with SweepProgress(jobs, out) as progress:
        run_jobs("scenes", jobs, out, watcher=progress)

On a terminal a bar for all runs and one for each that is training; in a log one line when a run starts, is evaluated or
ends, and one every half minute. All numbers come from the runs' own metrics.jsonl.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from msvit_lab.evaluation_files import METRICS
from msvit_lab.json_values import finite
from msvit_lab.runs import Run
from msvit_lab.sweep import Job, Watcher

EVERY = 30.0  # seconds between two lines about a run in a log
REFRESH = 1.0  # seconds between two readings of the runs' metrics


@dataclass
class State:
    """A run that is training."""

    job: Job
    number: int  # it is the second run of the sweep, say
    task: TaskID
    printed: float  # when there was a line about it
    share: float = 0.0  # of its training that is done
    before: float | None = None  # the share that an earlier sweep had done
    num_evals: int = 0


class SweepProgress(Watcher):
    def __init__(self, jobs: Sequence[Job], out: Path, console: Console | None = None) -> None:
        self.out, self.num = out, len(jobs)
        self.console = console or Console(markup=False)
        self.bars = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
            TextColumn("{task.fields[words]}", markup=False),
            console=self.console, disable=not self.console.is_terminal, transient=True,
        )  # fmt: skip
        self.lock, self.stop = RLock(), Event()
        self.states: dict[str, State] = {}
        self.num_started = self.num_done = self.num_skipped = 0
        self.start = time.perf_counter()
        self.all = self.bars.add_task("runs", total=self.num, words=f"0 of {self.num}")
        self.thread = Thread(target=self._refresh_often, daemon=True)

    def __enter__(self) -> "SweepProgress":
        self.bars.start()
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop.set()
        self.thread.join()
        self.bars.stop()

    def skipped(self, job: Job) -> None:
        with self.lock:
            self.num_started += 1
            self.num_skipped += 1
            self._print(self.num_started, job, "finished before")

    def started(self, job: Job) -> None:
        with self.lock:
            self.num_started += 1
            task = self.bars.add_task(job.name, total=1.0, words="starting")
            self.states[job.name] = State(job, self.num_started, task, printed=time.perf_counter())
            self._print(self.num_started, job, "training")

    def ended(self, job: Job, error: str | None) -> None:
        with self.lock:
            state = self.states.pop(job.name)
            self.bars.remove_task(state.task)
            self.num_done += 1
            what = f"failed: {error}" if error is not None else f"finished{self._score(job)}"
            self._print(state.number, job, f"{what}{self._time_left()}")

    def refresh(self) -> None:
        """Read the metrics of the runs that are training, and show them."""
        with self.lock:
            for state in self.states.values():
                self._update(state)
            done = self.num_done + self.num_skipped
            completed = done + sum(state.share for state in self.states.values())
            self.bars.update(self.all, completed=completed, words=f"{done} of {self.num}{self._time_left()}")

    def _refresh_often(self) -> None:
        while not self.stop.wait(REFRESH):
            self.refresh()

    def _update(self, state: State) -> None:
        try:
            run = Run(self.out / state.job.name)
            train, evals = run.of_kind("train"), run.of_kind("eval")
        except (ValueError, OSError):  # it is about to be written
            return
        epoch, epochs = finite(train[-1].get("epoch")) if train else None, finite(run.setting("optim", "epochs"))
        if not epoch or not epochs:
            return
        state.share = min(1.0, epoch / epochs)
        state.before = state.share if state.before is None else state.before
        words = describe(train[-1], evals[-1] if evals else {}, epochs / epoch)
        self.bars.update(state.task, completed=state.share, words=words)
        now = time.perf_counter()
        if not self.console.is_terminal and (len(evals) > state.num_evals or now - state.printed > EVERY):
            self._print(state.number, state.job, f"{words}{self._time_left()}")
            state.printed, state.num_evals = now, len(evals)

    def _score(self, job: Job) -> str:
        try:
            run = Run(self.out / job.name)
        except ValueError:
            return ""
        return "" if run.score is None else f", {run.metric.name} {run.score:.1%}"

    def _time_left(self) -> str:
        """Assuming that runs go on as fast as they did."""
        shares = sum(state.share - (state.before or 0.0) for state in self.states.values())
        done, remaining = self.num_done + shares, self.num - self.num_skipped - self.num_done
        if done < 0.02 or not remaining:  # too early to estimate
            return ""
        left = remaining - sum(state.share for state in self.states.values())
        return f", about {duration((time.perf_counter() - self.start) / done * left)} left"

    def _print(self, number: int, job: Job, what: str) -> None:
        words = f"run {number} of {self.num}, {job.name}: {what}"
        self.bars.console.print(words, highlight=False, markup=False, soft_wrap=True)


def describe(train: dict[str, Any], last: dict[str, Any], whole: float) -> str:
    """The last line about training and the last evaluation in words; `whole`: the whole training over that so far."""
    step, loss = train["step"], finite(train.get("loss"))
    words = [f"step {step} of {max(step, round(whole * step))}", *([] if loss is None else [f"loss {loss:.3f}"])]
    scores = [(metric.name, finite(last.get(metric.key))) for metric in METRICS.values()]
    return ", ".join([*words, *(f"{name} {score:.1%}" for name, score in scores if score is not None)])


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
