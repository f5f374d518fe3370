"""What can stop a run, and the sentence that says how to go on."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from msvit.lab.interrupts import Stopped
from msvit.lab.training.state import last_checkpoint


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
