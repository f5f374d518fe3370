"""Gates that do not depend on the image: baselines, and the two ends of the scale."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from msvit.checks import check_int
from msvit.gates.base import Gate, check_share, setting
from msvit.types import GateOutput


class AllFine(Gate):
    """Every cell fine: the host itself."""

    def forward(self, image: Tensor) -> GateOutput:
        cells = self.cells(image)
        return GateOutput.from_mask(image.new_ones(image.shape[0], *cells))


class AllCoarse(Gate):
    """Every cell coarse: the host's weights on the coarse grid."""

    def forward(self, image: Tensor) -> GateOutput:
        cells = self.cells(image)
        return GateOutput.from_mask(image.new_zeros(image.shape[0], *cells))


class DiscGate(Gate):
    """Fine in a centred disc of `share` of the cells, the paper's fixed oracle (section 4.3.2).

    If the image is not square, the disc is an ellipse of the image's aspect ratio.
    """

    def __init__(self, coarse: int, share: float = 0.3) -> None:
        super().__init__(coarse)
        self.share = share

    share = setting("share", check_share)

    def forward(self, image: Tensor) -> GateOutput:
        distance = centre_distance(*self.cells(image)).to(image.device)
        mask = top_share(-distance[None], self.share).to(image.dtype)
        return GateOutput.from_mask(mask.expand(image.shape[0], -1, -1).contiguous())


class RandomGate(Gate):
    """`share` of the cells of each image fine, at random: a new draw each time in training, one by `seed` otherwise."""

    def __init__(self, coarse: int, share: float = 0.3, seed: int = 0) -> None:
        super().__init__(coarse)
        self.share, self.seed = share, seed

    share = setting("share", check_share)
    seed = setting("seed", partial(check_int, at_least=-(2**63), at_most=2**63 - 1))

    def forward(self, image: Tensor) -> GateOutput:
        cells = self.cells(image)
        generator = None if self.training else torch.Generator().manual_seed(self.seed)
        score = torch.rand(image.shape[0], *cells, generator=generator)
        mask = top_share(score.to(image.device), self.share)
        return GateOutput.from_mask(mask.to(image.dtype))


def centre_distance(rows: int, columns: int) -> Float[Tensor, "{rows} {columns}"]:
    """Distance of each cell to the centre, rows and columns scaled to [-1, 1]: 1 at the middle of every border."""
    y = (torch.arange(rows) + 0.5) * 2 / rows - 1
    x = (torch.arange(columns) + 0.5) * 2 / columns - 1
    return torch.hypot(y[:, None], x[None, :])


def top_share(score: Float[Tensor, "b hc wc"], share: float) -> Float[Tensor, "b hc wc"]:
    """1 for the `share` of cells with the highest score in each image, 0 for the others. Ties go to the first cell."""
    flat = score.flatten(1)
    num = round(share * flat.shape[1])
    order = flat.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(flat).scatter(1, order[:, :num], 1.0).view_as(score)
