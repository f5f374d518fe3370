"""What can stop a run, and the sentence that says how to resume it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from msvit_lab.interrupts import Stopped
from msvit_lab.training.state import last_checkpoint


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
