"""The training loop: one for gated models and dense baselines, one process or many.

    train(config, out=Path("runs/pets"), recipe="pets")
    train(config, out=Path("runs/pets"), recipe="pets", resume=True)
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from msvit.checkpoint import save
from msvit.losses import GeneralizedBatchShaping
from msvit.model import MSViT
from msvit.training.build import make_gate_loss, make_loader, make_model, make_optimizer, open_sources
from msvit.training.config import Config
from msvit.training.progress import Progress
from msvit.training.run import Metrics, write_config
from msvit.training.schedule import set_rates
from msvit.training.state import Parts, read_state, write_state
from msvit.types import MSViTOutput


class Stopped(Exception):  # noqa: N818
    """A run that ended early, with what happened and how to go on."""


def train(config: Config, out: Path, recipe: str = "", resume: bool = False, quiet: bool = False) -> Path:
    """Train, and leave a run folder behind."""
    accelerator = Accelerator(
        mixed_precision=config.optim.precision,
        gradient_accumulation_steps=config.optim.accumulate,
        cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(config.seed)
    sources = open_sources(config)
    place: dict[str, Any] = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    loader = make_loader(sources.train, config, train=True, device=accelerator.device, **place)
    val = make_loader(sources.val, config, train=False, device=accelerator.device, **place)
    model = make_model(config, num_classes=len(sources.train.classes)).to(accelerator.device)
    gate_loss = make_gate_loss(config, model)
    gate_loss = None if gate_loss is None else gate_loss.to(accelerator.device)
    ema = ModelEmaV3(model, decay=config.optim.ema) if config.optim.ema else None
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(config, model, gate_loss))
    parts = Parts(model, gate_loss, optimizer.optimizer, ema)
    # Noise must differ between processes; data and weights do not depend on it.
    torch.manual_seed(config.seed + 1000 * accelerator.process_index)

    per_epoch = max(1, len(loader) // config.optim.accumulate)
    num_steps = max(1, math.ceil(config.optim.epochs * per_epoch))
    check_steps(len(loader), config)
    step = 0
    state = out / "checkpoint.safetensors"
    prepare_folder(out, resume, accelerator)
    if resume and state.is_file():
        step = read_state(state, parts)
    if accelerator.is_main_process:
        write_config(out, config, recipe, sources.train.classes)
    metrics = Metrics(out / "metrics.jsonl" if accelerator.is_main_process else Path("/dev/null"), step)
    board = tensorboard(out) if config.tensorboard and accelerator.is_main_process else None
    progress = Progress(num_steps, quiet=quiet or not accelerator.is_main_process)

    def checkpoint() -> None:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            try:
                write_state(state, parts, step)
            except OSError as error:
                raise Stopped(f"step {step}: {out} cannot be written ({error}); {how_to_go_on(out, state)}") from None

    start, done_before = time.perf_counter(), step
    with progress, interrupts() as interrupted:
        while step < num_steps:
            model.train()
            epoch, first = divmod(step, per_epoch)
            for batch in loader.iterate(epoch, first * config.optim.accumulate):
                set_rates(optimizer, step, num_steps, per_epoch, config)
                with accelerator.accumulate(wrapped), accelerator.autocast():
                    output: MSViTOutput = wrapped(batch.image)
                    losses = compute_losses(output, batch.label, gate_loss, config)
                    accelerator.backward(losses["loss"])
                    if accelerator.sync_gradients:
                        clip(accelerator, model, gate_loss, config)
                    optimizer.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                step += 1
                if ema is not None:
                    ema.update(model)
                every = per_epoch * config.checkpoint_every
                saving = step == num_steps or int(step / every) > int((step - 1) / every)
                if step % config.log_every == 0 or step == num_steps or saving:
                    line = measure(output, batch.label, losses)
                    if not math.isfinite(line["loss"]):
                        raise Stopped(f"step {step}: the loss is {line['loss']}; {how_to_go_on(out, state)}")
                    seconds = time.perf_counter() - start
                    line |= {"lr": optimizer.param_groups[0]["lr"], "seconds": round(seconds, 3)}
                    metrics.write("train", step=step, epoch=step / per_epoch, **line)
                    progress.update(step, line, (step - done_before) * config.optim.batch_size / seconds)
                    report_to(board, "train", line, step)
                each = per_epoch * config.eval_every
                if step == num_steps or int(step / each) > int((step - 1) / each):
                    score = quick_score(ema.module if ema is not None else model, val, accelerator)
                    metrics.write("eval", step=step, epoch=step / per_epoch, **score)
                    if isinstance(gate_loss, GeneralizedBatchShaping):
                        theta = gate_loss.theta.detach().cpu().tolist()
                        metrics.write("prior", step=step, epoch=step / per_epoch, theta=theta)
                    progress.note(f"epoch {step / per_epoch:g}: {score['top1']:.1%}, {score['tokens']:.1f} tokens")
                    report_to(board, "eval", score, step)
                    model.train()
                if saving:
                    checkpoint()
                if interrupted():
                    checkpoint()
                    raise Stopped(f"interrupted at step {step} of {num_steps}; {how_to_go_on(out, state)}")
                if step == num_steps:
                    break
    metrics.close()
    if loader.num_skipped:
        progress.note(f"{loader.num_skipped} unreadable images were skipped, such as {loader.skipped[0]}")
    if accelerator.is_main_process:
        save(ema.module if ema is not None else model, out / "model")
    accelerator.wait_for_everyone()
    return out


def compute_losses(
    output: MSViTOutput, label: Tensor, gate_loss: nn.Module | None, config: Config
) -> dict[str, Tensor]:
    task = F.cross_entropy(output.logits.float(), label, label_smoothing=config.optim.smoothing)
    if gate_loss is None:
        return {"loss": task, "task": task}
    gate = gate_loss((output.gate.sample if config.gate.sampled else output.gate.fine_prob).float())
    return {"loss": task + config.gate.weight * gate, "task": task, "gate": gate}


def clip(accelerator: Accelerator, model: MSViT, gate_loss: nn.Module | None, config: Config) -> None:
    """The gate's gradients are clipped apart from the model's: neither drowns the other."""
    if config.optim.clip is not None:
        accelerator.clip_grad_norm_(list(model.host.parameters()), config.optim.clip)
    gate = [*model.gate.parameters(), *(gate_loss.parameters() if gate_loss is not None else ())]
    if config.gate.clip is not None and gate:
        accelerator.clip_grad_norm_(gate, config.gate.clip)


def measure(output: MSViTOutput, label: Tensor, losses: dict[str, Tensor]) -> dict[str, float]:
    return {
        **{name: value.item() for name, value in losses.items()},
        "accuracy": (output.logits.argmax(1) == label).float().mean().item(),
        "tokens": output.tokens.count.float().mean().item(),
        "fine": output.gate.mask.detach().mean().item(),
    }


@torch.no_grad()
def quick_score(model: Any, loader: Any, accelerator: Accelerator) -> dict[str, float]:
    """Accuracy and tokens on the validation set, over all processes, in packed mode."""
    model.eval()
    mode, model.mode = model.mode, "packed"
    sums = torch.zeros(5, dtype=torch.float64, device=accelerator.device)  # images, top-1, top-5, loss, tokens
    for batch in loader.iterate(0):
        with accelerator.autocast():
            output = model(batch.image)
        logits = output.logits.float()
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch.label[:, None]
        loss = F.cross_entropy(logits, batch.label, reduction="sum")
        sums += torch.stack([top[:, 0].numel() + 0 * loss, top[:, 0].sum(), top.sum(), loss, output.tokens.count.sum()])
    model.mode = mode
    total = accelerator.reduce(sums, "sum")
    top1, top5, loss, tokens = (total[1:] / total[0]).tolist()
    return {"top1": top1, "top5": top5, "loss": loss, "tokens": tokens}


def check_steps(num_batches: int, config: Config) -> None:
    if num_batches < 1:
        raise ValueError(
            f"the training set has fewer images than optim.batch_size, {config.optim.batch_size}; "
            f"make it smaller with --set optim.batch_size=..."
        )


def prepare_folder(out: Path, resume: bool, accelerator: Accelerator) -> None:
    if (out / "config.json").is_file() and not resume:
        raise ValueError(f"{out} holds a run already; go on with --resume, or choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if accelerator.is_main_process:
            probe = out / ".writable"
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}); choose another --out") from None
    accelerator.wait_for_everyone()


def how_to_go_on(out: Path, state: Path) -> str:
    if not state.is_file():
        return "no checkpoint was written yet: start anew"
    return f"the last good checkpoint is {state}: go on with --resume --out {out}"


@contextmanager
def interrupts() -> Iterator[Any]:
    """Ctrl-C is noted and answered after the step; a second one stops at once."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread: signals are somebody else's
        yield lambda: False
        return
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


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
