"""Lines about a running sweep: which run of how many, what came of it, and the time left.

    run_jobs("scenes", jobs, out, watcher=SweepProgress(jobs, out))
"""

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from rich.console import Console

from msvit_lab.runs import Run
from msvit_lab.sweep import Job, Watcher


class SweepProgress(Watcher):
    def __init__(self, jobs: Sequence[Job], out: Path, console: Console | None = None) -> None:
        self.out, self.num, self.console = out, len(jobs), console or Console(markup=False)
        self.lock, self.start = Lock(), time.perf_counter()
        self.numbers: dict[str, int] = {}  # of the runs, in the order they began
        self.num_trained = self.num_skipped = 0

    def skipped(self, job: Job) -> None:
        with self.lock:
            self.num_skipped += 1
            self._print(job, "finished before")

    def started(self, job: Job) -> None:
        with self.lock:
            self._print(job, f"training, log in {self.out / job.name / 'log.txt'}")

    def ended(self, job: Job, error: str | None) -> None:
        with self.lock:
            self.num_trained += 1
            left = (self.num - self.num_skipped - self.num_trained) / self.num_trained
            left *= time.perf_counter() - self.start
            what = f"finished{self._score(job)}" if error is None else f"failed: {error}"
            self._print(job, f"{what}{f', about {duration(left)} left' if left else ''}")

    def _score(self, job: Job) -> str:
        try:
            run = Run(self.out / job.name)
        except ValueError:
            return ""
        return "" if run.score is None else f", {run.metric.name} {run.score:.1%}"

    def _print(self, job: Job, what: str) -> None:
        number = self.numbers.setdefault(job.name, len(self.numbers) + 1)
        words = f"run {number} of {self.num}, {job.name}: {what}"
        self.console.print(words, highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
