"""Layers that compute the same by kernels of our own, on a GPU."""

from typing import TypeVar

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from torch import Tensor, nn

from msvit.fast.find_kernels import has_hooks, kernels, runs_kernels

HALVES = (torch.bfloat16, torch.float16)


Layer = TypeVar("Layer", bound=nn.Module)


def as_class(layer: nn.Module, kind: type[Layer]) -> Layer:
    """Return a layer of another class with the same weights and settings."""
    made = kind.__new__(kind)
    made.__dict__.update(layer.__dict__)
    return made


class FastGELU(nn.GELU):
    """An nn.GELU by our kernel, which takes half the time of a compiled one."""

    stands_for = nn.GELU  # the class that is written when a model is saved

    def forward(self, input: Tensor) -> Tensor:
        """Return GELU of the input, by the kernel where it can run."""
        fused = runs_kernels(input) and input.dtype is not torch.float64
        return kernels.gelu(input) if fused else F.gelu(input)


class FastLinear(nn.Linear):
    """An nn.Linear whose bias gets its gradient by our kernel, in training with weights in 16 bits."""

    stands_for = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output; in training the bias gets its gradient by the kernel where it can run."""
        needs_grad = self.bias is not None and self.bias.requires_grad and torch.is_grad_enabled()
        if not needs_grad or not in_half(self) or input.ndim != 2 or not runs_kernels(input):
            return super().forward(input)
        return kernels.linear(input.to(self.weight.dtype), self.weight, self.bias)


def in_half(layer: nn.Linear) -> bool:
    """Return whether weight and bias are of one dtype of 16 bits, which autocast would not change."""
    dtype = layer.weight.dtype
    if layer.bias is None or layer.bias.dtype is not dtype or dtype not in HALVES:
        return False
    return not torch.is_autocast_enabled("cuda") or torch.get_autocast_dtype("cuda") is dtype


def is_gelu(module: nn.Module) -> bool:
    """Return whether a module is exactly nn.GELU, not the tanh approximation."""
    return type(module) is nn.GELU and module.approximate == "none"


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is exactly a linear layer: no subclass of other packages."""
    return type(module) in (nn.Linear, FastLinear)


def has_plain_bias(module: nn.Module) -> bool:
    """Return whether it is a linear layer whose bias can be added elsewhere: no hook reads its output."""
    return is_linear(module) and module.bias is not None and not has_hooks(module)


def is_plain_norm(norm: nn.Module) -> bool:
    """Return whether a module is exactly a LayerNorm with weight and bias."""
    return type(norm) in (nn.LayerNorm, LayerNorm) and norm.weight is not None and norm.bias is not None
