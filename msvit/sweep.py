"""A sweep: many runs of one recipe, one process each, so that a run that fails takes no other with it.

    jobs = grid("scenes", targets=[0.5, 0.25], weights=[4.0], sizes=[64, 48], gates=["disc"], shares=[0.3])
    failed = run_jobs("scenes", jobs, out=Path("runs/sweep"), at_once=4)
"""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event

import msvit
from msvit.backbones import adapt
from msvit.host_config import without_weights
from msvit.recipes import recipe as find
from msvit.training.build import make_host
from msvit.training.config import override, settings
from msvit.training.run import read_config


@dataclass(frozen=True)
class Job:
    name: str  # of its folder
    changes: dict[str, str] = field(default_factory=dict)  # settings, as for --set


def grid(
    recipe: str,
    targets: list[float],
    weights: list[float],
    sizes: list[int] | None = None,
    seeds: list[int] | None = None,
    gates: list[str] | None = None,
    shares: list[float] | None = None,
    changes: dict[str, str] | None = None,
    smoke: bool = False,
) -> list[Job]:
    """The dense baselines, then every target with every weight, then every gate that does not learn at every share."""
    common = changes or {}
    config = override(find(recipe, smoke=smoke), common)  # before anything runs: are the settings known?
    full = config.data.img_size
    bare = replace(config, model=replace(config.model, weights=None, pretrained=False))
    host = without_weights(partial(make_host, bare, 1))
    coarse = config.model.coarse or adapt(host, config.model.merge_at).usual_coarse(None)
    if sizes is None:
        sizes = [full - i * coarse for i in range(4) if full - i * coarse >= 2 * coarse]
    if wrong := [size for size in sizes if size < coarse or size % coarse]:
        raise ValueError(f"dense sizes {wrong} are no multiples of a cell, {coarse} px; {full - coarse} would be one")
    own = {"model.gate_from": "none", "model.freeze_gate": "false", "model.mode": "packed"}  # not the learned gate's
    jobs = []
    for seed in seeds or [0]:
        for size in sizes:
            dense = own | {"model.gate": "none", "data.img_size": str(size), "seed": str(seed)}
            if config.data.short_side is not None:  # the whole image gets smaller, not only what is cut from it
                dense["data.short_side"] = str(round(config.data.short_side * size / full))
            jobs.append(Job(f"dense-{size}-s{seed}", common | dense))
        for target in targets:
            for weight in weights:
                gated = {"gate.target": f"{target:g}", "gate.weight": f"{weight:g}", "seed": str(seed)}
                jobs.append(Job(f"t{target:g}-w{weight:g}-s{seed}", common | gated))
        for gate in gates or []:
            for share in shares or []:
                fixed = own | {"model.gate": gate, "model.share": f"{share:g}", "seed": str(seed)}
                jobs.append(Job(f"{gate}-{share:g}-s{seed}", common | fixed))
    for job in jobs:
        override(config, job.changes)
    return jobs


def check_folders(recipe: str, jobs: list[Job], out: Path, smoke: bool = False) -> None:
    """Refuse folders whose runs have other settings: they would be taken for finished ones."""
    for job in jobs:
        if not (out / job.name / "config.json").is_file():
            continue
        old = read_config(out / job.name)["config"]
        new = override(find(recipe, smoke=smoke), job.changes)
        for (name, _, before), (_, _, now) in zip(settings(old), settings(new), strict=True):
            if before != now:
                raise ValueError(f"{out / job.name} has {name}={before}, but {now} is wanted; choose another --out")


def run_jobs(
    recipe: str,
    jobs: list[Job],
    out: Path,
    say: Callable[[Job, str], None] = lambda job, what: None,
    smoke: bool = False,
    at_once: int = 1,
) -> list[Job]:
    """Run what is not finished yet, some at once. Returns the jobs that failed; their folders hold log.txt."""
    stop = Event()
    with ThreadPoolExecutor(at_once) as threads:
        running = [threads.submit(run_job, recipe, job, out, say, smoke, stop) for job in jobs]
        try:
            return [job for job, done in zip(jobs, running, strict=True) if not done.result()]
        except KeyboardInterrupt:  # the runs got it too, and save
            stop.set()
            raise ValueError("interrupted; the same command goes on from there") from None


def run_job(
    recipe: str, job: Job, out: Path, say: Callable[[Job, str], None], smoke: bool, stop: Event
) -> bool:
    """One run in a process of its own. Returns whether it is finished."""
    folder = out / job.name
    if (folder / "eval.json").is_file():
        say(job, "finished before")
        return True
    if stop.is_set():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "msvit", "train", recipe, "--out", str(folder), "--resume"]
    command += ["--smoke"] if smoke else []
    command += [part for name, value in job.changes.items() for part in ("--set", f"{name}={value}")]
    home = str(Path(msvit.__file__).parents[1])  # a checkout that is not installed must be found again
    path = os.pathsep.join([home, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    say(job, "training")
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log)
        process.wait()
    if process.returncode and not stop.is_set():
        last = ((folder / "log.txt").read_text().strip().splitlines() or ["no output"])[-1]
        say(job, f"failed: {last}")
    return not process.returncode
