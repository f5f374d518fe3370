"""Rows: what is timed, each a function from a subject to something that takes a batch of images.

    call = ROWS["packed compiled"](subject)
    call(images)                              # gate and tokenizer included

Weights are shared by all rows; each has a wrapper of its own, as compiling changes it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import msvit
from msvit.bench.clock import Call
from msvit.conversion import convert
from msvit.gates import AllFine, Gate
from msvit.model import MSViT


@dataclass(frozen=True)
class Subject:
    """A host and the gate that decides for it."""

    host: nn.Module
    gate: Gate

    def wrap(self, mode: str = "packed", gate: Gate | None = None) -> MSViT:
        gate = self.gate if gate is None else gate
        return convert(self.host, coarse=gate.coarse, gate=gate, mode=mode)


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
    """What a user gets from `msvit.accelerate`: CUDA graphs on a GPU, weights packed once on a CPU."""
    return msvit.accelerate(subject.wrap())


def all_fine_accelerated(subject: Subject) -> Call:
    """The same with every token there is: how much of the gain comes from kernels and not from tokens."""
    return msvit.accelerate(subject.wrap(gate=AllFine(coarse=subject.gate.coarse)))


ROWS: dict[str, Callable[[Subject], Call]] = {
    "dense": dense,
    "dense compiled": dense_compiled,
    "masked": masked,
    "trimmed": trimmed,
    "packed": packed,
    "packed compiled": packed_compiled,
    "packed accelerated": packed_accelerated,
    "all fine accelerated": all_fine_accelerated,
}
ALL_TOKENS = ("dense", "dense compiled", "all fine accelerated")  # no multiply-adds are saved in these
BASELINES = ("dense compiled", "dense")  # what speed-ups are over: the first of these that ran


def usual_rows(device: torch.device, train: bool) -> list[str]:
    """All on a GPU; on a CPU those of interest, where acceleration is for inference only."""
    if device.type == "cuda":
        return list(ROWS)
    return ["dense", "packed"] if train else ["dense", "packed", "packed accelerated"]


def check_rows(names: list[str]) -> list[str]:
    for name in names:
        if name not in ROWS:
            raise ValueError(f"unknown row {name!r}; known: {', '.join(ROWS)}")
    if not any(name in BASELINES for name in names):
        raise ValueError(
            f"the rows {', '.join(names)} have nothing to be compared with; add one of {', '.join(BASELINES)}"
        )
    return names
