"""Calibration: gates and reducers set to the cost that was asked for, on the very images that are timed.

    gate = choose_gate("gradient", model, share=0.33).gate
    calibrate(gate, sets, share=0.33)            # one threshold for all images: they still differ from each other
    plain("evit", model, sets, rate=None)        # EViT on all tokens, at the multiply-adds of the model with its gate
    gated("evit", model, sets, rate=None)        # EViT and a gate that leaves more tokens, at the same

A learned gate without training has the cost of a trained one but nearly equal logits; they are spread to unit variance
first, as bfloat16 would round them to the same number. Whether tokens are removed before the first block, between the
blocks, or half and half: at equal multiply-adds only accuracy and time are left to compare.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from msvit.budget.thresholds import cost_setting
from msvit.conversion import convert
from msvit.gates import GATES, AllFine, Gate, LogitGate
from msvit.host_settings import gate_for_host
from msvit.model import MSViT
from msvit.reduction import Reducer, make_reducer
from msvit.reduction.base import stages
from msvit_lab.gate_names import find_gate, is_trained, read_gate

HALVINGS = 22  # to 1e-5: nearer to a score, a compiled gate, which rounds differently, may decide otherwise
WIDEST = 32.0  # no logit and no score lies beyond
LOWEST = {"evit": 0.02, "dynamicvit": 0.02, "tome": 0.5}  # lower rates are of no use, or impossible


@dataclass(frozen=True)
class Chosen:
    gate: Gate
    name: str
    trained: bool = True


def choose_gate(kind: str, model: MSViT, share: float | None, coarse: int | None = None) -> Chosen:
    """A gate for this model, by name or from a folder. `coarse`: the cell that was asked for, if any."""
    if is_trained(kind):
        folder = Path(kind)
        gate, data = read_gate(folder)
        gate = gate_for_host(gate.for_cells(coarse or model.backbone.default_coarse(gate)), model.host)
        return Chosen(gate, f"{'from' if data is None else 'of the run'} {folder.name}")
    if kind == "learned":
        return Chosen(model.gate, "learned, untrained", trained=False)
    if kind in ("entropy", "gradient"):
        return Chosen(GATES[kind](coarse=model.coarse, threshold=0.0), kind)
    gate = find_gate(kind, model.coarse, share)
    return Chosen(gate, kind, trained=not isinstance(gate, LogitGate))


@torch.no_grad()
def spread_out(gate: Gate, sets: list[Tensor]) -> None:
    """Give an untrained learned gate logits of mean 0 and variance 1 on these images. In float32."""
    assert isinstance(gate, LogitGate), f"{type(gate).__name__} has no logits to spread"
    logits = torch.cat([gate(images).logits.flatten() for images in sets])
    centre, width = logits.mean(), logits.std().clamp(min=1e-6)
    gate.head.weight.div_(width)
    gate.head.bias.sub_(centre).div_(width)


def calibrate(gate: Gate, sets: list[Tensor], share: float) -> None:
    """Find the threshold at which `share` of all cells are fine, in training over the gate's own noise."""
    if gate.config.get("threshold") is not None:
        set_cost(gate, lambda: fine_share(gate, sets), share)


def set_cost(gate: Gate, cost: Callable[[], float], wanted: float) -> None:
    """Set a gate's threshold, or its share, to where the cost is as near to the wanted one as it can be from below."""
    name = cost_setting(gate)
    low, high = (WIDEST, -WIDEST) if name == "threshold" else (0.0, 1.0)

    def fits(value: float) -> bool:
        """Set the gate to this value; whether the cost is then at most `wanted`."""
        setattr(gate, name, value)
        return cost() <= wanted

    setattr(gate, name, bisect(fits, low, high, HALVINGS))


def bisect(fits: Callable[[float], bool], low: float, high: float, halvings: int) -> float:
    """The value nearest to `high` that fits, `low` at the worst; either may be the larger of the two."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@torch.no_grad()
def fine_share(gate: Gate, sets: list[Tensor]) -> float:
    """Mean share of fine cells, with the same noise in each call."""
    device = sets[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return float(torch.stack([gate(images).mask.float().mean() for images in sets]).mean())


def plain(name: str, model: MSViT, sets: list[Tensor], rate: float | None) -> MSViT:
    """The host with a reducer and all cells fine; without a rate, at the mean multiply-adds of `model`."""
    reducer = at_rate(name, model, rate) if rate is not None else of_cost(name, model, sets[0], mean_macs(model, sets))
    return convert(model.host, coarse=model.coarse, gate=AllFine(coarse=model.coarse), reducer=reducer)


def gated(name: str, model: MSViT, sets: list[Tensor], rate: float | None) -> MSViT:
    """With the model's gate; without a rate, each saves half, so that both cost what the model does by itself."""
    if rate is not None:
        return convert(model.host, gate=model.gate, coarse=model.coarse, reducer=at_rate(name, model, rate))
    wanted, dense = mean_macs(model, sets), dense_macs(model, sets[0])
    reducer, gate = of_cost(name, model, sets[0], math.sqrt(wanted * dense)), deepcopy(model.gate)
    both = convert(model.host, gate=gate, coarse=model.coarse, reducer=reducer).eval()
    set_cost(gate, lambda: mean_macs(both, sets), wanted)
    return both


def at_rate(name: str, model: MSViT, rate: float) -> Reducer:
    depth = len(list(model.backbone.blocks.children()))
    reducer = make_reducer(name, rate=rate, at=None if name == "tome" else stages(depth))
    assert reducer is not None, "none is no row"
    model.backbone.check_reducer(reducer)
    return reducer.to(next(model.parameters()).dtype).eval()


def of_cost(name: str, model: MSViT, image: Tensor, macs: float) -> Reducer:
    """The reducer whose rate gives all-fine images at most that many multiply-adds, down to the lowest rate."""
    rate = bisect(lambda rate: dense_macs(model, image, at_rate(name, model, rate)) <= macs, LOWEST[name], 1.0, 15)
    return at_rate(name, model, math.floor(rate * 1e4) / 1e4)  # names and records show four digits


def dense_macs(model: MSViT, image: Tensor, reducer: Reducer | None = None) -> float:
    """Multiply-adds of an image whose cells are all fine."""
    return float(model.backbone.dense_macs(model.grid(image), reducer))


@torch.no_grad()
def mean_macs(model: MSViT, sets: list[Tensor]) -> float:
    """Of these images, gate included."""
    return float(torch.cat([model.macs(images) for images in sets]).double().mean())
