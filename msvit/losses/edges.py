"""Edges: in a dense task the label maps themselves say which cells deserve fine tokens: those of more than one class.

    gate_loss = EdgeLoss(target=0.25)
    loss = task_loss + gate_loss(gate.logits, label)     # does this cell hold an edge?
    model.gate.threshold = gate_loss.follow(gate_loss.quantile(gate.logits))   # a quarter of all cells lie above it

Not the paper's: there a gate learns from the task's gradient alone. Here it needs neither noise nor inactive twins, so
packed training does, and the target says what share of cells is fine from the first steps on.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from msvit.losses.sparsity import check_target

IGNORE = 255
PACE = 0.05  # share of the way that the threshold goes in a step


class EdgeLoss(nn.Module):
    """Binary cross-entropy between a gate's logits and the cells that hold an edge. `threshold` is saved with a run."""

    threshold: Tensor

    def __init__(self, target: float) -> None:
        super().__init__()
        self.target = check_target(target)
        self.register_buffer("threshold", torch.tensor(torch.nan))

    def forward(self, logits: Float[Tensor, "b hc wc"], label: Int[Tensor, "b h w"]) -> Float[Tensor, ""]:
        return F.binary_cross_entropy_with_logits(logits.float(), edge_cells(label, (logits.shape[1], logits.shape[2])))

    @torch.no_grad()
    def quantile(self, logits: Float[Tensor, "b hc wc"]) -> Float[Tensor, ""]:
        """Above this lies the target share of these cells."""
        return logits.float().flatten().quantile(1 - self.target)

    @torch.no_grad()
    def follow(self, quantile: Float[Tensor, ""]) -> float:
        """Move the threshold towards that of a batch; the first sets it."""
        known = self.threshold.isfinite()
        self.threshold.copy_(torch.where(known, self.threshold.lerp(quantile, PACE), quantile))
        return self.threshold.item()

    def extra_repr(self) -> str:
        return f"target={self.target}"


def edge_cells(label: Int[Tensor, "b h w"], cells: tuple[int, int]) -> Float[Tensor, "b hc wc"]:
    """1 for cells with pixels of more than one class, ignored ones not counted."""
    side = -(-label.shape[1] // cells[0])  # px; the label may end inside the last cells
    label = F.pad(label, (0, cells[1] * side - label.shape[2], 0, cells[0] * side - label.shape[1]), value=IGNORE)
    pixels = label.unflatten(2, (cells[1], side)).unflatten(1, (cells[0], side))  # (b, hc, s, wc, s)
    highest = pixels.masked_fill(pixels == IGNORE, -1).amax((2, 4))
    lowest = pixels.amin((2, 4))  # ignored ones are the highest number there is
    return (highest > lowest).float()
