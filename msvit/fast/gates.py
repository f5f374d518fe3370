"""Fast forms of gates: logits by Triton kernels, and convolutions as products of matrices in compiled training.

    compute_logits(gate, image)       # gate.logits, by kernels where they can compute it
    has_kernels(gate, image)          # whether they can: then they may also read the image at an address
    downsample(gate, mean, std)       # the strided convolutions of a ContextGate
    mix(depthwise, x)                 # its convolutions over neighbouring cells

A gate's `kernel_form` is the class here whose kernels compute its `logits`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.fast.find_kernels import has_hooks, kernels, runs_kernels
from msvit.fast.regions import compile_region

POOLED = 8  # a ContextGate pools a cell to 8 x 8 before the first layer
MAX_CELLS_BY_PRODUCT = 64  # cells of an image up to which a depthwise convolution is a product in compiled training
FAST_MULTIPLE = 8  # of channels: for multiples of it convolutions and products are fast
PLAIN_PARTS = (nn.Sequential, nn.ModuleList, nn.Conv2d, nn.GELU, nn.GroupNorm, nn.LayerNorm, nn.Linear)


@compile_region
def compute_logits(gate: Any, image: Tensor, address: Tensor | None = None) -> Tensor:
    """Return the logits (b, hc, wc) of images as the gate takes them, by kernels where they can compute them.

    With an address, kernels read the image that lies there when they run: one like `image`. A compiled region without
    the threshold: gates that differ only in that share the compiled code.
    """
    if address is not None or has_kernels(gate, image):
        return gate.kernel_form.logits(gate, image, address)
    return gate.logits(gate.renormalized(image))


def has_kernels(gate: Any, image: Tensor) -> bool:
    """Return whether kernels can compute the logits of such images."""
    if not runs_kernels(image) or image.requires_grad:  # none returns gradients of images
        return False
    return gate.kernel_form is not None and gate.kernel_form.fits(gate, image)


def is_half_inference(gate: Any, weight: Tensor) -> bool:
    """Return whether layers in 16 bits run without gradients: then kernels may replace them."""
    half = weight.dtype in (torch.bfloat16, torch.float16) and not torch.is_autocast_enabled(weight.device.type)
    return half and (not torch.is_grad_enabled() or gate.frozen)


class CellMLP:
    """The kernel form of a LearnedGate: all layers in one kernel."""

    @staticmethod
    def fits(gate: Any, image: Tensor) -> bool:
        """Return whether the kernel can compute the logits of such images."""
        layers = gate.linear_layers()
        if gate.cell != gate.coarse or image.dtype is not gate.stem.weight.dtype:
            return False
        if any(type(layer) is not nn.Linear for layer in layers) or not is_half_inference(gate, gate.stem.weight):
            return False
        return bool(kernels.fits_cell_mlp(image, gate.cell, tuple(layer.out_features for layer in layers)))

    @staticmethod
    def logits(gate: Any, image: Tensor, address: Tensor | None) -> Tensor:
        """Return the logits (b, hc, wc), of the images at `address` if one is given."""
        layers = [weight for layer in gate.linear_layers() for weight in (layer.weight, layer.bias)]
        position = gate.positions(image.shape[2] // gate.coarse, image.shape[3] // gate.coarse)
        return kernels.cell_mlp(image, gate._scale, gate._shift, position, layers, gate.cell, address)


class PooledMoments:
    """The kernel form of a ContextGate: moments of pooled pixels in one kernel; its layers by kernels in 16 bits."""

    @staticmethod
    def fits(gate: Any, image: Tensor) -> bool:
        """Return whether the kernel can compute the moments of such images."""
        side = gate.coarse // POOLED
        return gate.coarse % POOLED == 0 and side & (side - 1) == 0 and image.dtype is not torch.float64

    @staticmethod
    def logits(gate: Any, image: Tensor, address: Tensor | None) -> Tensor:
        """Return the logits (b, hc, wc), of the images at `address` if one is given."""
        mean, variance = kernels.pool_moments(image, gate._scale, gate._shift, gate.coarse // POOLED, address)
        if is_half_inference(gate, gate.stem.weight) and PooledMoments.fits_layers(gate, mean):
            return PooledMoments.layers(gate, mean, variance)
        return gate.logits_of_moments(mean, variance)

    @staticmethod
    def fits_layers(gate: Any, mean: Tensor) -> bool:
        """Return whether kernels can compute the layers after the moments."""
        widths = [layer.out_channels for layer in (gate.stem, *convolutions(gate))]
        kinds = [type(part) for part in gate.modules() if part is not gate]
        plain = len(gate.blocks) > 0 and all(kind in PLAIN_PARTS or "kernel" in vars(kind) for kind in kinds)
        return plain and bool(kernels.fits_context_gate(mean, tuple(widths)))

    @staticmethod
    def layers(gate: Any, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the logits (b, hc, wc) of pooled moments, by kernels."""
        first, second = convolutions(gate)
        filters = [layer.weight.permute(2, 3, 1, 0).contiguous() for layer in (first, second)]
        x, deviation = kernels.stem(mean, variance, gate.stem.weight)
        x = kernels.downsample(x, deviation, filters[0], first.bias, None, gelu=True)
        position = gate.positions(mean.shape[2] // POOLED, mean.shape[3] // POOLED)
        x = kernels.downsample(x, None, filters[1], second.bias, position, gelu=False)
        for block in gate.blocks[:-1]:
            x = kernels.mix_cells(x, *mixer_weights(block), [], 0.0)
        last = [gate.norm.weight, gate.norm.bias, gate.head.weight, gate.head.bias]
        return kernels.mix_cells(x, *mixer_weights(gate.blocks[-1]), last, gate.norm.eps)


def convolutions(gate: Any) -> list[Any]:
    """Return the strided convolutions of a ContextGate."""
    return [layer for layer in gate.downsample if isinstance(layer, nn.Conv2d)]


def mixer_weights(block: Any) -> tuple[Tensor, list[Tensor], float]:
    """Return the weights of a MixerBlock, for `kernels.mix_cells`."""
    (depthwise, bias), norm = block.depthwise.parameters(), block.norm.parameters()
    mlp = [weight.flatten(1) if weight.ndim > 1 else weight for weight in block.mlp.parameters()]
    return depthwise[:, 0].permute(1, 2, 0).contiguous(), [bias, *norm, *mlp], block.norm.eps


# In compiled training: other forms of convolutions are faster than cuDNN's, of which some need copies of all they read.


def is_compiled_training(x: Tensor) -> bool:
    """Return whether this is traced for compiled training on a GPU."""
    return x.is_cuda and torch.compiler.is_compiling() and torch.is_grad_enabled()


def downsample(gate: Any, mean: Tensor, std: Tensor) -> Tensor:
    """Run stem and downsampling of a ContextGate, (b, c, 8 hc, 8 wc) and (b, 1, 4 hc, 4 wc) -> (b, width, hc, wc)."""
    if not is_compiled_training(mean) or not has_plain_convolutions(gate):
        return gate.downsample(torch.cat([gate.stem(mean).abs(), std], 1))
    first, gelu, second = gate.downsample
    x = halve_by_product(mean, gate.stem.weight).abs()
    return second(gelu(convolve_aligned(torch.cat([x, std.to(x.dtype)], 1), first.weight, first.bias)))


def has_plain_convolutions(gate: Any) -> bool:
    """Return whether the first two may run in another form: they were not replaced, and have no hooks."""
    if type(gate.downsample) is not nn.Sequential or gate.stem.bias is not None:
        return False
    hooked = any(map(has_hooks, (gate.stem, gate.downsample, gate.downsample[0])))
    return type(gate.stem) is type(gate.downsample[0]) is nn.Conv2d and not hooked


def mix(depthwise: nn.Conv2d, x: Tensor) -> Tensor:
    """Apply the depthwise convolution; in compiled training as a product of matrices, where cells are few."""
    if x.shape[2] * x.shape[3] <= MAX_CELLS_BY_PRODUCT and is_compiled_training(x):
        return depthwise_by_product(x, depthwise.weight, depthwise.bias)
    return depthwise(x)


def halve_by_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute F.conv2d(x, weight, stride=2, padding=1) for 3 x 3 filters and even sides, as one matrix product."""
    height, width = x.shape[2:]
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 0, 1, 0))  # (b, h + 1, w + 1, c)
    read = [padded[:, i : i + height : 2, j : j + width : 2] for i in range(3) for j in range(3)]
    filters = weight.permute(0, 2, 3, 1).flatten(1)
    padding = (0, -filters.shape[1] % FAST_MULTIPLE)
    return F.linear(F.pad(torch.cat(read, -1), padding), F.pad(filters, padding)).permute(0, 3, 1, 2)


def convolve_aligned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.conv2d(x, weight, bias, stride=2, padding=1) with channels of zeros in addition, channels last."""
    padding = (0, 0, 0, 0, 0, -x.shape[1] % FAST_MULTIPLE)
    x, weight = (F.pad(t, padding).contiguous(memory_format=torch.channels_last) for t in (x, weight))
    return F.conv2d(x, weight, bias, stride=2, padding=1)


def depthwise_by_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.conv2d(x, weight, bias, padding=side // 2, groups=channels) for a weight (channels, 1, side, side).

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
