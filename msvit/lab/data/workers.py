"""Workers: decoding in other processes, and what becomes of images that cannot be read.

    decoding = Decoding(decoder, device=torch.device("cuda"), workers=8, skip_bad=True)
    for part in decoding.decode(epoch=0, rows=[np.array([4, 1]), np.array([0, 3])]):
        ...                                 # decoder[(0, row)], one after the other, with its list `bad`
    decoding.skipped                        # names of the bad images met
    with keeping(folder):
        ...                                 # what any process has decoded once for this folder is not decoded again

A decoder is a `Dataset` with a `source`; `makes` is the class of what it makes, a NamedTuple. Workers change the speed
and nothing else.
"""

import hashlib
import json
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset

from msvit.atomic import replacing
from msvit.lab.data.sources import BadImage
from msvit.lab.interrupts import WARNINGS

KEPT: list[Path] = []  # the folder of the innermost `keeping` last


@contextmanager
def keeping(folder: Path) -> Iterator[None]:
    """Inside, decoded images lie in files there, for all caches and processes that need the same: they decode once."""
    KEPT.append(folder)
    try:
        yield
    finally:
        KEPT.pop()


class Decoding:
    """Runs a decoder in worker processes; bad images stop it or go on a list."""

    def __init__(self, decoder: Dataset, *, device: torch.device, workers: int, skip_bad: bool) -> None:
        self.decoder: Any = decoder
        self.device, self.workers, self.skip_bad = device, workers, skip_bad
        self.skipped: list[str] = []

    def decode_once(self, rows: list[np.ndarray]) -> Iterator[Any]:
        """For caches."""
        if not KEPT:
            yield from self.decode(0, rows)
            return
        key = hashlib.sha256(pickle.dumps((self.decoder, rows, self.skip_bad))).hexdigest()
        path = KEPT[-1] / key
        parts = None
        with FileLock(f"{path}.lock"):  # one decodes, the others wait for it
            if not path.is_file():
                parts = [deepcopy(part) for part in self.decode(0, rows)]  # what workers send keeps files open
                with suppress(OSError, RuntimeError), replacing(path) as unfinished:  # a full disk
                    write_parts(unfinished, parts)
        for part in parts or read_parts(path, self.decoder.makes):
            self.skipped += [error.name for error in part.bad if error.name not in self.skipped]
            yield part

    def decode(self, epoch: int, rows: list[np.ndarray]) -> Iterator[Any]:
        loader = DataLoader(
            self.decoder,
            batch_size=None,
            sampler=[(epoch, row) for row in rows],
            num_workers=min(self.workers, len(rows)),
            collate_fn=keep,
            worker_init_fn=leave_interrupts_to_the_parent,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else the loader would draw from the global one
        )
        for part in loader:
            for error in part.bad:
                if not self.skip_bad:
                    raise error
                if error.name not in self.skipped:
                    self.skipped.append(error.name)
            if len(self.skipped) == len(self.decoder.source):
                raise ValueError(f"all {len(self.skipped)} images are bad, none can be shown; the last: {part.bad[-1]}")
            yield part


def write_parts(path: Path, parts: list[Any]) -> None:
    """What a decoder made, as safetensors: arrays as they are, the rest as JSON in the header."""
    tensors: dict[str, torch.Tensor] = {}
    words: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        words.append({})
        for name, value in part._asdict().items():
            if isinstance(value, torch.Tensor | np.ndarray):
                tensors[f"{number}.{name}"] = torch.as_tensor(value).contiguous()
                words[-1][name] = "numpy" if isinstance(value, np.ndarray) else "torch"
            elif name == "bad":
                words[-1][name] = [[error.name, error.reason] for error in value]
            else:
                words[-1][name] = value
    save_file(tensors, path, {"parts": json.dumps(words)})


def read_parts(path: Path, kind: Any) -> Iterator[Any]:
    """Records of the class `kind`, their arrays mapped from the file and not copied."""
    with safe_open(path, framework="pt") as file:
        for number, words in enumerate(json.loads(file.metadata()["parts"])):
            values = dict(words)
            values["bad"] = [BadImage(*error) for error in words["bad"]]
            for name, value in words.items():
                if value in ("numpy", "torch"):
                    tensor = file.get_tensor(f"{number}.{name}")
                    values[name] = tensor.numpy() if value == "numpy" else tensor
            yield kind(**values)


def read(source: Any, index: int, bad: list[BadImage], *, replace_bad: bool) -> tuple[int, Any] | None:
    """An image and its number; where it is bad, the next good one or nothing. What was bad goes on the list."""
    for step in range(len(source) if replace_bad else 1):
        here = (index + step) % len(source)
        try:
            return here, source[here]
        except BadImage as error:
            bad.append(error)
    return None


def next_good(good: np.ndarray) -> np.ndarray:
    """The image that `read` finds for each number: itself, or the next that is good."""
    numbers = np.flatnonzero(good)
    return numbers[np.searchsorted(numbers, np.arange(len(good))) % len(numbers)]


def leave_interrupts_to_the_parent(worker: int) -> None:
    """They reach every process of a terminal or a job; the parent still needs its batch to end the step and save."""
    for number in (signal.SIGINT, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)


def keep(rows: Any) -> Any:
    return rows
