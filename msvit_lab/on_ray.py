"""Sweeps on Ray: the runs of a grid on all machines of a cluster.

    failed = run_jobs("scenes", jobs, out, SweepProgress(jobs, out), at_once=4)     # as msvit_lab.sweep.run_jobs

Machines share a file system: run folders and images have the same paths on all of them. `ray.init` connects to the
cluster of RAY_ADDRESS, or to one that `ray start` has started on this machine, else Ray runs on this machine alone.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

from msvit_lab.folder_lock import VOID, find_holder, temporary_folder, wait_until_free
from msvit_lab.interrupts import WARNINGS
from msvit_lab.runs import is_evaluated
from msvit_lab.sweep import ENDING, Job, SweepProgress, clean_finished_run, in_order, train_command
from msvit_lab.worker import last_line, run_command

RETRIES = 5  # times that a run is begun again because its process or machine died
POLLED = 1.0  # seconds between two checks which runs have begun


def check_installed() -> None:
    """Raise ValueError with the pip line unless Ray can be imported."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--on ray needs Ray, which cannot be imported ({error}); pip install 'msvit[ray]'") from None


@contextmanager
def connected() -> Iterator[Any]:
    """Ray, connected to a cluster or started here, until the end; signals mean what they meant before."""
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *WARNINGS)}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ValueError(f"there is no Ray cluster at RAY_ADDRESS ({error}); start one with ray start --head") from None
    try:
        for number, handler in handlers.items():
            with suppress(ValueError):  # not in the main thread
                signal.signal(number, handler)
        yield ray
    finally:
        ray.shutdown()


def machines(ray: Any) -> list[dict[str, float]]:
    """The resources of each machine; of those with a GPU alone, if there are any."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [each for each in alive if each.get("GPU")] or [each for each in alive if each.get("CPU")]


def share(found: list[dict[str, float]], at_once: int = 1) -> dict[str, float]:
    """What one of `at_once` processes per GPU, or per machine without one, reserves of it."""
    if not found:  # a cluster that starts machines on demand
        return {"num_cpus": 1}
    num_gpus = 1 if found[0].get("GPU") else 0
    cpus = min(each.get("CPU", 0.0) / max(1.0, each.get("GPU", 1.0)) for each in found) / at_once
    return {"num_gpus": num_gpus / at_once, "num_cpus": int(cpus) if cpus >= 1 else cpus}


def run_jobs(
    recipe: str, jobs: list[Job], out: Path, progress: SweepProgress, smoke: bool = False, at_once: int = 1,
) -> list[Job]:  # fmt: skip
    """Run what is not finished yet: one task per run, `at_once` per GPU, or per machine without one.

    Returns the jobs that failed. A task whose process or machine dies is begun again elsewhere and goes on from the
    run's last checkpoint. None is timed. An interrupt ends the runs after a checkpoint.
    """
    failed, out = [], out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with temporary_folder(out, ".decoded-") as decoded, connected() as ray:
        task = ray.remote(train).options(max_retries=RETRIES, **share(machines(ray), at_once))
        tasks: dict[str, Any] = {}  # by the name of the run
        running: dict[Any, Job] = {}
        begun: set[str] = set()
        try:
            for job in in_order(jobs):
                if is_evaluated(folder := out / job.name):
                    clean_finished_run(folder)
                    progress.skipped(job)
                    continue
                command = train_command(recipe, job, folder, smoke=smoke, timed=False)
                needed = [tasks[name] for name in job.after if name in tasks]
                tasks[job.name] = task.remote(command, folder, decoded, Path.cwd(), *needed)
                running[tasks[job.name]] = job
            while running:
                done, _ = ray.wait(list(running), num_returns=len(running), timeout=POLLED)
                for ref, job in running.items():
                    if job.name not in begun and (ref in done or find_holder(out / job.name) is not None):
                        begun.add(job.name)
                        progress.started(job)
                for ref in done:
                    job, error = running.pop(ref), result(ray, ref)
                    progress.ended(job, error)
                    failed += [] if error is None else [job]
        except BaseException:
            for ref in running:
                ray.cancel(ref)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=ENDING)  # runs save and end
            raise
    return failed


def train(arguments: list[str], folder: Path, decoded: Path, cwd: Path, *after: Any) -> str | None:
    """In a process of Ray: `msvit train`. Returns its last line if it failed. Ray waits for `after`, other runs."""
    log = folder / "log.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        wait_until_free(folder, VOID + ENDING)  # a process that died on another machine holds it until its lock is void
        if is_evaluated(folder):  # by that process
            return None
        with chdir(cwd):  # settings may have relative paths
            return None if run_command(arguments, log, decoded) == 0 else last_line(log)
    except OSError as error:
        return str(error)


def result(ray: Any, ref: Any) -> str | None:
    """What a finished task returned, or why it did not: its process died too often."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        return str(getattr(error, "cause", None) or error).strip().partition("\n")[0]  # without Ray's traceback
