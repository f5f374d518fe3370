"""A sweep: many runs of one recipe, some at once, in processes that are used for one run after the other.

    jobs = grid("scenes", targets=[0.5, 0.25], weights=[4.0], sizes=[64, 48], gates=["disc"], shares=[0.3])
    out = Path("runs/sweep")
    failed = run_jobs("scenes", jobs, out, SweepProgress(jobs, out), at_once=4)

A run that fails does not stop the others. Images that are cached are decoded once for all of them.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from threading import Condition, Event, Lock

from rich.console import Console

from msvit.backbones import adapt
from msvit.reduction import REDUCERS, make_reducer
from msvit.saving.file import remove_leftovers
from msvit.saving.host import build_on_meta
from msvit_lab.build import dense_unit
from msvit_lab.config import Config, override
from msvit_lab.folder_lock import locked, temporary_folder, wait_until_free
from msvit_lab.hosts import make_host, without_weights
from msvit_lab.recipes import recipe as find
from msvit_lab.runs import Run, is_evaluated
from msvit_lab.training.state import check_settings
from msvit_lab.worker import Worker

ENDING = 30.0  # seconds that a run of a sweep that was killed has for its last checkpoint


@dataclass(frozen=True)
class Job:
    name: str  # of its folder
    changes: dict[str, str] = field(default_factory=dict)  # settings, as for --set
    after: tuple[str, ...] = ()  # the runs whose weights it needs


class SweepProgress:
    """Lines about a running sweep: which run of how many, what came of it, and the time left."""

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
            self._print(job, f"{what}{f', about {timedelta(seconds=round(left))} left' if left else ''}")

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


def grid(
    recipe: str, targets: list[float], weights: list[float], sizes: list[int] | None = None,
    seeds: list[int] | None = None, gates: list[str] | None = None, shares: list[float] | None = None,
    reducers: list[str] | None = None, out: Path | None = None, changes: dict[str, str] | None = None,
    smoke: bool = False, from_dense: bool = False, gated_sizes: list[int] | None = None,
) -> list[Job]:  # fmt: skip
    """The dense baselines, every target with every weight, every gate that does not learn at every share.

    `sizes` are the input sizes of the dense baselines, `gated_sizes` those of the runs with a gate, by default the
    recipe's own, which is full size; runs of another size have it in their name. Then each of these again, of the dense
    ones those of a size in `gated_sizes`, with every reducer: evit-0.7, dynamicvit-0.5, tome-r8. With `from_dense` runs
    with a gate start from the weights of the dense run of their size and seed. A reducer that needs a teacher learns
    from that dense run, in the folder `out`. In settings {seed} stands for a run's seed:
    model.weights=runs/dense-s{seed}.
    """
    config = override(find(recipe, smoke=smoke), changes or {})  # before anything runs: are the settings known?
    full = config.data.img_size
    host = build_on_meta(partial(make_host, without_weights(config), 1))
    backbone = adapt(host, config.model.merge_at)
    coarse = config.model.coarse or backbone.default_coarse(None)
    if sizes is None:
        sizes = [full - i * coarse for i in range(4) if full - i * coarse >= 2 * coarse]
        sizes += [size for size in gated_sizes or [] if size not in sizes]
    gated_sizes, unit = gated_sizes or [full], dense_unit(backbone)
    if wrong := [size for size in sizes if size < unit or size % unit]:
        near = max(unit, wrong[0] // unit * unit)
        raise ValueError(f"dense sizes {wrong} are no multiples of {unit} px, as the host needs; {near} would be one")
    wrong = [size for size in gated_sizes if size < coarse or size % coarse]
    if wrong and ((targets and weights) or (gates and shares)):
        raise ValueError(
            f"images of {wrong[0]} px are no multiple of a cell, {coarse} px, so that runs with a gate cannot be made; "
            f"choose {wrong[0] // coarse * coarse or coarse} px"
        )
    for size in gated_sizes if reducers or from_dense else ():
        if size not in sizes:
            what = "reducers are compared with" if reducers else "runs with a gate start from"
            raise ValueError(f"{what} the dense run of {size} px; add {size} to the dense sizes")
    own = dict.fromkeys(("model.freeze_gate", "gate.follow"), "false")  # not the learned gate's settings
    own |= {"model.gate_from": "none", "model.share_of": "none", "model.mode": "packed", "gate.teacher": "none"}
    jobs: list[Job] = []
    for seed in seeds or [0]:
        common = {name: value.replace("{seed}", str(seed)) for name, value in (changes or {}).items()}
        for size in sizes:
            dense = own | {"model.gate": "none", "seed": str(seed)} | at_size(config, size)
            jobs.append(Job(f"dense-{size}-s{seed}", common | dense))
        again: list[tuple[Job, str]] = []  # to be run with reducers too, and the dense run beside it
        for size in gated_sizes:
            dense_run = f"dense-{size}-s{seed}"
            after = (dense_run,) if from_dense else ()
            start = common | ({"model.weights": str(((out or Path()) / dense_run).resolve())} if from_dense else {})
            start |= {} if size == full else at_size(config, size)
            end = f"-s{seed}" if size == full else f"-{size}px-s{seed}"
            beside = [job for job in jobs if job.name == dense_run]
            for target, weight in product(targets, weights):
                gated = {"gate.target": f"{target:g}", "gate.weight": f"{weight:g}", "seed": str(seed)}
                beside.append(Job(f"t{target:g}-w{weight:g}{end}", start | gated, after))
            for gate, share in product(gates or [], shares or []):
                fixed = own | {"model.gate": gate, "model.share": f"{share:g}", "seed": str(seed)}
                beside.append(Job(f"{gate}-{share:g}{end}", start | fixed, after))
            jobs += [job for job in beside if job.name != dense_run]
            again += [(job, dense_run) for job in beside]
        for (job, dense_run), reducer in product(again, reducers or []):
            jobs.append(with_reducer(job, reducer, dense_run, out))
    for job in jobs:
        about = override(config, job.changes).reducer
        if (made := make_reducer(about.name, rate=about.rate, r=about.r, at=about.at)) is not None:
            backbone.check_reducer(made)
    return list({job.name: job for job in jobs}.values())


def at_size(config: Config, size: int) -> dict[str, str]:
    """The settings of another input size."""
    found = {"data.img_size": str(size)}
    if config.data.short_side is not None:  # the whole image gets smaller, not only what is cut from it
        found["data.short_side"] = str(round(config.data.short_side * size / config.data.img_size))
    return found


def with_reducer(job: Job, reducer: str, teacher: str, out: Path | None) -> Job:
    """The same run with a reducer such as evit-0.7 or tome-r8."""
    name, _, amount = reducer.partition("-")
    if name not in REDUCERS or not amount:
        raise ValueError(f"{reducer!r} is no reducer with its amount; write for example evit-0.7 or tome-r8")
    kind, value = ("r", amount[1:]) if amount.startswith("r") else ("rate", amount)
    changes = job.changes | dict.fromkeys(("reducer.rate", "reducer.r", "reducer.teacher"), "none")
    changes |= {"reducer.name": name, f"reducer.{kind}": value}
    base, _, seed = job.name.rpartition("-s")
    label = f"{base}-{reducer}-s{seed}"
    if not REDUCERS[name].needs_teacher:
        return Job(label, changes, job.after)
    return Job(label, changes | {"reducer.teacher": str(((out or Path()) / teacher).resolve())}, after=(teacher,))


def check_folders(recipe: str, jobs: list[Job], out: Path, smoke: bool = False) -> None:
    """Raise ValueError if a folder has a run with other settings: it would be taken for a finished one."""
    for job in jobs:
        check_settings(out / job.name, override(find(recipe, smoke=smoke), job.changes), "choose another --out")


def in_order(jobs: list[Job]) -> list[Job]:
    """Each after those it needs, otherwise as they are given."""
    known, found = {job.name: job for job in jobs}, dict[str, Job]()

    def add(job: Job) -> None:
        for name in job.after:
            if name in known:
                add(known[name])
        found[job.name] = job

    for job in jobs:
        add(job)
    return list(found.values())


def clean_finished_run(folder: Path) -> None:
    """Remove what a process left that was killed when its run was finished already."""
    with suppress(ValueError, OSError), locked(folder):  # unless another process works there
        for each in (folder, *folder.glob("*/")):
            remove_leftovers(each)


def train_command(recipe: str, job: Job, folder: Path, smoke: bool, timed: bool) -> list[str]:
    """The arguments of `msvit` that train, or go on with, a run. `timed`: as long as nothing else runs there."""
    settings = [part for name, value in job.changes.items() for part in ("--set", f"{name}={value}")]
    common = [*(["--smoke"] if smoke else []), *([] if timed else ["--rounds", "0"])]
    return ["train", recipe, "--out", str(folder), "--resume", *common, *settings]


def run_jobs(
    recipe: str, jobs: list[Job], out: Path, progress: SweepProgress, smoke: bool = False, at_once: int = 1,
) -> list[Job]:  # fmt: skip
    """Run what is not finished yet, some at once. Returns the jobs that failed; their folders hold log.txt.

    A run waits for those it needs. Runs at once share the machine, so none is timed.
    """
    left = in_order(jobs)
    waited_for, failed = {job.name for job in jobs}, list[Job]()
    stop, changed = Event(), Condition()

    def take() -> Job | None:
        """The first run that waits for no other; None once there is nothing left."""
        with changed:
            while left and not stop.is_set():
                if ready := next((job for job in left if not waited_for.intersection(job.after)), None):
                    left.remove(ready)
                    return ready
                changed.wait()
        return None

    def work(worker: Worker) -> None:
        while (job := take()) is not None:
            try:
                if not run(job, worker):
                    failed.append(job)
            except BaseException:
                stop.set()
                raise
            finally:
                with changed:
                    waited_for.remove(job.name)
                    changed.notify_all()

    def run(job: Job, worker: Worker) -> bool:
        folder = out / job.name
        if is_evaluated(folder):
            clean_finished_run(folder)
            progress.skipped(job)
            return True
        try:
            progress.started(job)
            folder.mkdir(parents=True, exist_ok=True)
            wait_until_free(folder, ENDING)
            command = train_command(recipe, job, folder, smoke, timed=at_once == 1)
            error = worker.run(command, folder / "log.txt")
        except OSError as problem:
            error = str(problem)
        if not stop.is_set():
            progress.ended(job, error)
        return error is None

    out.mkdir(parents=True, exist_ok=True)
    with temporary_folder(out, ".decoded-") as decoded, ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(decoded))) for _ in range(at_once)]
        with ThreadPoolExecutor(at_once) as threads:
            try:  # a signal may come as soon as the first thread works
                list(threads.map(work, workers))
                return failed
            except BaseException:
                stop.set()
                for worker in workers:  # the runs save and end, also where the interrupt did not reach their processes
                    worker.stop()
                raise
