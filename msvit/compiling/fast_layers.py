"""Layers that compute the same by kernels of our own, on a GPU."""

from typing import TypeVar

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from torch import Tensor, nn

from msvit.execution.fused import kernels

HALVES = (torch.bfloat16, torch.float16)


Layer = TypeVar("Layer", bound=nn.Module)


def as_class(layer: nn.Module, kind: type[Layer]) -> Layer:
    """A layer of another class with the same weights and settings."""
    made = kind.__new__(kind)
    made.__dict__.update(layer.__dict__)
    return made


class FastGELU(nn.GELU):
    """nn.GELU by our kernel, which takes half the time of a compiled one."""

    stands_for = nn.GELU  # the class that is written when a model is saved

    def forward(self, input: Tensor) -> Tensor:
        fused = kernels is not None and input.is_cuda and input.dtype is not torch.float64
        return kernels.gelu(input) if fused else F.gelu(input)


class FastLinear(nn.Linear):
    """nn.Linear whose bias gets its gradient by our kernel, in training with weights in 16 bits."""

    stands_for = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        half = bias is not None and weight.dtype is bias.dtype and weight.dtype in HALVES
        if not half or not bias.requires_grad or not torch.is_grad_enabled() or not self.runs_kernels(input):
            return super().forward(input)
        if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is not weight.dtype:
            return super().forward(input)
        return kernels.linear(input.to(weight.dtype), weight, bias)

    @staticmethod
    def runs_kernels(input: Tensor) -> bool:
        return kernels is not None and input.is_cuda and input.ndim == 2


def is_gelu(module: nn.Module) -> bool:
    return type(module) is nn.GELU and module.approximate == "none"


def is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, FastLinear)


def is_plain_norm(norm: nn.Module) -> bool:
    return type(norm) in (nn.LayerNorm, LayerNorm) and norm.weight is not None and norm.bias is not None
