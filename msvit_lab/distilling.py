"""A model distilled on folders of images, by one process or many, with checkpoints: `msvit distill`.

    model = find_model("vit_base_patch16_224", gate=None)
    prepared = Prepared(model, [Path("photos")], size=None, num=100_000)
    job = Job("vit_base_patch16_224", ["photos"], 100_000, budget=0.6, steps=5000, settings=Settings())
    distill_images(model, prepared, job, Path("models/vit-60"))                    # a folder for msvit.load
    distill_images(model, prepared, job, Path("models/vit-60"), resume=True)

While it runs the folder has `checkpoint.safetensors`, `metrics.jsonl` and `distillation.json`, with the settings it
began with; at the end the model and, in `distillation.json`, what came of it. A step's images and masks follow from the
seed and its number, so that a resumed run goes on as if nothing had happened, on a CPU to the bit.
"""

import json
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from msvit.budget.distillation import (
    LOG_EVERY,
    MAX_HELD_BACK,
    Distillation,
    Distiller,
    Settings,
    describe_losses,
    prepare,
)
from msvit.saving.model import save
from msvit_lab.calibration import Prepared
from msvit_lab.folder_lock import Lock
from msvit_lab.interrupts import Interrupted, interrupts
from msvit_lab.json_values import write_json
from msvit_lab.runs import Metrics
from msvit_lab.training import state
from msvit_lab.training.loop import clean_folder, run_folder

RECORD = "distillation.json"
NUM_CALIBRATION = 512  # images that set the threshold; those held back are the first of them
OTHERS = ("config.json", "model.safetensors")  # what other commands leave in a folder


@dataclass(frozen=True)
class Job:
    """What a distillation must be resumed with. `num`: images at most."""

    model: str
    images: list[str]
    num: int
    size: int
    budget: float
    steps: int
    cache: bool
    settings: Settings


def distill_images(
    model: Any, prepared: Prepared, job: Job, out: Path, checkpoint_every: int = 500, resume: bool = False,
    note: Callable[[str], None] = print,
) -> Distillation:  # fmt: skip
    """Leave a folder for `msvit.load`, in which no other process may train meanwhile."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    main = accelerator.is_main_process
    with run_folder(out) if main else nullcontext() as lock:
        clean_folder(out, accelerator)
        found = check_record(out, job, resume)
        accelerator.wait_for_everyone()  # then the record is written
        if found is None:
            found = _distill(model, prepared, job, out, checkpoint_every, accelerator, lock, note if main else str)
        accelerator.wait_for_everyone()
    return found


def check_record(out: Path, job: Job, resume: bool) -> Distillation | None:
    """What came of a distillation that is finished. Raise ValueError unless this one may begin or go on there."""
    if not (out / RECORD).is_file():
        if state.last_checkpoint(out) is not None or any((out / name).exists() for name in OTHERS):
            raise ValueError(f"{out} holds another run or model; choose another --out")
        return None
    if not resume:
        raise ValueError(f"{out} holds a distillation already; go on with --resume, or choose another --out")
    try:
        record = json.loads((out / RECORD).read_text())
        before, result = record["job"], record["result"]
        finished = None if result is None else Distillation(**result)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{out / RECORD} cannot be read ({error}); choose another --out") from None
    now = json.loads(json.dumps(asdict(job)))
    if changed := [f"{name} was {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name]]:
        raise ValueError(f"{out} began with other settings: {'; '.join(changed)}; give the old ones, or another --out")
    return finished


def write_record(out: Path, job: Job, result: Distillation | None) -> None:
    write_json(out / RECORD, {"job": asdict(job), "result": result and asdict(result)})


def _distill(
    model: Any, prepared: Prepared, job: Job, out: Path, checkpoint_every: int, accelerator: Accelerator,
    lock: Lock | None, note: Callable[[str], Any],
) -> Distillation:  # fmt: skip
    """`lock`: of the folder, held by the main process, the only one that writes."""
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes

    # Images held back, those that set the threshold, and the others
    if (num := len(prepared.source)) < 2:
        raise ValueError(f"{prepared.folder} has {num} image, but one is trained on and another held back; give more")
    num_held = min(MAX_HELD_BACK, max(1, num // 10))
    groups = (prepared.part(0, num_held), prepared.part(num_held, max(NUM_CALIBRATION, num_held + 1)))
    held, more = ([b.image for b in prepared.batches(job.size, each, device=device)] for each in groups)
    started, grid = prepare(model.to(device), [*held, *more], job.budget, "macs")
    distiller = Distiller(started, grid, job.steps, job.settings, job.budget)
    train = prepared.part(num_held, num)
    loader = prepared.loader(
        train, job.size, train=True, crops="medium", batch_size=min(distiller.batch_size, len(train)) // world * world,
        cache=job.cache, seed=job.settings.seed, device=device, rank=rank, world_size=world,
    )  # fmt: skip

    # Where it starts
    parts = state.Parts(distiller.student, None, distiller.optimizer, distiller.ema)
    resumed = state.resume_from(out, parts)
    step = first_step = resumed.step
    note(f"{len(train)} images to train on, {sum(map(len, held))} held back; steps {step + 1} to {job.steps}")
    if resumed.note is not None:
        note(resumed.note)
        accelerator.wait_for_everyone()  # all have read it
        if lock is not None:
            state.put_damaged_aside(out)
    metrics_path = None if lock is None else out / "metrics.jsonl"
    begin, sums, num_summed = time.perf_counter(), torch.zeros(3, device=device), 0

    def reduce(gradients: list[Tensor]) -> None:
        """One exchange for all gradients, which become the mean over processes."""
        mean = accelerator.reduce(_flatten_dense_tensors(gradients), "mean")
        torch._foreach_copy_(gradients, _unflatten_dense_tensors(mean, gradients))

    with state.stopping(out), Metrics(metrics_path, step) as metrics, interrupts() as interrupted:
        if lock is not None:
            write_record(out, job, None)
        while step < job.steps:
            epoch, first = divmod(step, len(loader))
            for batch in loader.iterate(epoch, first):
                sums += distiller.step(step, batch.image, rank, reduce if world > 1 else None)
                step, num_summed = step + 1, num_summed + 1
                saving = step % checkpoint_every == 0 or step == job.steps
                writing = saving or step % LOG_EVERY == 0
                ending = interrupted() and world == 1  # many agree when a line is written
                if writing or ending:
                    flag = torch.tensor([float(interrupted())], device=device)
                    *mean, ended = accelerator.reduce(torch.cat([sums / num_summed, flag]), "mean")
                    ending = ended.item() > 0
                    line = describe_losses(torch.stack(mean), step, job.steps)
                    left = (time.perf_counter() - begin) / (step - first_step) * (job.steps - step)
                    note(f"{line}, {left:.0f} s left")
                    names = ("loss", "divergence", "features")
                    metrics.write("train", step=step, **dict(zip(names, torch.stack(mean).tolist(), strict=True)))
                    sums, num_summed = torch.zeros_like(sums), 0
                if (saving or ending) and lock is not None:
                    lock.check()
                    state.write_state(out / state.CHECKPOINT, parts, step)
                if ending:
                    raise Interrupted(f"interrupted at step {step} of {job.steps}; {state.how_to_resume(out)}")
                if step == job.steps:
                    break
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = distiller.better(held, len(train))
        for warning in caught:
            note(str(warning.message))
        if lock is not None:
            save(result, out)
            write_record(out, job, result.distillation)
            for name in (state.CHECKPOINT, state.PREVIOUS, state.DAMAGED):
                (out / name).unlink(missing_ok=True)
    return result.distillation
