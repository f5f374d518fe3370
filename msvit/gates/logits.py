"""What every gate with weights is: a module that gives each cell a logit, and a decision made from it."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.checks import check_int, check_ints, check_number, check_weights
from msvit.compile_regions import compile_region
from msvit.gates.base import Gate, setting
from msvit.gates.sampling import decide
from msvit.types import GateOutput

START_LOGIT = 3.0  # sigmoid(3) = 0.95: all cells fine, yet inside the range where the losses have a gradient


class LogitGate(Gate):
    """`logits` says how much each cell deserves fine tokens; those over `threshold` get them.

    In training decisions are sampled; with all parameters frozen, or in eval mode, they are deterministic.
    """

    answer: nn.Linear  # its last layer

    def __init__(
        self, coarse: int, in_chans: int, temperature: float, noise: float, threshold: float, **config: Any
    ) -> None:
        self.in_chans = check_int("in_chans", in_chans, at_least=1)
        super().__init__(coarse, in_chans=self.in_chans, **config)
        self.temperature, self.noise, self.threshold = temperature, noise, threshold

    temperature = setting("temperature", partial(check_number, above=0))
    noise = setting("noise", partial(check_number, at_least=0))
    threshold = setting("threshold", check_number)

    @property
    def frozen(self) -> bool:
        return not any(p.requires_grad for p in self.parameters())

    def freeze(self) -> "LogitGate":
        return self.requires_grad_(False)

    def logits(self, image: Tensor, rows: int, columns: int) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no logits; write a method that returns (b, hc, wc)")

    def forward(self, image: Tensor) -> GateOutput:
        self.cells(image)  # do they fit?
        if image.shape[1] != self.in_chans:
            raise ValueError(
                f"images have {image.shape[1]} channels, but the gate was built for {self.in_chans}; "
                f"convert them, or make a {type(self).__name__} with in_chans={image.shape[1]}"
            )
        logits = look(self, image)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        noisy = self.training and not self.frozen
        return decide(logits, self.temperature, self.noise if noisy else 0.0, self.threshold)


@compile_region
def look(gate: LogitGate, image: Tensor) -> Tensor:
    """Without the threshold, which gates that are alike otherwise need not share."""
    return gate.logits(image, *gate.cells(image))


def check_table(grid: Any, widths: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Rows and columns of a table of positions, and the widths of a gate's layers."""
    rows, columns = check_ints("grid", grid, 2, example=(7, 7))
    first, second, third = check_ints("widths", widths, 3, at_most=2**14)
    check_weights(rows * columns * max(first, third), "grid and widths")
    return (rows, columns), (first, second, third)


def resized(table: Tensor, rows: int, columns: int) -> Tensor:
    """A table of positions (1, d, h, w) for another grid."""
    if table.shape[2:] == (rows, columns):
        return table
    return F.interpolate(table, size=(rows, columns), mode="bilinear", align_corners=False)
