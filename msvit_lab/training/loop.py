"""The training loop: one for gated models and dense baselines, one process or many.

    train(config, out=Path("runs/pets"), recipe="pets")
    train(config, out=Path("runs/pets"), recipe="pets", resume=True)
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor

from msvit.output import MSViTOutput
from msvit.saving.file import check_writable, remove_leftovers
from msvit.saving.model import save
from msvit_lab.auto_settings import describe_mode, describe_precision, random_teacher_error, resolve_settings
from msvit_lab.build import make_loader, make_model, make_teacher, needs_first_weights, open_sources
from msvit_lab.compiled import compile_where_supported, describe
from msvit_lab.config import Config
from msvit_lab.data import check_classes
from msvit_lab.evaluation.shared import packed
from msvit_lab.evaluation_files import Evaluations
from msvit_lab.folder_lock import Lock, check_free, locked
from msvit_lab.hosts import without_weights
from msvit_lab.interrupts import Interrupted, interrupts
from msvit_lab.run_record import write_run_record
from msvit_lab.runs import read_config, write_config
from msvit_lab.tasks import TASKS
from msvit_lab.training import state
from msvit_lab.training.log import Log
from msvit_lab.training.objective import compute_losses, make_objective, reducer_losses
from msvit_lab.training.optimizer import clip, make_optimizer, set_rates


def train(
    config: Config, out: Path, recipe: str = "", resume: bool = False, quiet: bool = False, force: bool = False,
    device: torch.device | None = None,
) -> Path:  # fmt: skip
    """Train, and leave a run folder behind, which no other process may train in meanwhile.

    `resume`: go on from the last checkpoint; without one, start from the beginning. `force`: with other settings too.
    `device`: "cuda" or "cpu", by default a GPU where there is one.
    """
    mode_note = describe_mode(config)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = resolve_settings(config, device)
    accelerator = Accelerator(
        mixed_precision=config.optim.precision,
        gradient_accumulation_steps=config.optim.accumulate,
        cpu=device.type == "cpu",
    )
    with run_folder(out) if accelerator.is_main_process else nullcontext() as lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # describe_precision says so in a sentence
        _train(config, out, recipe, resume, quiet, force, accelerator, lock, mode_note)
        accelerator.wait_for_everyone()
    return out


def _train(
    config: Config, out: Path, recipe: str, resume: bool, quiet: bool, force: bool, accelerator: Accelerator,
    lock: Lock | None, mode_note: str | None,
) -> None:  # fmt: skip
    """`lock`: of the folder, held by the main process, the only one that writes."""
    main, rank, device = accelerator.is_main_process, accelerator.process_index, accelerator.device
    task = TASKS[config.task]
    has_checkpoint = state.last_checkpoint(out) is not None
    if has_checkpoint and not resume:
        raise ValueError(f"{out} holds a run already; go on with --resume, or choose another --out")
    if has_checkpoint and not force:
        state.check_settings(out, config, "give the old ones, or accept the new ones with --resume --force")
    if has_checkpoint:
        config = compiled_as_before(config, out)

    # Images and model
    optim = config.optim
    torch.manual_seed(config.seed)
    sources = open_sources(config, read_config(out)["classes"] if resume and (out / "config.json").is_file() else None)
    all_saved = has_checkpoint and not needs_first_weights(config)  # then pretrained weights need not be read
    model = make_model(without_weights(config) if all_saved else config, len(sources.train.classes)).to(device)
    check_classes(sources.train, model.num_classes)
    model.classes, model.preprocessing = sources.train.classes, task.preprocessing(config)
    process_options: dict[str, Any] = {"device": device, "rank": rank, "world_size": accelerator.num_processes}
    loader = make_loader(sources.train, config, train=True, **process_options)
    val = make_loader(sources.val, config, train=False, **process_options)

    # What they are trained with
    ema = ModelEmaV3(model, decay=optim.ema) if optim.ema else None
    final = model if ema is None else ema.module
    teacher = make_teacher(config, model)
    objective = make_objective(config, model, final.gate, accelerator.gather)
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(config, model, objective.module))
    parts = state.Parts(model, objective.module, optimizer.optimizer, ema, accelerator.scaler)
    trained = [p for group in optimizer.param_groups for p in group["params"]]

    # How it runs, and where it starts
    per_epoch = len(loader) // optim.accumulate
    num_steps = math.ceil(optim.epochs * per_epoch)
    with accelerator.autocast():
        runner, choice = compile_where_supported(
            model, optim.graphs, optim.inductor, num_calls=num_steps, learns=True,
            num_processes=accelerator.num_processes,
        )  # fmt: skip
    runner = runner if choice.compiled else wrapped
    config = with_choice(config, graphs=choice.compiled, inductor=choice.inductor)
    clean_folder(out, accelerator)
    torch.manual_seed(config.seed)
    with interrupts() as interrupted:  # an exception amid a file would be taken for damage of the file
        resumed = state.resume_from(out, parts, rank) if resume else state.Resumed(0)
    if interrupted():
        raise Interrupted(f"interrupted before the first step; {state.how_to_resume(out)}")
    step = resumed.step
    if step:
        objective.after_resume()
    if rank and not resumed.has_random_state:  # noise must differ between processes; data and weights do not use it
        torch.manual_seed(config.seed + 1000 * rank + step)
    log = Log(out if main else None, config, step, num_steps, quiet)
    if resumed.note is not None:
        accelerator.wait_for_everyone()  # all have read it
        if main:
            state.put_damaged_aside(out)
    for note in (
        f"{out} holds no checkpoint yet: starting from the beginning" if resume and not has_checkpoint else None,
        resumed.note,
        f"{len(sources.train)} images of {len(model.classes)} classes to train on, {len(sources.val)} to validate; "
        f"{describe_precision(config, device)}",
        mode_note,
        describe(choice),
        random_teacher_error(config),
        f"{out} is finished: it has done {step} of {num_steps} steps" if step >= num_steps else None,
    ):
        if note is not None:
            log.note(note)

    def save_state(random: dict[str, Tensor] | None = None) -> None:
        if lock is not None:
            lock.check()
            state.write_state(out / state.CHECKPOINT, parts, step, random)

    with state.stopping(out), log, interrupts() as interrupted:
        if main and step < num_steps:
            write_config(out, config, recipe, sources.train.classes)
            Evaluations(out).clear()  # they are of other weights
        if step == 0 and (learned := objective.record()):
            log.write("prior", 0, 0.0, learned)  # what it starts from
        while step < num_steps:
            model.train()
            runner.train()
            epoch, first = divmod(step, per_epoch)
            for batch in loader.iterate(epoch, first * optim.accumulate):
                set_rates(optimizer, step, num_steps, per_epoch, config)
                if model.reducer is not None:
                    model.reducer.at_progress(step / num_steps)
                with accelerator.accumulate(wrapped), accelerator.autocast():
                    output: MSViTOutput = runner(batch.image)
                    if device.type == "cpu":  # a GPU would wait: there it is checked when a line is written
                        state.check_finite("an output of the model", [output.logits], step + 1)
                    losses = compute_losses(output, batch, objective, config)
                    losses |= reducer_losses(losses["loss"], model, output, teacher, batch.image)
                    accelerator.backward(losses["loss"])
                    if accelerator.sync_gradients:
                        clip(accelerator, model, objective.module, config)
                    optimizer.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                step += 1
                if ema is not None:
                    ema.update(model)
                objective.after_step(output, step)

                last = step == num_steps
                saving = last or reaches_multiple(step, per_epoch * config.checkpoint_every)
                writing = saving or step % config.log_every == 0
                ending = interrupted() and accelerator.num_processes == 1  # many agree when a line is written
                if writing or ending:
                    losses["accuracy"] = task.accuracy(output.logits, batch.label)
                    line = measure(output, losses, interrupted(), accelerator)
                    ending = line.pop("interrupted") > 0
                    state.check_finite("the loss", [torch.tensor(line["loss"])], step)
                if writing:
                    known = line | objective.progress() | {"lr": optimizer.param_groups[0]["lr"]}
                    log.write("train", step, step / per_epoch, known)
                if last or reaches_multiple(step, per_epoch * config.eval_every):
                    try:
                        score = task.score(packed(final), val, config, accelerator)  # over all processes
                    except Exception:  # what was learned must not be lost with it
                        save_state()
                        raise
                    log.write("eval", step, step / per_epoch, score)
                    if learned := objective.record():
                        log.write("prior", step, step / per_epoch, learned)
                    log.note(f"epoch {step / per_epoch:g}: {score[task.metric]:.1%}, {score['tokens']:.1f} tokens")
                    model.train()
                    runner.train()
                if saving or ending:
                    state.check_finite("a weight", trained, step)
                    save_state(state.random_states(accelerator))
                if ending:
                    raise Interrupted(f"interrupted at step {step} of {num_steps}; {state.how_to_resume(out)}")
                if last or step % per_epoch == 0:  # what is left of an epoch fills no whole step
                    break
        if main:
            save(final.with_options(mode="packed"), out / "model")  # however it was trained: the mode to use it in
            write_run_record(out)
        if interrupted():
            raise Interrupted(f"interrupted after the last step; {state.how_to_resume(out)}")
    if loader.skipped:
        log.note(f"{len(loader.skipped)} unreadable images were skipped, such as {loader.skipped[0]}")


def reaches_multiple(step: int, every: float) -> bool:
    """Whether this step reaches a multiple of `every`, which need not be whole."""
    return int(step / every) > int((step - 1) / every)


def with_choice(config: Config, **chosen: Any) -> Config:
    """`chosen` in the place of those settings of `optim` that are "auto"."""
    still_auto = {name: value for name, value in chosen.items() if getattr(config.optim, name) == "auto"}
    return replace(config, optim=replace(config.optim, **still_auto))


def compiled_as_before(config: Config, out: Path) -> Config:
    """With what was chosen when the run in this folder began, where the configuration leaves it open."""
    if not (out / "config.json").is_file():
        return config
    before = read_config(out)["config"].optim
    return with_choice(config, graphs=before.graphs, inductor=before.inductor)


def measure(
    output: MSViTOutput, known: dict[str, Tensor], interrupted: bool, accelerator: Accelerator
) -> dict[str, float]:
    """Losses, tokens and share of fine cells of one step, mean over processes; `interrupted` > 0 if any process was."""
    values = {
        **known,
        "tokens": output.tokens.count.double().mean(),
        "fine": output.gate.mask.double().mean(),
        "interrupted": torch.tensor(float(interrupted), device=output.logits.device),
    }
    mean = accelerator.reduce(torch.stack([value.detach().double() for value in values.values()]), "mean")
    return dict(zip(values, mean.tolist(), strict=True))


@contextmanager
def run_folder(out: Path) -> Iterator[Lock]:
    """The folder, locked; nothing is left of it if nothing was written there."""
    check_free(out)
    new = [folder for folder in (out, *out.parents) if not folder.exists()]  # the innermost first
    check_writable(out, "choose another --out")
    try:
        with locked(out) as lock:
            yield lock
    finally:
        with suppress(OSError):  # one is not empty
            for folder in new:
                folder.rmdir()


def clean_folder(out: Path, accelerator: Accelerator) -> None:
    """Delete what a killed process left half written."""
    if accelerator.is_main_process:
        for folder in (out, *out.glob("*/")):
            remove_leftovers(folder)
    accelerator.wait_for_everyone()
