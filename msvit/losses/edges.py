"""Edges: in a dense task the label maps themselves say which cells deserve fine tokens: those of more than one class.

    gate_loss = EdgeLoss(target=0.25, coarse=32)
    loss = task_loss + gate_loss(gate.logits, label)     # does this cell hold an edge?
    model.gate.threshold = gate_loss.follow(gate.logits)       # after a step: about a quarter of all cells lie above it

Not the paper's: there a gate learns from the task's gradient alone. Here it needs neither noise nor inactive twins, so
packed training does, and after some fifty steps the share of fine cells is near the target.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from msvit.losses.sparsity import check_target
from msvit.types import IGNORE

PACE = 0.05  # share of the way that the threshold goes in a step


class EdgeLoss(nn.Module):
    """Binary cross-entropy between a gate's logits and the cells that hold an edge. `threshold` is saved with a run."""

    threshold: Tensor

    def __init__(self, target: float, coarse: int) -> None:
        super().__init__()
        self.target, self.coarse = check_target(target), coarse
        self.register_buffer("threshold", torch.tensor(torch.nan))

    def forward(self, logits: Float[Tensor, "b hc wc"], label: Int[Tensor, "b h w"]) -> Float[Tensor, ""]:
        return F.binary_cross_entropy_with_logits(logits.float(), edge_cells(label, self.coarse))

    @torch.no_grad()
    def follow(self, logits: Float[Tensor, "b hc wc"]) -> float:
        """Move the threshold towards what the target share of these cells lies above; the first batch sets it."""
        ordered = logits.float().flatten().sort().values  # (torch's quantile takes 16 million numbers at most)
        quantile = ordered[min(len(ordered) - 1, int((1 - self.target) * len(ordered)))]
        known = self.threshold.isfinite()
        self.threshold.copy_(torch.where(known, self.threshold.lerp(quantile, PACE), quantile))
        return self.threshold.item()

    def extra_repr(self) -> str:
        return f"target={self.target}, coarse={self.coarse}"


def edge_cells(label: Int[Tensor, "b h w"], coarse: int) -> Float[Tensor, "b hc wc"]:
    """1 for cells with pixels of more than one class, ignored ones not counted. The last may reach beyond the label."""
    below, right = (-side % coarse for side in label.shape[1:])
    label = F.pad(label, (0, right, 0, below), value=IGNORE)
    pixels = label.unflatten(2, (-1, coarse)).unflatten(1, (-1, coarse))  # (b, hc, s, wc, s)
    highest = pixels.masked_fill(pixels == IGNORE, -1).amax((2, 4))
    lowest = pixels.amin((2, 4))  # ignored ones are the highest number there is
    return (highest > lowest).float()
