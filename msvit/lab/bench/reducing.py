"""Reducers in the benchmark: alone and with a gate, at the cost of the gate alone.

    reducer = of_cost("evit", model, macs=2.2e9)          # EViT on all tokens, at that many multiply-adds an image
    spend(gate, lambda: mean_macs(model, sets), macs)     # the gate's threshold, so that the model costs that much

Whether tokens are taken away before the first block, between the blocks, or half and half: at equal multiply-adds only
accuracy and time are left to compare.
"""

import math
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor

from msvit.conversion import convert
from msvit.gates import AllFine, Gate
from msvit.lab.bench.masks import HALVINGS, WIDEST
from msvit.model import MSViT
from msvit.reduction import Reducer, make_reducer
from msvit.reduction.base import stages

LOWEST = {"evit": 0.02, "dynamicvit": 0.02, "tome": 0.5}  # rates below are of no use, or cannot be


def plain(name: str, model: MSViT, sets: list[Tensor], rate: float | None) -> MSViT:
    """The published method on all tokens; without a rate, at the cost of the model as it is."""
    reducer = at_rate(name, model, rate) if rate is not None else of_cost(name, model, sets[0], mean_macs(model, sets))
    return convert(model.host, coarse=model.coarse, gate=AllFine(coarse=model.coarse), reducer=reducer)


def gated(name: str, model: MSViT, sets: list[Tensor], rate: float | None) -> MSViT:
    """With the model's gate; without a rate, each saves half, so that both cost what the model does by itself."""
    if rate is not None:
        return convert(model.host, coarse=model.coarse, gate=model.gate, reducer=at_rate(name, model, rate))
    wanted, dense = mean_macs(model, sets), dense_macs(model, sets[0])
    reducer, gate = of_cost(name, model, sets[0], math.sqrt(wanted * dense)), deepcopy(model.gate)
    both = convert(model.host, coarse=model.coarse, gate=gate, reducer=reducer).eval()
    spend(gate, lambda: mean_macs(both, sets), wanted)
    return both


def at_rate(name: str, model: MSViT, rate: float) -> Reducer:
    depth = len(list(model.backbone.blocks.children()))
    at = None if name == "tome" else stages(depth)
    reducer = make_reducer(name, rate=rate, at=at)
    assert reducer is not None, "none is no row"
    model.backbone.check_reducer(reducer)
    return reducer.to(next(model.parameters()).dtype).eval()


def of_cost(name: str, model: MSViT, image: Tensor, macs: float) -> Reducer:
    """The reducer whose rate gives all-fine images at most that many multiply-adds, as far as it goes down."""
    low, high = LOWEST[name], 1.0
    for _ in range(HALVINGS // 2):
        rate = (low + high) / 2
        low, high = (low, rate) if dense_macs(model, image, at_rate(name, model, rate)) > macs else (rate, high)
    return at_rate(name, model, math.floor(low * 1e4) / 1e4)  # so many digits are used


def dense_macs(model: MSViT, image: Tensor, reducer: Reducer | None = None) -> float:
    """Multiply-adds of an image whose cells are all fine."""
    return float(model.backbone.dense_macs(model.grid(image), reducer))


@torch.no_grad()
def mean_macs(model: MSViT, sets: list[Tensor]) -> float:
    """Of these images, gate included."""
    return float(torch.cat([model.macs(images) for images in sets]).double().mean())


def spend(gate: Gate, cost: Callable[[], float], wanted: float) -> None:
    """Set the gate so that the cost comes as near to the wanted one as it can from below."""
    name, low, high = ("threshold", WIDEST, -WIDEST) if "threshold" in gate.config else ("share", 0.0, 1.0)
    for _ in range(HALVINGS):
        gate.config[name] = (low + high) / 2
        low, high = (low, gate.config[name]) if cost() > wanted else (gate.config[name], high)
    gate.config[name] = low
