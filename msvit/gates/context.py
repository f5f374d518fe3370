"""A gate with context: a small convolutional net on a reduced image, invariant to brightness and contrast."""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.checks import check_int, check_weights
from msvit.execution.fused import has_hooks, kernels
from msvit.gates.logits import START_LOGIT, LogitGate, check_table, resized

POOLED = 8  # a cell is pooled to 8 x 8 before the first layer
KERNEL = 5  # cells by cells, of the depthwise convolutions
MAX_CELLS_BY_PRODUCT = 64  # cells of an image up to which these are products of matrices in compiled training
FAST_MULTIPLE = 8  # of channels: for multiples of it convolutions and products are fast


class ContextGate(LogitGate):
    """Strided convolutions down to one feature per cell, then depthwise blocks over neighbouring cells.

    Its input is the mean and the standard deviation of pooled pixels, normalised by the mean and deviation of the
    image, and the first filters are followed by an absolute value: a darker copy and a negative of an image get the
    same decisions. Not the paper's, whose gate sees each cell on its own. 0.015 GMACs for 224 px.
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

    def has_features(self, image: Tensor) -> bool:
        side = self.coarse // POOLED
        kind = type(self)
        own = kind.logits is ContextGate.logits and kind.logits_of_statistics is ContextGate.logits_of_statistics
        fits = own and self.coarse % POOLED == 0 and side & (side - 1) == 0
        return fits and self.runs_kernels(image) and image.dtype is not torch.float64

    def features(
        self, image: Tensor, rows: int, columns: int, address: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Mean and variance of pooled pixels."""
        return tuple(kernels.pool_moments(image, self._scale, self._shift, self.coarse // POOLED, address))

    def logits_of(self, features: tuple[Tensor, ...], rows: int, columns: int) -> Tensor:
        mean, variance = features
        if self.is_half_inference(self.stem.weight) and self._fits_kernels(mean):
            return self._logits_by_kernels(mean, variance, rows, columns)
        return self.logits_of_statistics(*standardize(mean, variance), rows, columns)

    def _fits_kernels(self, mean: Tensor) -> bool:
        layers = [self.stem, *(layer for layer in self.downsample if isinstance(layer, nn.Conv2d))]
        plain = len(self.blocks) > 0 and all(type(part) in PLAIN_PARTS for part in self.modules() if part is not self)
        return plain and bool(kernels.fits_context_gate(mean, tuple(layer.out_channels for layer in layers)))

    def _logits_by_kernels(self, mean: Tensor, variance: Tensor, rows: int, columns: int) -> Tensor:
        first, second = (layer for layer in self.downsample if isinstance(layer, nn.Conv2d))
        filters = [layer.weight.permute(2, 3, 1, 0).contiguous() for layer in (first, second)]
        x, deviation = kernels.stem(mean, variance, self.stem.weight)
        x = kernels.downsample(x, deviation, filters[0], first.bias, None, gelu=True)
        x = kernels.downsample(x, None, filters[1], second.bias, resized(self.position, rows, columns), gelu=False)
        for block in self.blocks[:-1]:
            x = kernels.mix_cells(x, *block.weights(), [], 0.0)
        last = [self.norm.weight, self.norm.bias, self.head.weight, self.head.bias]
        return kernels.mix_cells(x, *self.blocks[-1].weights(), last, self.norm.eps)

    def logits(self, image: Tensor, rows: int, columns: int) -> Tensor:
        return self.logits_of_statistics(*pooled_statistics(image, (POOLED * rows, POOLED * columns)), rows, columns)

    def logits_of_statistics(self, mean: Tensor, std: Tensor, rows: int, columns: int) -> Tensor:
        mean, std = mean.to(self.stem.weight.dtype), F.avg_pool2d(std.to(self.stem.weight.dtype), 2)
        if is_compiled_training(mean) and self._has_plain_convolutions():
            layers: Any = self.downsample
            first, gelu, second = layers
            x = halve_by_product(mean, self.stem.weight).abs()
            x = convolve_aligned(torch.cat([x, std.to(x.dtype)], 1), first.weight, first.bias)
            x = second(gelu(x))
        else:
            x = self.downsample(torch.cat([self.stem(mean).abs(), std], 1))
        x = x + resized(self.position, rows, columns)  # (b, width, hc, wc)
        for block in self.blocks:
            x = block(x)
        return self.head_logits(self.norm(x.permute(0, 2, 3, 1)))

    def _has_plain_convolutions(self) -> bool:
        """Whether the first two may run in another form: nobody has replaced them or hooked into them."""
        if type(self.downsample) is not nn.Sequential or self.stem.bias is not None:
            return False
        hooked = any(map(has_hooks, (self.stem, self.downsample, self.downsample[0])))
        return type(self.stem) is type(self.downsample[0]) is nn.Conv2d and not hooked

    def num_macs(self, num_cells: int) -> int:
        weights = [p for p in self.parameters() if p.ndim in (2, 4) and p is not self.position]
        outputs = [POOLED**2 // 4, POOLED**2 // 16, *[1] * len(weights)]  # of the first layers, per cell
        return num_cells * sum(num * prod(weight.shape) for num, weight in zip(outputs, weights, strict=False))


class MixerBlock(nn.Module):
    """A depthwise convolution over neighbouring cells and an MLP per cell, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, KERNEL, padding=KERNEL // 2, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.mlp = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.mix(x)))

    def mix(self, x: Tensor) -> Tensor:
        """The depthwise convolution; compiled for training on a GPU as a product of matrices, where cells are few."""
        if x.shape[2] * x.shape[3] <= MAX_CELLS_BY_PRODUCT and is_compiled_training(x):
            return depthwise_by_product(x, self.depthwise.weight, self.depthwise.bias)
        return self.depthwise(x)

    def weights(self) -> tuple[Tensor, list[Tensor], float]:
        """For `kernels.mix_cells`."""
        (depthwise, bias), norm = self.depthwise.parameters(), self.norm.parameters()
        mlp = [weight.flatten(1) if weight.ndim > 1 else weight for weight in self.mlp.parameters()]
        return depthwise[:, 0].permute(1, 2, 0).contiguous(), [bias, *norm, *mlp], self.norm.eps


CONTAINERS = (nn.Sequential, nn.ModuleList, MixerBlock)
PLAIN_PARTS = (*CONTAINERS, nn.Conv2d, nn.GELU, nn.GroupNorm, nn.LayerNorm, nn.Linear)  # which kernels replace


def is_compiled_training(x: Tensor) -> bool:
    """Where other forms of convolutions are faster than cuDNN's, of which some need copies of all they read."""
    return x.is_cuda and torch.compiler.is_compiling() and torch.is_grad_enabled()


def halve_by_product(x: Tensor, weight: Tensor) -> Tensor:
    """F.conv2d(x, weight, stride=2, padding=1) for 3 x 3 filters and even sides, as a product with all that is read."""
    height, width = x.shape[2:]
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 0, 1, 0))  # (b, h + 1, w + 1, c)
    read = [padded[:, i : i + height : 2, j : j + width : 2] for i in range(3) for j in range(3)]
    filters = weight.permute(0, 2, 3, 1).flatten(1)
    spare = (0, -filters.shape[1] % FAST_MULTIPLE)
    return F.linear(F.pad(torch.cat(read, -1), spare), F.pad(filters, spare)).permute(0, 3, 1, 2)


def convolve_aligned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.conv2d(x, weight, bias, stride=2, padding=1) with channels of zeros in addition, channels last."""
    spare = (0, 0, 0, 0, 0, -x.shape[1] % FAST_MULTIPLE)
    x, weight = (F.pad(t, spare).contiguous(memory_format=torch.channels_last) for t in (x, weight))
    return F.conv2d(x, weight, bias, stride=2, padding=1)


def depthwise_by_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.conv2d(x, weight, bias, padding=side // 2, groups=channels) for a weight (channels, 1, side, side).

    Every cell gets a weighted sum of all cells. On a GPU that is faster than the gradients of a convolution.
    """
    rows, columns, side = *x.shape[2:], weight.shape[-1]
    index = torch.arange(rows * columns, device=x.device)
    row, column = index // columns, index % columns
    down, right = (at[:, None] - at + side // 2 for at in (row, column))  # from the cell that reads, (read, reads)
    inside = (down >= 0) & (down < side) & (right >= 0) & (right < side)
    tap = torch.where(inside, side * down + right, -1)
    taps = torch.arange(side**2, device=x.device)[:, None] == tap.flatten()  # (side side, cells cells)
    matrix = (weight.flatten(1) @ taps.to(weight.dtype)).unflatten(1, tap.shape)  # (channels, read, reads)
    y = torch.bmm(x.flatten(2).transpose(0, 1), matrix.to(x.dtype)).transpose(0, 1).unflatten(2, (rows, columns))
    return y if bias is None else y + bias.to(y.dtype)[:, None, None]


def pooled_statistics(image: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Mean (b, c, *size) and deviation (b, 1, *size) of pooled pixels, in units of the image's own deviation.

    The image's mean is subtracted first: a constant image is then exactly 0, whatever its mean, and not the rounding
    error of its squares, which would be larger than the smallest unit.
    """
    image = image.float() if image.dtype is not torch.float64 else image
    image = image - image.mean((2, 3), keepdim=True)
    mean = F.adaptive_avg_pool2d(image, size)
    variance = (F.adaptive_avg_pool2d(image.square(), size) - mean.square()).mean(1, keepdim=True)
    return standardize(mean, variance)


def standardize(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances of pooled pixels as deviations from the image's mean, in units of its deviation."""
    centre = mean.mean((2, 3), keepdim=True)
    unit = (mean - centre).square().mean((1, 2, 3), keepdim=True).clamp(min=1e-6)
    return (mean - centre) / unit.sqrt(), (variance / unit).clamp(min=1e-6).sqrt()
