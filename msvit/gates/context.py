"""A gate with context: a small convolutional net on a reduced image, invariant to brightness and contrast."""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.checks import check_int, check_weights
from msvit.fast import gates as fast
from msvit.fast.gates import POOLED
from msvit.gates.logits import START_LOGIT, LogitGate, check_table

KERNEL = 5  # cells by cells, of the depthwise convolutions


class ContextGate(LogitGate):
    """A gate of strided convolutions down to one feature per cell, then depthwise blocks over neighbouring cells.

    Its input is the mean and the standard deviation of pooled pixels, normalised by the mean and deviation of the
    image, and the first filters are followed by an absolute value: a darker copy and a negative of an image get the
    same decisions. Not the paper's, whose gate sees each cell on its own. 0.015 GMACs for 224 px.
    """

    kernel_form = fast.PooledMoments

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
        self.stem = nn.Conv2d(in_chans, widths[0], 3, stride=2, padding=1, bias=False)
        self.downsample = nn.Sequential(
            nn.Conv2d(widths[0] + 1, widths[1], 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(widths[1], widths[2], 3, stride=2, padding=1),
        )  # fmt: skip
        self.position = nn.Parameter(torch.zeros(1, widths[2], *grid))
        self.blocks: Any = nn.ModuleList(MixerBlock(widths[2]) for _ in range(depth))
        self.norm = nn.LayerNorm(widths[2])
        self.head = nn.Linear(widths[2], 1)
        nn.init.trunc_normal_(self.position, std=0.02)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.constant_(self.head.bias, START_LOGIT + threshold)

    def logits(self, image: Tensor) -> Tensor:
        rows, columns = image.shape[2] // self.coarse, image.shape[3] // self.coarse
        return self.logits_of_moments(*pooled_moments(image, (POOLED * rows, POOLED * columns)))

    def logits_of_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Run all layers on mean (b, c, 8 hc, 8 wc) and variance (b, 1, 8 hc, 8 wc) of pooled pixels."""
        mean, std = standardize(mean, variance)
        mean, std = mean.to(self.stem.weight.dtype), F.avg_pool2d(std.to(self.stem.weight.dtype), 2)
        x = fast.downsample(self, mean, std)  # (b, width, hc, wc)
        x = x + self.positions(x.shape[2], x.shape[3])
        for block in self.blocks:
            x = block(x)
        return self.apply_head(self.norm(x.permute(0, 2, 3, 1)))

    def num_macs(self, num_cells: int) -> int:
        weights = [p for p in self.parameters() if p.ndim in (2, 4) and p is not self.position]
        outputs = [POOLED**2 // 4, POOLED**2 // 16, *[1] * len(weights)]  # of the first layers, per cell
        return num_cells * sum(num * prod(weight.shape) for num, weight in zip(outputs, weights, strict=False))


class MixerBlock(nn.Module):
    """A depthwise convolution over neighbouring cells and an MLP per cell, with a residual connection."""

    kernel = "mix_cells"  # which may replace a block of this very class

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, KERNEL, padding=KERNEL // 2, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.mlp = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Mix neighbouring cells, (b, width, hc, wc) -> (b, width, hc, wc)."""
        return x + self.mlp(self.norm(fast.mix(self.depthwise, x)))


def pooled_moments(image: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the mean (b, c, *size) of pooled pixels and their variance (b, 1, *size), averaged over channels.

    The image's mean is subtracted first: a constant image is then exactly 0, whatever its mean, and not the rounding
    error of its squares, which would be larger than the smallest unit.
    """
    image = image.float() if image.dtype is not torch.float64 else image
    image = image - image.mean((2, 3), keepdim=True)
    mean = F.adaptive_avg_pool2d(image, size)
    return mean, (F.adaptive_avg_pool2d(image.square(), size) - mean.square()).mean(1, keepdim=True)


def standardize(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and standard deviations of pooled pixels in units of the image's deviation from its mean."""
    centre = mean.mean((2, 3), keepdim=True)
    unit = (mean - centre).square().mean((1, 2, 3), keepdim=True).clamp(min=1e-6)
    return (mean - centre) / unit.sqrt(), (variance / unit).clamp(min=1e-6).sqrt()
