"""The base class of gates with weights: a logit for each cell, and a decision made from it."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
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
    """`logits` scores each cell; cells whose logit is over `threshold` are fine.

    In training decisions are sampled; with all parameters frozen, or in eval mode, they are deterministic. The
    threshold is a buffer: what shares the gate's tensors, such as a compiled model, has the same one.
    """

    old_names = {"look": "stem", "gather": "downsample", "think": "mlp", "answer": "head"}  # noqa: RUF012

    head: nn.Linear  # the last layer
    _threshold: Tensor

    def __init__(
        self, coarse: int, in_chans: int, temperature: float, noise: float, threshold: float, **config: Any
    ) -> None:
        self.in_chans = check_int("in_chans", in_chans, at_least=1)
        super().__init__(coarse, in_chans=self.in_chans, **config)
        self.register_buffer("_threshold", torch.zeros((), dtype=torch.float32), persistent=False)  # in `config`
        self.temperature, self.noise, self.threshold = temperature, noise, threshold

    temperature = setting("temperature", partial(check_number, above=0))
    noise = setting("noise", partial(check_number, at_least=0))

    @property
    def config(self) -> Mapping[str, Any]:
        return MappingProxyType({**super().config, "threshold": self.threshold})

    @property
    def constants(self) -> tuple[Any, ...]:
        return self.temperature, self.noise

    @property
    def threshold(self) -> float:
        return self._threshold.item()

    @threshold.setter
    @torch.no_grad()
    def threshold(self, value: float) -> None:
        self._threshold.fill_(check_number("threshold", value))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LogitGate":
        before = self._threshold
        super()._apply(fn, recurse)
        self._threshold = before.to(self._threshold.device)  # half precision would round it
        return self

    @property
    def frozen(self) -> bool:
        return not any(p.requires_grad for p in self.parameters())

    def freeze(self) -> "LogitGate":
        return self.requires_grad_(False)

    def logits(self, image: Tensor, rows: int, columns: int) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no logits; write a method that returns (b, hc, wc)")

    def forward(self, image: Tensor) -> GateOutput:
        self.cells(image)  # raises ValueError unless they divide the image
        if image.shape[1] != self.in_chans:
            raise ValueError(
                f"images have {image.shape[1]} channels, but the gate was built for {self.in_chans}; "
                f"convert them, or make a {type(self).__name__} with in_chans={image.shape[1]}"
            )
        logits = cell_logits(self, image)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        noisy = self.training and not self.frozen
        return decide(logits, self.temperature, self.noise if noisy else 0.0, self._threshold)


@compile_region
def cell_logits(gate: LogitGate, image: Tensor) -> Tensor:
    """A compiled region without the threshold: gates that differ only in that share the compiled code."""
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
