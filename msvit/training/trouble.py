"""What can stop a run, and the sentence that says how to go on."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from msvit.training.state import last_checkpoint


class Stopped(Exception):  # noqa: N818
    """A run that ended early, with what happened and how to go on."""


def how_to_go_on(out: Path) -> str:
    last = last_checkpoint(out)
    if last is None:
        return "no checkpoint was written yet: start anew with the same command"
    return f"the last good checkpoint is {last}: go on with --resume --out {out}"


def check_finite(what: str, tensors: Iterable[Tensor], step: int, out: Path) -> None:
    if not torch.stack([tensor.detach().isfinite().all() for tensor in tensors]).all():
        raise Stopped(f"step {step}: {what} is NaN or infinite; {how_to_go_on(out)}")


@contextmanager
def disk_trouble(out: Path) -> Iterator[None]:
    """A full or vanished disk stops the run with a sentence; files are replaced whole, so the last good one stays."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise Stopped(f"reading or writing failed ({error}); {how_to_go_on(out)}") from None


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted and answered after the step; one more, a second later, stops at once."""
    seen: list[float] = []

    def note(number: int, frame: Any) -> None:
        if seen and time.monotonic() > seen[0] + 1:  # torchrun passes on at once what the terminal sent already
            raise KeyboardInterrupt
        seen.append(time.monotonic())

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread: signals are somebody else's
        yield lambda: False
        return
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
