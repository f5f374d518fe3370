"""Masks: the gate that decides, set so that the mean share of fine cells is the one asked for on these very images.

    gate = choose_gate("gradient", None, model, share=0.33).gate
    calibrate(gate, sets, share=0.33)            # one threshold for all images: they still differ from each other

A learned gate without training has the cost of a trained one but nearly equal logits; they are spread to unit variance
first, or bfloat16 could not tell them apart.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from msvit.gates import GATES, Gate, LogitGate
from msvit.lab.gate_names import find_gate, is_trained, read_gate
from msvit.model import MSViT

HALVINGS = 30
WIDEST = 32.0  # no logit and no score lies beyond


@dataclass(frozen=True)
class Chosen:
    gate: Gate
    name: str
    mean: tuple[float, ...] | None = None  # the images' statistics it was trained with, where they are known
    std: tuple[float, ...] | None = None
    trained: bool = True


def choose_gate(
    kind: str, folder: Path | None, model: MSViT, share: float | None, coarse: int | None = None
) -> Chosen:
    """A gate for this model: one from a folder, or one by name. `coarse`: the cell that was asked for, if any."""
    if folder is not None or is_trained(kind):
        return from_folder(folder or Path(kind), model, coarse)
    if kind == "learned":
        assert isinstance(model.gate, LogitGate), "convert makes one"
        return Chosen(model.gate, "learned, untrained", trained=False)
    if kind in ("entropy", "gradient"):
        return Chosen(GATES[kind](coarse=model.coarse, threshold=0.0), kind)
    gate, _ = find_gate(kind, model.coarse, share)
    return Chosen(gate, kind, trained=not isinstance(gate, LogitGate))


def from_folder(folder: Path, model: MSViT, coarse: int | None = None) -> Chosen:
    """The gate of a run, or one that was saved alone."""
    gate, data = read_gate(folder)
    gate = gate.for_cells(coarse or model.backbone.usual_coarse(gate))
    if data is None:
        return Chosen(gate, f"from {folder.name}")
    return Chosen(gate, f"of the run {folder.name}", mean=data.mean, std=data.std)


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
    if "threshold" not in gate.config:
        return
    low, high = -WIDEST, WIDEST
    for _ in range(HALVINGS):
        gate.config["threshold"] = (low + high) / 2
        if share_of(gate, sets) > share:
            low = gate.config["threshold"]
        else:
            high = gate.config["threshold"]
    gate.config["threshold"] = high


@torch.no_grad()
def share_of(gate: Gate, sets: list[Tensor]) -> float:
    """Mean share of fine cells, with the same noise each time it is asked."""
    device = sets[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return float(torch.stack([gate(images).mask.float().mean() for images in sets]).mean())
