"""Curve: the share of fine cells that each threshold of a gate gives, on the images it was calibrated with.

    curve = Curve.of(logits)             # (n, hc, wc) of n images
    curve.thresholds[64]                 # at which half of the cells are fine
    curve_for(gate.curves, (12, 12))     # for images of 12 x 12 cells: one of them, or between two of them
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from msvit.checks import check_int, check_ints, check_numbers
from msvit.shapes import Float

NUM = 129  # thresholds of a curve


@dataclass(frozen=True)
class Curve:
    """The share of fine cells by threshold: at threshold i the share i / (NUM - 1) of all cells is fine.

    `spread`: the standard deviation of the share over images, at each threshold. With it the mean of a cost that is
    quadratic in the number of fine cells, such as that of attention, is known exactly.
    """

    cells: tuple[int, int]  # (hc, wc) of the images
    num_images: int
    thresholds: tuple[float, ...]  # from high to low
    spread: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", check_ints("cells", self.cells, 2, example=(7, 7)))
        object.__setattr__(self, "num_images", check_int("num_images", self.num_images, at_least=1))
        for name in ("thresholds", "spread"):
            words = f"{NUM} numbers; calibrate the gate again"
            object.__setattr__(self, name, check_numbers(name, getattr(self, name), NUM, words))
        if any(low > high for high, low in zip(self.thresholds, self.thresholds[1:], strict=False)):
            raise ValueError("the thresholds of a curve must fall as the share rises; calibrate the gate again")

    @staticmethod
    def of(logits: Float[Tensor, "n hc wc"]) -> "Curve":
        """Compute the curve of the logits of n images."""
        flat = logits.detach().flatten().double().cpu().sort(descending=True).values
        at = torch.linspace(0, flat.numel() - 1, NUM).round().long()
        thresholds = flat[at].numpy().round(5)
        thresholds[-1] -= 1e-3  # under the lowest of all: every cell is over it
        shares = [(logits > value).double().mean((1, 2)).std(correction=0).item() for value in thresholds]
        rows, columns = logits.shape[1:]
        return Curve((rows, columns), len(logits), tuple(thresholds.tolist()), tuple(round(s, 4) for s in shares))

    @property
    def side(self) -> float:
        """The cells per side of a square with as many."""
        return (self.cells[0] * self.cells[1]) ** 0.5


def curve_for(curves: Sequence[Curve], cells: tuple[int, int]) -> Curve:
    """Return the curve of this grid, between those of a smaller and a larger, or the nearest; raise without any."""
    if not curves:
        raise ValueError("the gate has not been calibrated; call msvit.calibrate(model, images, budget) first")
    side = (cells[0] * cells[1]) ** 0.5
    smaller = max((c for c in curves if c.side <= side), key=lambda c: c.side, default=None)
    larger = min((c for c in curves if c.side >= side), key=lambda c: c.side, default=None)
    if smaller is None or larger is None or smaller.side == larger.side:
        nearest = smaller or larger
        assert nearest is not None, "there are curves"
        return nearest
    weight = (side - smaller.side) / (larger.side - smaller.side)

    def between(name: str) -> tuple[float, ...]:
        low, high = (np.array(getattr(curve, name)) for curve in (smaller, larger))
        return tuple((low + weight * (high - low)).tolist())

    return Curve(cells, min(smaller.num_images, larger.num_images), between("thresholds"), between("spread"))
