"""A run that can go on: everything in one safetensors file with a checksum, replaced whole.

    write_state(path, parts, step=120)       # model, gate loss, optimizer, scaler, EMA, random state
    write_state(path, parts, step=120, random=random_states(accelerator))    # that of every process
    read_state(path, parts).step
    found = resume_from(folder, parts)       # the last checkpoint, or the one before where that is damaged
    found.step, found.note
    check_settings(folder, config, remedy)   # ValueError that names the settings that were others
    with stopping(folder):                   # what can stop a run is Stopped, with how to resume it
        check_finite("the loss", [loss], step)

A process killed at any moment leaves the last complete file, and the one before stays beside it. Nothing is pickled.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from msvit.saving.file import Damaged, read_header, read_tensors, write_tensors
from msvit_lab.config import AUTO_VALUES, Config, settings
from msvit_lab.interrupts import Stopped
from msvit_lab.runs import read_config

CHECKPOINT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
DAMAGED = "checkpoint.damaged.safetensors"
SCALER_COUNTS = ("growth_interval", "_growth_tracker")  # the rest of a GradScaler's state are floats
# Settings that change what is written, how fast, or whether a bad file ends the run; not what is learned.
FREE = {"data.workers", "data.skip_bad", "log_every", "eval_every", "checkpoint_every"}


@dataclass(frozen=True)
class Parts:
    """What changes in training, and is saved."""

    model: nn.Module
    gate_loss: nn.Module | None
    optimizer: torch.optim.Optimizer
    ema: nn.Module | None
    scaler: torch.amp.GradScaler | None = None  # of fp16

    def modules(self) -> dict[str, nn.Module]:
        """By the prefix of their tensors in a checkpoint."""
        found = {"model": self.model, "gate_loss": self.gate_loss, "ema": self.ema}
        return {f"{name}.": module for name, module in found.items() if module is not None}


def random_state() -> dict[str, Tensor]:
    """The CPU and CUDA random states of this process."""
    found = {"rng.cpu": torch.get_rng_state()}
    return {**found, "rng.cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else found


def random_states(accelerator: Any) -> dict[str, Tensor]:
    """Of all processes, which must call this together: rng.cpu of the first, then rng.cpu.1, ..."""
    own = random_state()
    if accelerator.num_processes == 1:
        return own
    found: dict[str, Tensor] = {}
    for name, state in own.items():
        rows = accelerator.gather(state[None].to(accelerator.device))  # (processes, bytes)
        found |= {_of_rank(name, rank): row for rank, row in enumerate(rows)}
    return found


def set_random_state(saved: dict[str, Tensor], rank: int) -> bool:
    """Restore the random state of this process. Whether it was saved: there may be more processes now."""
    state = saved.get(_of_rank("rng.cpu", rank))
    if state is not None:
        torch.set_rng_state(state)
    cuda = saved.get(_of_rank("rng.cuda", rank))
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    return state is not None


def _of_rank(name: str, rank: int) -> str:
    return f"{name}.{rank}" if rank else name


def write_state(path: Path, parts: Parts, step: int, random: dict[str, Tensor] | None = None) -> None:
    """`random`: the random states of all processes; by default only this one's."""
    tensors: dict[str, Tensor] = {}
    for prefix, module in parts.modules().items():
        tensors |= module.state_dict(prefix=prefix)
    for number, state in parts.optimizer.state_dict()["state"].items():
        known = {name: torch.as_tensor(value) for name, value in state.items() if value is not None}
        tensors |= {f"optim.{number}.{name}": value for name, value in known.items()}
    if parts.scaler is not None:
        scaler = parts.scaler.state_dict().items()
        tensors |= {f"scaler.{name}": torch.tensor(value, dtype=torch.float64) for name, value in scaler}
    tensors |= random_state() if random is None else random
    tensors = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    write_tensors(path, tensors, {"step": json.dumps(step)}, previous=path.with_name(PREVIOUS))


def read_step(path: Path) -> int:
    """How many steps a saved state had done. Raise Damaged unless the whole file is as it was written."""
    about = read_header(path).metadata
    if not about.get("step", "").isdecimal():
        raise Damaged(f"{path} is no checkpoint: it does not say how many steps were done; choose another --out")
    return int(about["step"])


def last_checkpoint(folder: Path) -> Path | None:
    return next((folder / name for name in (CHECKPOINT, PREVIOUS) if (folder / name).is_file()), None)


@dataclass(frozen=True)
class Resumed:
    """What was read from a checkpoint."""

    step: int  # how many were done
    note: str | None = None  # where another checkpoint than the last one was taken: which and why
    has_random_state: bool = False  # that of this process was saved and is restored


def resume_from(folder: Path, parts: Parts, rank: int = 0) -> Resumed:
    """Put the last good checkpoint back; 0 steps where there is none yet. Raise ValueError if all are damaged."""
    damage = f"{folder / CHECKPOINT} is missing"
    for name in (CHECKPOINT, PREVIOUS):
        if not (folder / name).is_file():
            continue
        try:
            found = read_state(folder / name, parts, rank)
        except Damaged as error:
            damage = str(error)
            continue
        note = f"{damage.partition(';')[0]}; going on from {folder / name}, written after {found.step} steps"
        return found if name == CHECKPOINT else replace(found, note=note)
    if last_checkpoint(folder) is not None:
        raise ValueError(f"no checkpoint can be read: {damage.partition(';')[0]}; delete it and start anew")
    return Resumed(0)


def differences(old: Config, new: Config) -> list[str]:
    """Settings that differ and decide what is learned: "optim.lr was 0.001, now 0.1". A run may be made longer."""
    found = []
    for (name, _, before), (_, _, now) in zip(settings(old), settings(new), strict=True):
        longer = name == "optim.epochs" and now > before
        left_open = now == AUTO_VALUES.get(name, before)  # it will be what the run has found
        if before != now and name not in FREE and not longer and not left_open:
            found.append(f"{name} was {before}, now {now}")
    return found


def check_settings(folder: Path, config: Config, remedy: str) -> None:
    """Raise ValueError unless a run that began in this folder goes on as it began."""
    if (folder / "config.json").is_file() and (found := differences(read_config(folder)["config"], config)):
        raise ValueError(f"{folder} began with other settings: {'; '.join(found)}; {remedy}")


def put_damaged_aside(folder: Path) -> None:
    """Rename a damaged checkpoint after resuming from PREVIOUS: the next save would move it over that good one."""
    if (folder / CHECKPOINT).is_file():
        (folder / CHECKPOINT).replace(folder / DAMAGED)


def read_state(path: Path, parts: Parts, rank: int = 0) -> Resumed:
    """Put a saved state back."""
    step = read_step(path)
    tensors = read_tensors(path)
    try:
        for prefix, module in parts.modules().items():
            module.load_state_dict(_under(prefix, tensors))
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()  # the line before only names the class
        raise ValueError(f"{path} does not fit this configuration ({first}); choose another --out") from None
    state: dict[int, dict[str, Any]] = {}
    for name, value in _under("optim.", tensors).items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = value
    had_momentum = any("momentum_buffer" in known for known in state.values())
    if isinstance(parts.optimizer, torch.optim.SGD) == had_momentum:  # one of another kind begins anew
        parts.optimizer.load_state_dict({**parts.optimizer.state_dict(), "state": state})
    scaler = {name: value.item() for name, value in _under("scaler.", tensors).items()}
    if parts.scaler is not None and scaler:
        parts.scaler.load_state_dict({**scaler, **{name: int(scaler[name]) for name in SCALER_COUNTS}})
    return Resumed(step, has_random_state=set_random_state(tensors, rank))


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def how_to_resume(out: Path) -> str:
    last = last_checkpoint(out)
    if last is None:
        return "no checkpoint was written yet: start anew with the same command"
    return f"the last good checkpoint is {last}: go on with --resume --out {out}"


def check_finite(what: str, tensors: Iterable[Tensor], step: int) -> None:
    if not torch.stack([tensor.detach().isfinite().all() for tensor in tensors]).all():
        raise FloatingPointError(f"step {step}: {what} is NaN or infinite")


@contextmanager
def stopping(out: Path) -> Iterator[None]:
    """Raise Stopped for numbers that are not finite, and for a full or vanished disk.

    Files are replaced whole, so the last good checkpoint stays.
    """
    try:
        yield
    except FloatingPointError as error:
        raise Stopped(f"{error}; {how_to_resume(out)}") from error
    except (OSError, SafetensorError) as error:
        raise Stopped(f"reading or writing failed ({error}); {how_to_resume(out)}") from error
