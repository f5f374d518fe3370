"""Trained runs, timed in turn: what an accuracy costs in time and not only in multiply-adds.

    found = measure_runs([Path("runs/dense"), Path("runs/gated")], device=device, dtype=torch.bfloat16, batch=256)
    found["rows"][1]["images_per_second"]

Every run is timed on the validation images of its own configuration, at its own size, after `msvit.compile`; a run that
segments on windows of them, decoder included. Speed-ups are over the dense run of the largest cost.
"""

from dataclasses import replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import msvit
from msvit_lab.bench.images import batches
from msvit_lab.bench.workload import SETS
from msvit_lab.build import make_loader, open_val
from msvit_lab.config import Data
from msvit_lab.evaluate import first_inputs
from msvit_lab.evaluation_files import METRICS, OWN, Metric
from msvit_lab.hosts import read_run
from msvit_lab.runs import Run, is_evaluated, run_folders
from msvit_lab.timing import Call, burst_size, speed_up, spread, time_all


def find_runs(pattern: str) -> list[Path]:
    """A run, all runs in a folder, or those of a pattern such as runs/sweep/*-s0."""
    found = [run for path in sorted(glob(pattern)) for run in run_folders(Path(path))]
    runs = [path for path in found if is_evaluated(path) and (path / "model").is_dir()]
    if not runs:
        raise ValueError(f"{pattern} has no evaluated run; give a folder of msvit sweep, or for example runs/*-s0")
    return runs


def unique_names(runs: list[Path]) -> list[str]:
    """Their folders' names; whole paths where runs of several sweeps have the same."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


@torch.inference_mode()
def measure_runs(
    runs: list[Path], *, device: torch.device, dtype: torch.dtype, batch: int, rounds: int = 40,
    seconds: float | None = None, compile: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """One row per run: accuracy and cost from its evaluation, and its time here.

    Of runs that segment tokens and GMACs are those of gate and encoder per window, and times are with the decoder.
    """
    if batch < 1:
        raise ValueError(f"--batch is {batch}, but must be at least 1")
    names = dict(zip(runs, unique_names(runs), strict=True))
    about = {names[run]: Run(run).evaluations[OWN] for run in runs}
    metric = common_metric(runs)
    calls: dict[str, Call] = {}
    seen: dict[Data, list[Tensor]] = {}
    for run in runs:
        model, sets = prepare(run, device, dtype, batch, seen)
        model = msvit.compile(model, inductor="blocks" if compile else False)
        calls[names[run]] = partial(on_set, model, sets)
    turns = [torch.tensor(which) for which in range(SETS)]  # numbers of sets, as runs may see different images
    how: dict[str, Any] = {"device": device, "rounds": rounds, "burst": burst_size(device, batch), "seconds": seconds}
    used = time_all(calls, turns, passes=2, **how)
    dense = [name for name in used if about[name]["dense"]]
    base = max(dense or list(used), key=lambda name: about[name]["gmacs"]["mean"])
    shown = (metric.key,) if metric.task == "classify" else (metric.key, "decoder_gmacs")  # no part of `gmacs`
    return {
        "task": metric.task, "baseline": base, "batch": batch, "device": device.type,
        "dtype": str(dtype).removeprefix("torch."), "compiled": compile,
        "rows": [
            {
                "name": name, "gmacs": about[name]["gmacs"]["mean"], "tokens": about[name]["tokens"]["mean"],
                **{key: about[name].get(key) for key in shown}, "ms": spread(own).rounded(),
                "images_per_second": round(1e3 * batch / spread(own).median, 1),
                "speed_up": speed_up(used[base], own).rounded(),
            }
            for name, own in used.items()
        ],
    }  # fmt: skip


def common_metric(runs: list[Path]) -> Metric:
    """The metric of all these runs; raises ValueError unless they have one task."""
    metrics = {Run(run).metric: run for run in runs}
    if len(metrics) > 1:
        (one, first), (_, other) = list(metrics.items())[:2]
        raise ValueError(
            f"{first} and {other} have different tasks ({one.task} is that of the first), so their times and scores do "
            f"not compare; give runs of one task"
        )
    return next(iter(metrics))


def prepare(
    run: Path, device: torch.device, dtype: torch.dtype, batch: int, seen: dict[Data, list[Tensor]]
) -> tuple[nn.Module, list[Tensor]]:
    """A run's model, and batches of its own images; runs that see the same share them."""
    model, config = read_run(run)
    config = replace(config, data=replace(config.data, cache=False, crops="none"))
    if config.data not in seen:
        loader = make_loader(open_val(config, list(model.classes)), config, train=False, device=device)
        seen[config.data] = batches(first_inputs(loader, config, SETS * batch).to(dtype), batch)
    if not seen[config.data]:
        per = METRICS[config.task].per
        raise ValueError(f"{run} has fewer validation {per}s than a batch, {batch}; give a smaller --batch")
    return model.to(device, dtype).eval(), seen[config.data]


def on_set(model: nn.Module, sets: list[Tensor], which: Tensor) -> Any:
    return model(sets[int(which) % len(sets)])
