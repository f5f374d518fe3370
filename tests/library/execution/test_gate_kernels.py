"""The kernels of gates against their layers in plain torch: on a GPU, or else in Triton's interpreter."""

from typing import Any

import pytest
import torch
from tiny import interpretable, relative_error
from torch import Tensor

from msvit.fast import gates as fast
from msvit.fast.find_kernels import kernels
from msvit.gates import ContextGate, LearnedGate
from msvit.gates.logits import LogitGate

pytestmark = pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")
gate_kernels = kernels and kernels.gates
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = 0.05 if DEVICE == "cuda" else 0.02
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16


def gate_in_half(kind: type[LogitGate], coarse: int, affine: bool, **options: Any) -> LogitGate:
    """With weights that all matter, each a number of 16 bits."""
    torch.manual_seed(0)
    gate = kind(coarse=coarse, grid=(2, 3), **options).eval()
    for parameter in gate.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter)).copy_(parameter.data.half())
    if affine:
        gate = gate.with_normalization(mean=(0.5,) * 3, std=(0.5,) * 3)
        gate = gate.for_normalization(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    return gate.to(DEVICE, HALF)


def images(coarse: int, cells: tuple[int, int] = (2, 3)) -> Tensor:
    """The second is hardly textured, and far from 0."""
    image = torch.randn(2, 3, coarse * cells[0], coarse * cells[1], device=DEVICE).to(HALF)
    image[1] = image[1] / 16 + 3
    return image


MORE = {"widths": (16, 64, 16), "depth": 1}  # with more cells than a program takes
CASES = [
    (LearnedGate, 16, (2, 3), False, True, {"widths": (24, 32, 16)}),
    (LearnedGate, 8, (3, 2), True, False, {}),
    (ContextGate, 16, (2, 1), True, False, {"widths": (16, 16, 32), "depth": 1}),
    (ContextGate, 8, (3, 3), False, True, MORE),
    pytest.param(ContextGate, 8, (9, 8), False, False, MORE, marks=pytest.mark.slow),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "coarse", "cells", "affine", "few", "options"), CASES)
def test_logits_by_kernels_are_those_of_the_layers(
    kind: type[LogitGate], coarse: int, cells: tuple[int, int], affine: bool, few: bool, options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gate_kernels, "FEW_PLACES", 1024 if few else 0)
    gate, image = gate_in_half(kind, coarse, affine, **options), images(coarse, cells)
    monkeypatch.setattr(fast, "runs_kernels", lambda image: False)
    want = gate.double()(image.double()).logits
    monkeypatch.setattr(fast, "runs_kernels", lambda image: True)
    monkeypatch.setattr(gate_kernels, "MIN_CELLS", 1)
    gate = gate.to(HALF)
    assert fast.has_kernels(gate, image)
    got = gate(image).logits
    for each in range(2):
        assert relative_error(got[each].double() - want.mean(), want[each] - want.mean()) < BOUND
    assert want.std() > 10 * (got - want).abs().max()
    address, like = torch.tensor(image.data_ptr(), device=DEVICE), torch.full_like(image, torch.nan)
    assert torch.equal(fast.compute_logits(gate, like, address).float(), got)


class Adapted(torch.nn.Linear):
    """As a low-rank adapter would be."""


class Other(ContextGate):
    def logits(self, image: Tensor) -> Tensor:
        return super().logits(image) + 1


OTHERS = [
    (Other, {"coarse": 16}),
    (LearnedGate, {"coarse": 128}),  # a step of the kernel would be a part of a row
    (LearnedGate, {"coarse": 8, "widths": (200, 32, 16)}),
    (ContextGate, {"coarse": 8, "widths": (64, 128, 256)}),  # more shared memory than there is
    (ContextGate, {"coarse": 8, "in_chans": 8}),
    (ContextGate, {"coarse": 8, "depth": 0}),
    (LearnedGate, {"coarse": 8}),  # with a layer of another class
    (ContextGate, {"coarse": 8}),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "options"), OTHERS)
def test_what_kernels_do_not_take_runs_by_the_layers(
    kind: type[LogitGate], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "runs_kernels", lambda image: True)
    monkeypatch.setattr(gate_kernels, "MIN_CELLS", 1)
    for name in ("_cell_mlp_kernel", "_stem_kernel", "_downsample_kernel", "_mix_kernel"):
        monkeypatch.setattr(gate_kernels, name, None)
    gate = kind(**options).eval().to(DEVICE, HALF)
    if options == {"coarse": 8}:
        gate.head = Adapted(gate.head.in_features, 1).to(DEVICE, HALF)
    side = 2 * options["coarse"]
    assert gate(torch.randn(1, gate.in_chans, side, side, device=DEVICE).to(HALF)).logits.isfinite().all()
