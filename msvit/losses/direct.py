"""Direct losses: a gate is told, cell by cell, where detail matters, and a threshold follows its logits.

    gate_loss = EdgeLoss(target=0.25, coarse=32)         # dense tasks: cells whose label map has more than one class
    loss = task_loss + gate_loss(gate.logits, label)
    gate_loss = AttentionLoss(target=0.25)               # what a dense model's class token looks at
    loss = task_loss + gate_loss(gate.logits, attention)
    model.gate.threshold = gate_loss.follow(gate.logits)       # after a step: about a quarter of all cells lie above it

Not the paper's: there a gate learns from the task's gradient alone. Here it needs neither noise nor inactive twins, so
packed training does, and after some ten steps the share of fine cells is near the target.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor, nn

from msvit.checks import check_int, check_tensor, check_values
from msvit.losses.sparsity import check_target
from msvit.types import IGNORE

PACE = 0.2  # share of the way that the threshold goes in a step
UNSEEN = 1e-3  # attention below this share of an even one counts as this much


class DirectLoss(nn.Module):
    """Logits and what they should tell -> a number. `threshold` is saved with a run.

    By itself it tells nothing: the threshold of a gate that does not learn may follow a target too.
    """

    threshold: Tensor

    def __init__(self, target: float) -> None:
        super().__init__()
        self.target = check_target(target)
        self.register_buffer("threshold", torch.tensor(torch.nan))

    @torch.no_grad()
    def follow(self, logits: Float[Tensor, "b hc wc"]) -> float:
        """Move the threshold towards what the target share of these cells lies above; the first batch sets it."""
        check_tensor("logits", logits, (None, None, None), "b, hc, wc")
        check_values("logits", logits)
        ordered = logits.float().flatten().sort().values  # (torch's quantile takes 16 million numbers at most)
        quantile = ordered[min(len(ordered) - 1, int((1 - self.target) * len(ordered)))]
        known = self.threshold.isfinite()
        self.threshold.copy_(torch.where(known, self.threshold.lerp(quantile, PACE), quantile))
        return self.threshold.item()

    def extra_repr(self) -> str:
        return f"target={self.target}"


class EdgeLoss(DirectLoss):
    """Binary cross-entropy between a gate's logits and the cells that hold an edge."""

    def __init__(self, target: float, coarse: int) -> None:
        super().__init__(target)
        self.coarse = check_int("coarse", coarse, at_least=2, example=32)

    def forward(self, logits: Float[Tensor, "b hc wc"], label: Integer[Tensor, "b h w"]) -> Float[Tensor, ""]:
        check_tensor("logits", logits, (None, None, None), "b, hc, wc")
        edges = edge_cells(label, self.coarse)
        if edges.shape != logits.shape:
            raise ValueError(
                f"logits are {tuple(logits.shape)}, but a label {tuple(label.shape)} has cells {tuple(edges.shape)} "
                f"of {self.coarse}px; give both of the same images"
            )
        return F.binary_cross_entropy_with_logits(logits.float(), edges)

    def extra_repr(self) -> str:
        return f"target={self.target}, coarse={self.coarse}"


class AttentionLoss(DirectLoss):
    """Mean squared distance of the logits to the logarithm of attention, in units of an even one.

    So a logit ranks cells of all images, and one gate serves every share by another threshold.
    """

    def forward(
        self, logits: Float[Tensor, "b hc wc"], attention: Float[Tensor, "b hc wc"]
    ) -> Float[Tensor, ""]:
        check_tensor("logits", logits, (None, None, None), "b, hc, wc")
        check_tensor("attention", attention, tuple(logits.shape), "b, hc, wc of logits")
        check_values("attention", attention, at_least=0)
        even = attention.mean((1, 2), keepdim=True)
        return F.mse_loss(logits.float(), (attention / even).float().clamp(min=UNSEEN).log())


def edge_cells(label: Integer[Tensor, "b h w"], coarse: int) -> Float[Tensor, "b hc wc"]:
    """1 for cells with pixels of more than one class, ignored ones not counted. The last may reach beyond the label."""
    check_tensor("label", label, (None, None, None), "b, h, w", kind="int")
    check_values("label", label, at_least=0, at_most=IGNORE)
    label = label.long()  # of uint8, -1 is 255
    below, right = (-side % coarse for side in label.shape[1:])
    label = F.pad(label, (0, right, 0, below), value=IGNORE)
    pixels = label.unflatten(2, (-1, coarse)).unflatten(1, (-1, coarse))  # (b, hc, s, wc, s)
    highest = pixels.masked_fill(pixels == IGNORE, -1).amax((2, 4))
    lowest = pixels.amin((2, 4))  # ignored ones are the highest number there is
    return (highest > lowest).float()
