"""The paper's gate: a small MLP on the pixels of each cell (section 2.1)."""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.checks import check_int, check_weights
from msvit.fast.gates import CellMLP
from msvit.gates.logits import START_LOGIT, LogitGate, check_table


class LearnedGate(LogitGate):
    """The paper's gate: four layers on a cell's pixels, a learned position added after the first.

    `grid` is the size of the position table, (7, 7) for 224 px; other grids interpolate it. `cell` is the side
    in px that cells are resized to: one trained for 32 px cells serves coarse=28 with cell=32. 0.017 GMACs for 224 px.
    """

    kernel_form = CellMLP

    def __init__(
        self,
        coarse: int,
        grid: tuple[int, int] = (7, 7),
        in_chans: int = 3,
        widths: tuple[int, int, int] = (96, 256, 104),
        cell: int | None = None,
        temperature: float = 1.0,
        noise: float = 1.0,
        threshold: float = 0.0,
    ) -> None:
        cell = check_int("coarse", coarse, at_least=2) if cell is None else check_int("cell", cell, at_least=1)
        grid, widths = check_table(grid, widths)
        super().__init__(coarse, in_chans, temperature, noise, threshold, grid=grid, widths=widths, cell=cell)
        check_weights(in_chans * cell**2 * widths[0], "in_chans, coarse, cell and widths")
        self.cell = cell
        self.stem = nn.Linear(in_chans * cell * cell, widths[0])
        self.position = nn.Parameter(torch.zeros(1, widths[0], *grid))
        self.mlp = nn.Sequential(
            nn.GELU(), nn.Linear(widths[0], widths[1]), nn.GELU(), nn.Linear(widths[1], widths[2]), nn.GELU()
        )
        self.head = nn.Linear(widths[2], 1)
        nn.init.trunc_normal_(self.position, std=0.02)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.constant_(self.head.bias, START_LOGIT + threshold)

    def linear_layers(self) -> list[nn.Linear]:
        """Return the four linear layers, first to last."""
        return [self.stem, *(layer for layer in self.mlp if isinstance(layer, nn.Linear)), self.head]

    def logits(self, image: Tensor) -> Tensor:
        rows, columns = image.shape[2] // self.coarse, image.shape[3] // self.coarse
        if self.cell != self.coarse:
            size = (rows * self.cell, columns * self.cell)
            image = F.interpolate(image, size=size, mode="bilinear", align_corners=False)
        pixels = image.unflatten(3, (columns, self.cell)).unflatten(2, (rows, self.cell))  # (b, c, hc, s, wc, s)
        pixels = pixels.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (b, hc, wc, c s s)
        positions = self.positions(rows, columns)[0].permute(1, 2, 0)  # (hc, wc, width)
        hidden = self.stem(pixels.to(self.stem.weight.dtype)) + positions
        return self.apply_head(self.mlp(hidden))

    def num_macs(self, num_cells: int) -> int:
        return num_cells * sum(prod(layer.weight.shape) for layer in self.linear_layers())
