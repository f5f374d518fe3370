"""A gate that looks around: a small convolutional net on a reduced image, the same for light and dark."""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.checks import check_int, check_weights
from msvit.gates.logits import START_LOGIT, LogitGate, check_table, resized

SPOTS = 8  # a cell is seen as so many by so many spots
REACH = 5  # cells by cells that a block of the last stage looks at


class ContextGate(LogitGate):
    """Convolutions from spots to cells, then blocks among cells; each logit follows from the cell and its surroundings.

    A spot is the mean of its pixels and how much they differ. Colours are counted from the image's mean, in units of
    its deviation, and only the absolute values of the first filters go on: a darker copy and a negative of an image
    get the same decisions. Not the paper's: its gate sees each cell on its own. 0.015 GMACs for 224 px.
    """

    def __init__(
        self,
        coarse: int,
        grid: tuple[int, int] = (7, 7),
        in_chans: int = 3,
        widths: tuple[int, int, int] = (32, 64, 128),
        depth: int = 2,
        temperature: float = 1.0,
        noise: float = 1.0,
        threshold: float = 0.0,
    ) -> None:
        grid, widths = check_table(grid, widths)
        depth = check_int("depth", depth, at_least=0, at_most=1000)
        super().__init__(coarse, in_chans, temperature, noise, threshold, grid=grid, widths=widths, depth=depth)
        check_weights(9 * in_chans * widths[0], "in_chans and widths")
        self.look = nn.Conv2d(in_chans, widths[0], 3, stride=2, padding=1, bias=False)
        self.gather = nn.Sequential(
            nn.Conv2d(widths[0] + 1, widths[1], 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(widths[1], widths[2], 3, stride=2, padding=1),
        )  # fmt: skip
        self.position = nn.Parameter(torch.zeros(1, widths[2], *grid))
        self.blocks = nn.ModuleList(MixerBlock(widths[2]) for _ in range(depth))
        self.norm = nn.LayerNorm(widths[2])
        self.answer = nn.Linear(widths[2], 1)
        nn.init.trunc_normal_(self.position, std=0.02)
        nn.init.trunc_normal_(self.answer.weight, std=0.02)
        nn.init.constant_(self.answer.bias, START_LOGIT + threshold)

    def logits(self, image: Tensor, rows: int, columns: int) -> Tensor:
        colour, rough = spots(image, (SPOTS * rows, SPOTS * columns))
        weights = self.look.weight.dtype
        x = torch.cat([self.look(colour.to(weights)).abs(), F.avg_pool2d(rough.to(weights), 2)], 1)
        x = self.gather(x) + resized(self.position, rows, columns)  # (b, width, hc, wc)
        for block in self.blocks:
            x = block(x)
        return self.answer(self.norm(x.permute(0, 2, 3, 1)))[..., 0]

    def num_macs(self, num_cells: int) -> int:
        weights = [p for p in self.parameters() if p.ndim in (2, 4) and p is not self.position]
        outputs = [SPOTS**2 // 4, SPOTS**2 // 16, *[1] * len(weights)]  # of the first layers, for each cell
        return num_cells * sum(num * prod(weight.shape) for num, weight in zip(outputs, weights, strict=False))


class MixerBlock(nn.Module):
    """A depthwise convolution over neighbouring cells and an MLP for each, added to what was there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.around = nn.Conv2d(width, width, REACH, padding=REACH // 2, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.mlp = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.around(x)))


def spots(image: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Mean colour (b, c, *size) and deviation (b, 1, *size) of an image's spots, in units of the image's own.

    The mean colour goes first: what is left of a constant image is 0, whatever its colour, and not the rounding of its
    squares, which would be larger than the smallest unit.
    """
    image = image.float() if image.dtype is not torch.float64 else image
    image = image - image.mean((2, 3), keepdim=True)
    colour = F.adaptive_avg_pool2d(image, size)
    rough = (F.adaptive_avg_pool2d(image.square(), size) - colour.square()).mean(1, keepdim=True)
    middle = colour.mean((2, 3), keepdim=True)
    unit = (colour - middle).square().mean((1, 2, 3), keepdim=True).clamp(min=1e-6)
    return (colour - middle) / unit.sqrt(), (rough / unit).clamp(min=1e-6).sqrt()
