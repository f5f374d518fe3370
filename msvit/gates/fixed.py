"""Gates that do not depend on the image: baselines, and the two ends of the scale."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from msvit.checks import check_int
from msvit.gates.base import Gate, check_share, setting
from msvit.gates.ranking import top_num, top_share
from msvit.shapes import Float
from msvit.types import GateOutput


class AllFine(Gate):
    """A gate with every cell fine: the host itself."""

    def forward(self, image: Tensor) -> GateOutput:
        cells = self.cells(image)
        return GateOutput.from_mask(image.new_ones(image.shape[0], *cells))


class AllCoarse(Gate):
    """A gate with every cell coarse: the host's weights on the coarse grid."""

    def forward(self, image: Tensor) -> GateOutput:
        cells = self.cells(image)
        return GateOutput.from_mask(image.new_zeros(image.shape[0], *cells))


class ScoreGate(Gate):
    """A gate without weights that ranks cells by `scores`."""

    share: Any  # of fine cells

    def forward(self, image: Tensor) -> GateOutput:
        return GateOutput.from_mask(top_share(self.scores(image), self.share).to(image.dtype))

    def decide_num(self, image: Tensor, num_fine: int) -> GateOutput:
        return GateOutput.from_mask(top_num(self.scores(image), num_fine).to(image.dtype))


class DiscGate(ScoreGate):
    """A gate, fine in a centred disc (or ellipse) of `share` of the cells: the paper's oracle (section 4.3.2)."""

    def __init__(self, coarse: int, share: float = 0.3) -> None:
        super().__init__(coarse)
        self.share = share

    share = setting("share", check_share)

    def scores(self, image: Tensor) -> Tensor:
        distance = centre_distance(*self.cells(image)).to(image.device)
        return -distance.expand(image.shape[0], -1, -1)


class RandomGate(ScoreGate):
    """A gate with a random `share` of each image's cells fine: a new draw each time in training, else one by `seed`."""

    def __init__(self, coarse: int, share: float = 0.3, seed: int = 0) -> None:
        super().__init__(coarse)
        self.share, self.seed = share, seed

    share = setting("share", check_share)
    seed = setting("seed", partial(check_int, at_least=-(2**63), at_most=2**63 - 1))

    def scores(self, image: Tensor) -> Tensor:
        cells = self.cells(image)
        generator = None if self.training else torch.Generator().manual_seed(self.seed)
        return torch.rand(image.shape[0], *cells, generator=generator).to(image.device)


def centre_distance(rows: int, columns: int) -> Float[Tensor, "{rows} {columns}"]:
    """Return each cell's distance to the centre, rows and columns scaled to [-1, 1]: 1 in the middle of a border."""
    y = (torch.arange(rows) + 0.5) * 2 / rows - 1
    x = (torch.arange(columns) + 0.5) * 2 / columns - 1
    return torch.hypot(y[:, None], x[None, :])
