"""What a person sees of a running sweep: which run of how many, its steps, its metric, and the time left.

    with SweepProgress(jobs, out) as progress:
        run_jobs("scenes", jobs, out, watcher=progress)

On a terminal a bar for all runs and one for each that is training; in a log one line when a run starts, is evaluated or
ends, and one every half minute. What is known comes from the runs' own metrics.jsonl.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from msvit.lab.runs import METRICS, Run, finite
from msvit.lab.sweep import Job, Watcher

TAIL = 1 << 16  # bytes of metrics.jsonl that are read: the last lines
EVERY = 30.0  # seconds between two lines about a run in a log
LOOK = 1.0  # seconds between two looks at the runs


@dataclass
class State:
    """What is known of a run that is training."""

    job: Job
    number: int  # it is the second run of the sweep, say
    task: TaskID
    printed: float  # when there was a line about it
    share: float = 0.0  # of its training that is done
    before: float | None = None  # the share that an earlier sweep had done
    num_evals: int = 0


@dataclass
class Tail:
    """The last lines of a run's metrics.jsonl."""

    train: dict[str, Any] = field(default_factory=dict)
    evals: list[dict[str, Any]] = field(default_factory=list)
    epochs: float = 0.0  # of the whole training


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
        self.num_begun = self.num_done = 0
        self.num_skipped = 0
        self.start = time.perf_counter()
        self.all = self.bars.add_task("runs", total=self.num, words=f"0 of {self.num}")
        self.thread = Thread(target=self._watch, daemon=True)

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
            self.num_begun += 1
            self.num_skipped += 1
            self._say(self.num_begun, job, "finished before")

    def started(self, job: Job) -> None:
        with self.lock:
            self.num_begun += 1
            task = self.bars.add_task(job.name, total=1.0, words="starting")
            self.states[job.name] = State(job, self.num_begun, task, printed=time.perf_counter())
            self._say(self.num_begun, job, "training")

    def ended(self, job: Job, error: str | None) -> None:
        with self.lock:
            state = self.states.pop(job.name)
            self.bars.remove_task(state.task)
            self.num_done += 1
            what = f"failed: {error}" if error is not None else f"finished{self._found(job)}"
            self._say(state.number, job, f"{what}{self._left()}")

    def look(self) -> None:
        """Bring what is shown up to date."""
        with self.lock:
            for state in self.states.values():
                self._update(state)
            shares = sum(state.share for state in self.states.values())
            done = self.num_done + self.num_skipped
            words = f"{done} of {self.num}{self._left()}"
            self.bars.update(self.all, completed=done + shares, words=words)

    def _watch(self) -> None:
        while not self.stop.wait(LOOK):
            self.look()

    def _update(self, state: State) -> None:
        found = read_tail(self.out / state.job.name)
        step, epoch = (finite(found.train.get(key)) for key in ("step", "epoch"))
        if step is None or epoch is None or not found.epochs:
            return
        state.share = min(1.0, epoch / found.epochs)
        state.before = state.share if state.before is None else state.before
        words = in_words(found)
        self.bars.update(state.task, completed=state.share, words=words)
        now = time.perf_counter()
        if not self.console.is_terminal and (len(found.evals) > state.num_evals or now - state.printed > EVERY):
            self._say(state.number, state.job, f"{words}{self._left()}")
            state.printed, state.num_evals = now, len(found.evals)

    def _found(self, job: Job) -> str:
        """The score of a run that is evaluated."""
        try:
            run = Run(self.out / job.name)
        except ValueError:
            return ""
        score = run.score
        return "" if score is None else f", {run.metric.name} {score:.1%}"

    def _left(self) -> str:
        """The time that is left, if runs go on as they did."""
        shares = sum(state.share - (state.before or 0.0) for state in self.states.values())
        done, open_ = self.num_done + shares, self.num - self.num_skipped - self.num_done
        if done < 0.02 or not open_:  # too early to say
            return ""
        left = open_ - sum(state.share for state in self.states.values())
        return f", about {duration((time.perf_counter() - self.start) / done * left)} left"

    def _say(self, number: int, job: Job, what: str) -> None:
        words = f"run {number} of {self.num}, {job.name}: {what}"
        self.bars.console.print(words, highlight=False, markup=False, soft_wrap=True)


def read_tail(folder: Path) -> Tail:
    """The last lines of metrics.jsonl; a file that is not there yet has none."""
    try:
        epochs = finite(Run(folder).setting("optim", "epochs")) or 0.0
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return Tail()
    found = Tail(epochs=epochs)
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the first is cut, and the last may be half written
        if line.get("kind") == "train":
            found.train = line
        elif line.get("kind") == "eval":
            found.evals.append(line)
    return found


def in_words(found: Tail) -> str:
    step, epoch = found.train["step"], found.train["epoch"]
    words = f"step {step} of {max(step, round(found.epochs * step / epoch))}"
    words += f", loss {found.train['loss']:.3f}" if finite(found.train.get("loss")) is not None else ""
    last = found.evals[-1] if found.evals else {}
    found_scores = [(metric.name, finite(last.get(metric.key))) for metric in METRICS.values()]
    return ", ".join([words, *(f"{name} {score:.1%}" for name, score in found_scores if score is not None)])


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
