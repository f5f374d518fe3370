"""Losses with a target for each cell's logit, and the controller that keeps the share of cells above a threshold.

    loss = task_loss + edge_loss(gate.logits, label, coarse=32)        # dense tasks: cells with more than one class
    loss = task_loss + attention_loss(gate.logits, attention)          # the attention of a dense model's class token
    controller = ThresholdController(target=0.25)
    model.gate.threshold = controller.update(gate.logits)              # after a step: a quarter of all cells is fine

Not the paper's: there a gate learns from the task's gradient alone. Here it needs neither noise nor the inactive tokens
of the other scale, so packed training is enough, and after some ten steps the share of fine cells is near the target.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.checks import check_int, check_tensor, check_values
from msvit.losses.batch_shaping import check_target
from msvit.shapes import Float, Integer
from msvit.types import IGNORE

PACE = 0.2  # share of the way to a batch's quantile that the threshold goes in a step
MIN_ATTENTION = 1e-3  # of a uniform one: less counts as this much


class ThresholdController(nn.Module):
    """A threshold that is moved to where the target share of all logits lies above it; it is saved with a run."""

    threshold: Tensor

    def __init__(self, target: float) -> None:
        super().__init__()
        self.target = check_target(target)
        self.register_buffer("threshold", torch.tensor(torch.nan))

    @torch.no_grad()
    def update(self, logits: Float[Tensor, "b hc wc"]) -> float:
        """Move the threshold towards this batch's quantile, and return it; the first batch sets it."""
        check_tensor("logits", logits, (None, None, None), "b, hc, wc")
        check_values("logits", logits)
        ordered = logits.float().flatten().sort().values  # (torch's quantile takes 16 million numbers at most)
        quantile = ordered[min(len(ordered) - 1, int((1 - self.target) * len(ordered)))]
        known = self.threshold.isfinite()
        self.threshold.copy_(torch.where(known, self.threshold.lerp(quantile, PACE), quantile))
        return self.threshold.item()

    def extra_repr(self) -> str:
        return f"target={self.target}"


def edge_loss(
    logits: Float[Tensor, "b hc wc"], label: Integer[Tensor, "b h w"], coarse: int
) -> Float[Tensor, ""]:
    """Return the binary cross-entropy between a gate's logits and the cells that hold an edge."""
    check_tensor("logits", logits, (None, None, None), "b, hc, wc")
    edges = edge_cells(label, coarse)
    if edges.shape != logits.shape:
        raise ValueError(
            f"logits are {tuple(logits.shape)}, but a label {tuple(label.shape)} has cells {tuple(edges.shape)} "
            f"of {coarse}px; give both of the same images"
        )
    return F.binary_cross_entropy_with_logits(logits.float(), edges)


def attention_loss(
    logits: Float[Tensor, "b hc wc"], attention: Float[Tensor, "b hc wc"]
) -> Float[Tensor, ""]:
    """Return the mean squared distance of the logits to the logarithm of attention, in units of a uniform one.

    So a logit ranks cells of all images, and one gate serves every share by another threshold.
    """
    check_tensor("logits", logits, (None, None, None), "b, hc, wc")
    check_tensor("attention", attention, tuple(logits.shape), "b, hc, wc of logits")
    check_values("attention", attention, at_least=0)
    uniform = attention.mean((1, 2), keepdim=True)
    return F.mse_loss(logits.float(), (attention / uniform).float().clamp(min=MIN_ATTENTION).log())


def edge_cells(label: Integer[Tensor, "b h w"], coarse: int, ignore: int = IGNORE) -> Float[Tensor, "b hc wc"]:
    """Return 1 for cells with pixels of more than one class, not counting `ignore`. The last may be cut off."""
    check_int("coarse", coarse, at_least=2, example=32)
    check_tensor("label", label, (None, None, None), "b, h, w", kind="int")
    check_values("label", label, at_least=0, at_most=ignore)
    label = label.long()  # of uint8, -1 is 255
    below, right = (-side % coarse for side in label.shape[1:])
    label = F.pad(label, (0, right, 0, below), value=ignore)
    pixels = label.unflatten(2, (-1, coarse)).unflatten(1, (-1, coarse))  # (b, hc, s, wc, s)
    highest = pixels.masked_fill(pixels == ignore, -1).amax((2, 4))
    lowest = pixels.amin((2, 4))  # ignored ones are the highest number there is
    return (highest > lowest).float()
