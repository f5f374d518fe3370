"""The training loop: one for gated models and dense baselines, one process or many.

    train(config, out=Path("runs/pets"), recipe="pets")
    train(config, out=Path("runs/pets"), recipe="pets", resume=True)
"""

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from msvit.atomic import check_writable, remove_leftovers
from msvit.checkpoint import save
from msvit.compiling import compile as compile_model
from msvit.lab.build import (
    make_gate_loss,
    make_guide,
    make_loader,
    make_model,
    make_optimizer,
    make_teacher,
    needs_first_weights,
    new_parameters,
    open_sources,
    own_weights,
    random_teacher,
    say_precision,
    settle,
    without_weights_of,
)
from msvit.lab.config import Config
from msvit.lab.data import check_classes
from msvit.lab.evaluation.shared import packed
from msvit.lab.folder_lock import Lock, check_free, locked
from msvit.lab.interrupts import Interrupted, interrupts
from msvit.lab.runs import Evaluations, Metrics, read_config, write_config
from msvit.lab.tasks import TASKS
from msvit.lab.training.progress import Progress
from msvit.lab.training.schedule import passes, set_rates
from msvit.lab.training.settings import check_settings
from msvit.lab.training.state import (
    CHECKPOINT,
    Parts,
    Resumed,
    last_checkpoint,
    put_damaged_aside,
    random_states,
    resume_from,
    write_state,
)
from msvit.lab.training.trouble import check_finite, disk_trouble, how_to_go_on
from msvit.losses import DirectLoss, GeneralizedBatchShaping
from msvit.types import MSViTOutput


def train(
    config: Config, out: Path, recipe: str = "", resume: bool = False, quiet: bool = False, force: bool = False
) -> Path:
    """Train, and leave a run folder behind, which no other process may train in meanwhile.

    `resume`: go on from the last checkpoint; without one, start from the beginning. `force`: with other settings too.
    """
    config = settle(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    accelerator = Accelerator(
        mixed_precision=config.optim.precision,
        gradient_accumulation_steps=config.optim.accumulate,
        cpu=not torch.cuda.is_available(),
    )
    with run_folder(out) if accelerator.is_main_process else nullcontext() as lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # say_precision tells it in a sentence
        _train(config, out, recipe, resume, quiet, force, accelerator, lock)
        accelerator.wait_for_everyone()
    return out


def _train(
    config: Config, out: Path, recipe: str, resume: bool, quiet: bool, force: bool, accelerator: Accelerator,
    lock: Lock | None,
) -> None:  # fmt: skip
    """`lock`: of the folder, held by the main process, the only one that writes."""
    if resume and not force and last_checkpoint(out) is not None:
        check_settings(out, config, "give the old ones, or accept the new ones with --resume --force")
    main, rank, device = accelerator.is_main_process, accelerator.process_index, accelerator.device
    torch.manual_seed(config.seed)
    task = TASKS[config.task]
    goes_on = resume and (out / "config.json").is_file()
    sources = open_sources(config, read_config(out)["classes"] if goes_on else None)
    known = resume and last_checkpoint(out) is not None and not needs_first_weights(config)
    begun = without_weights_of(config) if known else config  # a checkpoint brings all weights
    model = make_model(begun, num_classes=len(sources.train.classes)).to(device)
    check_classes(sources.train, task.num_classes(model))
    model.classes = sources.train.classes
    teacher = make_teacher(config, model)
    prepare_folder(out, resume, accelerator)
    place: dict[str, Any] = {"device": device, "rank": rank, "world_size": accelerator.num_processes}
    loader = make_loader(sources.train, config, train=True, **place)
    val = make_loader(sources.val, config, train=False, **place)
    gate_loss = make_gate_loss(config, model)
    gate_loss = None if gate_loss is None else gate_loss.to(device)
    guide = make_guide(config, model, gate_loss)
    ema = ModelEmaV3(model, decay=config.optim.ema) if config.optim.ema else None
    final = model if ema is None else ema.module
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(config, model, gate_loss))
    runner = captured(model) if config.optim.graphs and accelerator.num_processes == 1 else wrapped
    parts = Parts(model, gate_loss, optimizer.optimizer, ema, accelerator.scaler)
    trained = [p for group in optimizer.param_groups for p in group["params"]]

    per_epoch = len(loader) // config.optim.accumulate
    num_steps = math.ceil(config.optim.epochs * per_epoch)
    state = out / CHECKPOINT
    torch.manual_seed(config.seed)
    with interrupts() as interrupted:  # an exception amid a file would be taken for damage of the file
        resumed = resume_from(out, parts, rank) if resume else Resumed(0)
    if interrupted():
        raise Interrupted(f"interrupted before the first step; {how_to_go_on(out)}")
    step = resumed.step
    if isinstance(gate_loss, DirectLoss) and step:
        model.gate.threshold = final.gate.threshold = gate_loss.threshold.item()
    if rank and not resumed.has_random_state:  # noise must differ between processes; data and weights do not use it
        torch.manual_seed(config.seed + 1000 * rank + step)
    progress = Progress(num_steps, quiet=quiet or not main)
    if resume and last_checkpoint(out) is None:
        progress.note(f"{out} holds no checkpoint yet: starting from the beginning")
    if resumed.note is not None:
        progress.note(resumed.note)
        accelerator.wait_for_everyone()  # all have read it
        if main:
            put_damaged_aside(out)
    progress.note(
        f"{len(sources.train)} images of {len(model.classes)} classes to train on, {len(sources.val)} to validate; "
        f"{say_precision(config, device)}"
    )
    if reason := random_teacher(config):
        progress.note(reason)
    if step >= num_steps:
        progress.note(f"{out} is finished: it has done {step} of {num_steps} steps")
    board = tensorboard(out) if config.tensorboard and main else None
    start, done_before = time.perf_counter(), step
    with (
        disk_trouble(out),
        Metrics(out / "metrics.jsonl" if main else None, step) as metrics,
        progress,
        interrupts() as interrupted,
    ):
        if main and step < num_steps:
            write_config(out, config, recipe, sources.train.classes)
            Evaluations(out).clear()  # they are of other weights
        while step < num_steps:
            model.train()
            runner.train()
            epoch, first = divmod(step, per_epoch)
            for batch in loader.iterate(epoch, first * config.optim.accumulate):
                set_rates(optimizer, step, num_steps, per_epoch, config)
                if model.reducer is not None:
                    model.reducer.at_progress(step / num_steps)
                with accelerator.accumulate(wrapped), accelerator.autocast():
                    output: MSViTOutput = runner(batch.image)
                    if device.type == "cpu":  # a GPU would wait: it is asked when a line is written
                        check_finite("an output of the model", [output.logits], step + 1, out)
                    told = batch.label if guide is None else guide(batch.image)
                    losses = compute_losses(output, batch.label, gate_loss, config, told)
                    losses |= reducer_losses(losses["loss"], model, output, teacher, batch.image)
                    accelerator.backward(losses["loss"])
                    if accelerator.sync_gradients:
                        clip(accelerator, model, gate_loss, config)
                    optimizer.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                step += 1
                at: dict[str, Any] = {"step": step, "epoch": step / per_epoch}
                if isinstance(gate_loss, DirectLoss):
                    logits = accelerator.gather(output.gate.logits.detach().contiguous())
                    check_finite("a logit of the gate", [logits], step, out)
                    model.gate.threshold = final.gate.threshold = gate_loss.follow(logits)
                if ema is not None:
                    ema.update(model)
                    if isinstance(gate_loss, DirectLoss):  # the threshold is that of these weights, not of their mean
                        final.gate.load_state_dict(model.gate.state_dict())
                saving = step == num_steps or passes(step, per_epoch * config.checkpoint_every)
                writing = step % config.log_every == 0 or saving
                stopping = interrupted() and accelerator.num_processes == 1  # many agree when a line is written
                if writing or stopping:
                    right = task.accuracy(output.logits, batch.label)
                    line = measure(output, losses | {"accuracy": right}, interrupted(), accelerator)
                    stopping = line.pop("interrupted") > 0
                    check_finite("the loss", [torch.tensor(line["loss"])], step, out)
                if writing:
                    seconds = time.perf_counter() - start
                    line |= {"lr": optimizer.param_groups[0]["lr"], "seconds": round(seconds, 3)}
                    metrics.write("train", **at, **line)
                    progress.update(step, line, (step - done_before) * config.optim.batch_size / seconds)
                    report_to(board, "train", line, step)
                if step == num_steps or passes(step, per_epoch * config.eval_every):
                    try:
                        score = quick_score(final, val, config, accelerator)
                    except Exception:  # what was learned must not be lost with it
                        if lock is not None:
                            lock.check()
                            write_state(state, parts, step)
                        raise
                    metrics.write("eval", **at, **score)
                    if isinstance(gate_loss, GeneralizedBatchShaping):
                        metrics.write("prior", **at, theta=gate_loss.theta.detach().cpu().tolist())
                    progress.note(f"epoch {at['epoch']:g}: {score[task.metric]:.1%}, {score['tokens']:.1f} tokens")
                    report_to(board, "eval", score, step)
                    model.train()
                    runner.train()
                if saving or stopping:
                    check_finite("a weight", trained, step, out)
                    random = random_states(accelerator)
                    if lock is not None:
                        lock.check()
                        write_state(state, parts, step, random)
                if stopping:
                    raise Interrupted(f"interrupted at step {step} of {num_steps}; {how_to_go_on(out)}")
                if step == num_steps or step % per_epoch == 0:  # what is left of an epoch fills no whole step
                    break
        if main:
            save(final.with_options(mode="packed"), out / "model")  # however it was trained: the mode to use it in
        if interrupted():
            raise Interrupted(f"interrupted after the last step; {how_to_go_on(out)}")
    if loader.num_skipped:
        progress.note(f"{loader.num_skipped} unreadable images were skipped, such as {loader.skipped[0]}")


def captured(model: Any) -> Any:
    """The same model, its steps replayed as CUDA graphs where that can be; on a CPU it stays as it is."""
    on_gpu = next(model.parameters()).is_cuda
    return compile_model(model, inductor=False) if on_gpu else model


def compute_losses(
    output: MSViTOutput, label: Tensor, gate_loss: nn.Module | None, config: Config, told: Tensor | None = None
) -> dict[str, Tensor]:
    """`told`: what a direct loss wants the gate to know, the label maps or a dense model's attention."""
    task = TASKS[config.task].loss(output.logits, label, config.optim.smoothing)
    if gate_loss is None or type(gate_loss) is DirectLoss:  # a frozen gate, whose threshold follows
        return {"loss": task, "task": task}
    if isinstance(gate_loss, DirectLoss):
        gate = gate_loss(output.gate.logits, told)
    else:
        gate = gate_loss((output.gate.sample if config.gate.sampled else output.gate.fine_prob).float())
    return {"loss": task + config.gate.weight * gate, "task": task, "gate": gate}


def reducer_losses(
    loss: Tensor, model: Any, output: MSViTOutput, teacher: Any, image: Tensor
) -> dict[str, Tensor]:
    """What a reducer adds to the loss, and their sum; nothing if it adds nothing."""
    if model.reducer is None:
        return {}
    with torch.no_grad():
        taught = None if teacher is None else teacher(image)
    added = model.reducer.losses(output, taught)
    return {**added, "loss": loss + torch.stack(list(added.values())).sum()} if added else {}


def clip(accelerator: Accelerator, model: Any, gate_loss: nn.Module | None, config: Config) -> None:
    """The gradients of gate and reducer are clipped apart from the others': neither drowns the other."""
    accelerator.unscale_gradients()
    if config.optim.clip is not None:
        nn.utils.clip_grad_norm_(own_weights(model), config.optim.clip)
    new = new_parameters(model, gate_loss)
    if config.gate.clip is not None and new:
        nn.utils.clip_grad_norm_(new, config.gate.clip)


def measure(
    output: MSViTOutput, known: dict[str, Tensor], interrupted: bool, accelerator: Accelerator
) -> dict[str, float]:
    """Of one step, the mean over processes; `interrupted` is above 0 if any of them was."""
    values = {
        **known,
        "tokens": output.tokens.count.double().mean(),
        "fine": output.gate.mask.double().mean(),
        "interrupted": torch.tensor(float(interrupted), device=output.logits.device),
    }
    mean = accelerator.reduce(torch.stack([value.detach().double() for value in values.values()]), "mean")
    return dict(zip(values, mean.tolist(), strict=True))


def quick_score(model: Any, loader: Any, config: Config, accelerator: Accelerator) -> dict[str, float]:
    """How good the model is on the validation set, over all processes, in packed mode."""
    return TASKS[config.task].score(packed(model), loader, config, accelerator)


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


def prepare_folder(out: Path, resume: bool, accelerator: Accelerator) -> None:
    if last_checkpoint(out) is not None and not resume:
        raise ValueError(f"{out} holds a run already; go on with --resume, or choose another --out")
    if accelerator.is_main_process:
        for folder in (out, *out.glob("*/")):
            remove_leftovers(folder)
    accelerator.wait_for_everyone()


def tensorboard(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard is not installed; pip install 'msvit[tensorboard]', or leave it out") from None
    return SummaryWriter(out / "tensorboard")


def report_to(board: Any, kind: str, values: dict[str, float], step: int) -> None:
    if board is not None:
        for name, value in values.items():
            board.add_scalar(f"{kind}/{name}", value, step)
