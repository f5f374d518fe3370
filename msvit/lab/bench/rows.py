"""Rows: what is timed, each a function from a subject to something that takes a batch of images.

    call = ROWS["packed compiled"](subject)
    call(images)                              # gate and tokenizer included

The weights of host and gate are shared by all rows; each has a wrapper of its own, as compiling changes it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

import msvit
from msvit.conversion import convert
from msvit.execution import MODES
from msvit.gates import AllFine, Gate
from msvit.lab.bench import reducing
from msvit.lab.bench.masks import calibrate
from msvit.lab.timing import Call
from msvit.model import MSViT
from msvit.reduction import REDUCERS

PACKED, SHIPPED, ALL_FINE = "packed accelerated", "shipped gate accelerated", "all fine accelerated"


@dataclass(frozen=True)
class Subject:
    """A host and the gate that decides for it, on these images."""

    host: nn.Module
    gate: Gate
    sets: list[Tensor] = field(default_factory=list)
    rate: float | None = None  # of reducers; None: the rate at which they cost as much as the gate alone
    merge_at: int | None = None  # of a Swin
    share: float | None = None  # of fine cells that the gate was calibrated to

    def wrap(self, mode: str = "packed", gate: Gate | None = None) -> MSViT:
        gate = self.gate if gate is None else gate
        return convert(self.host, coarse=gate.coarse, gate=gate, mode=mode, merge_at=self.merge_at)


def dense(subject: Subject) -> Call:
    """The timm model as it is."""
    return subject.host


def dense_compiled(subject: Subject) -> Call:
    return torch.compile(subject.host)


def masked(subject: Subject) -> Call:
    return subject.wrap("masked")


def trimmed(subject: Subject) -> Call:
    return subject.wrap("trimmed")


def packed(subject: Subject) -> Call:
    return subject.wrap()


def packed_compiled(subject: Subject) -> Call:
    model = subject.wrap()
    model.backbone.compile(dynamic=True)
    return model


def packed_accelerated(subject: Subject) -> Call:
    """What a user gets from `msvit.compile`: CUDA graphs on a GPU, weights packed once on a CPU."""
    return msvit.compile(subject.wrap())


def all_fine_accelerated(subject: Subject) -> Call:
    """The same with every token there is: how much of the gain comes from kernels and not from tokens."""
    return msvit.compile(subject.wrap(gate=AllFine(coarse=subject.gate.coarse)))


def shipped_accelerated(subject: Subject) -> Call:
    """As `packed_accelerated`, with the trained gate that comes with msvit, set to the same share of fine cells."""
    weight = next(subject.host.parameters())
    gate = msvit.load_gate("default", coarse=subject.gate.coarse).to(weight.device, weight.dtype)
    gate.train(subject.gate.training)
    if subject.share is not None:
        calibrate(gate, subject.sets, subject.share)
    return msvit.compile(subject.wrap(gate=gate))


def plain_reducer(name: str, subject: Subject) -> Call:
    """A published method by itself, as fast as we can make it: compiled, fused attention, captured."""
    return msvit.compile(reducing.plain(name, subject.wrap(), subject.sets, subject.rate))


def gated_reducer(name: str, subject: Subject) -> Call:
    return msvit.compile(reducing.gated(name, subject.wrap(), subject.sets, subject.rate))


ROWS: dict[str, Callable[[Subject], Call]] = {
    "dense": dense,
    "dense compiled": dense_compiled,
    "masked": masked,
    "trimmed": trimmed,
    "packed": packed,
    "packed compiled": packed_compiled,
    PACKED: packed_accelerated,
    SHIPPED: shipped_accelerated,
    ALL_FINE: all_fine_accelerated,
    **{name: partial(plain_reducer, name) for name in REDUCERS},
    **{f"{name} gated": partial(gated_reducer, name) for name in REDUCERS},
}
REDUCED = tuple(name for name in ROWS if name.split()[0] in REDUCERS)
COUNTED = (*REDUCED, SHIPPED)  # these have multiply-adds of their own
ALL_TOKENS = ("dense", "dense compiled", ALL_FINE)  # no multiply-adds are saved in these
README_ROWS = ("dense compiled", ALL_FINE, PACKED, SHIPPED)
CPU_ROWS = ("dense", ALL_FINE, PACKED, SHIPPED)
BASELINES = ("dense compiled", "dense")  # what speed-ups are over: the first of these that ran


def usual_rows(device: torch.device, train: bool, modes: tuple[str, ...] = tuple(MODES)) -> list[str]:
    """All but reducers on a GPU; on a CPU those of interest, where acceleration is for inference only."""
    if device.type == "cuda":
        return [name for name in ROWS if name not in REDUCED and (name in modes or name not in MODES)]
    return ["dense", "packed"] if train else ["dense", "packed", "packed accelerated"]


def reducer_rows(names: list[str]) -> list[str]:
    """The rows of these reducers: each by itself, and with the gate."""
    for name in names:
        if name not in REDUCERS:
            raise ValueError(f"unknown reducer {name!r}; known: {', '.join(REDUCERS)}")
    return [row for name in names for row in (name, f"{name} gated")]


def check_rows(names: list[str]) -> list[str]:
    for name in names:
        if name not in ROWS:
            raise ValueError(f"unknown row {name!r}; known: {', '.join(ROWS)}")
    if not any(name in BASELINES for name in names):
        raise ValueError(
            f"the rows {', '.join(names)} have nothing to be compared with; add one of {', '.join(BASELINES)}"
        )
    return names
