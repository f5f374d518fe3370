"""Gates without weights that score the pixels of each cell: entropy, gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.checks import check_number
from msvit.gates.base import check_share, setting
from msvit.gates.fixed import ScoreGate
from msvit.shapes import Float
from msvit.types import GateOutput


class SaliencyGate(ScoreGate):
    """Base class of gates by scores: the `share` of each image that scores highest is fine, or all over `threshold`."""

    def __init__(self, coarse: int, share: float | None = None, threshold: float | None = None) -> None:
        if (share is None) == (threshold is None):
            raise ValueError(
                f"share is {share} and threshold is {threshold}, but exactly one of them decides; "
                f"pass share=0.3 for a fixed budget or threshold=... for one that follows the image"
            )
        super().__init__(coarse)
        self.share, self.threshold = share, threshold

    share = setting("share", lambda name, value: None if value is None else check_share(name, value))
    threshold = setting("threshold", lambda name, value: None if value is None else check_number(name, value))

    def score(self, grey: Float[Tensor, "b h w"]) -> Float[Tensor, "b hc wc"]:
        """Return the score of each cell of grey images from 0 to 1."""
        raise TypeError(f"{type(self).__name__} has no score; write one that returns (b, hc, wc)")

    def scores(self, image: Tensor) -> Tensor:
        """Score the cells of the images as grey ones, scaled to [0, 1]."""
        self.cells(image)
        grey = image.detach().float().mean(1).nan_to_num()  # (b, h, w)
        low, high = grey.amin((1, 2), keepdim=True), grey.amax((1, 2), keepdim=True)
        return self.score((grey - low) / (high - low).clamp(min=1e-6))  # whatever the normalisation: [0, 1]

    def forward(self, image: Tensor) -> GateOutput:
        if self.threshold is None:
            return super().forward(image)
        return GateOutput.from_mask((self.scores(image) > self.threshold).to(image.dtype))


class EntropyGate(SaliencyGate):
    """A gate by the entropy of a cell's grey levels in bits, 32 levels, so from 0 (flat) to 5."""

    levels = 32

    def score(self, grey: Float[Tensor, "b h w"]) -> Float[Tensor, "b hc wc"]:
        level = (grey * self.levels).long().clamp(max=self.levels - 1)
        cell = level.unfold(1, self.coarse, self.coarse).unfold(2, self.coarse, self.coarse)
        cell = cell.flatten(3)  # (b, hc, wc, px)
        count = torch.zeros(*cell.shape[:3], self.levels, device=grey.device)
        count.scatter_add_(3, cell, torch.ones_like(cell, dtype=count.dtype))
        p = count / cell.shape[3]
        return -torch.xlogy(p, p).sum(-1) / torch.log(torch.tensor(2.0))


class GradientGate(SaliencyGate):
    """A gate by the mean absolute difference between neighbouring pixels of a cell."""

    def score(self, grey: Float[Tensor, "b h w"]) -> Float[Tensor, "b hc wc"]:
        dy = F.pad(grey.diff(dim=1).abs(), (0, 0, 0, 1))
        dx = F.pad(grey.diff(dim=2).abs(), (0, 1))
        return F.avg_pool2d((dy + dx)[:, None], self.coarse)[:, 0]
