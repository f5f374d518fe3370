"""Decisions by rank: the cells of each image with the highest scores are fine."""

import torch
from torch import Tensor

from msvit.shapes import Float
from msvit.types import GateOutput, changed


def top_share(score: Float[Tensor, "b hc wc"], share: float) -> Float[Tensor, "b hc wc"]:
    """Return 1 for the `share` of cells with the highest score in each image, else 0. Ties go to the first cell."""
    return top_num(score, round(share * score.flatten(1).shape[1]))


def top_num(score: Float[Tensor, "b hc wc"], num: int) -> Float[Tensor, "b hc wc"]:
    """Return 1 for the `num` cells with the highest score in each image, else 0. Ties go to the first cell."""
    flat = score.flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(flat).scatter(1, order[:, :num], 1.0).view_as(score)


def with_num_fine(gate: GateOutput, num: int) -> GateOutput:
    """Return decisions with the `num` surest cells of each image fine; the gradient and NaN stay as they are."""
    sample, logits = (each.detach().flatten(1).nan_to_num(nan=-torch.inf) for each in (gate.sample, gate.logits))
    order = logits.argsort(dim=1, descending=True, stable=True)  # where samples are saturated
    order = order.gather(1, sample.gather(1, order).argsort(dim=1, descending=True, stable=True))
    mask = torch.zeros_like(sample).scatter(1, order[:, :num], 1.0).view_as(gate.mask)
    return changed(gate, mask=mask.to(gate.mask.dtype) + (gate.sample - gate.sample.detach()).to(gate.mask.dtype))
