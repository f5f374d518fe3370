"""GELU and its derivative, as fast as memory."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def _normal(x):
    # Phi(x) and exp(-x^2 / 2). With t = 1 / (1 + p |x|), Phi(-|x|) is (a1 t + ... + a5 t^5) exp(-x^2 / 2) / 2 to 1e-7:
    # Abramowitz and Stegun 7.1.26.
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
    bell = tl.exp2(-0.7213475204444817 * x * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * poly * bell
    return tl.where(x >= 0, 1.0 - tail, tail), bell


@triton.jit
@no_type_check
def _gelu_of(x):
    share, _ = _normal(x)
    return x * share


@triton.jit
@no_type_check
def _gelu_kernel(x, y, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(y + i, _gelu_of(value).to(y.dtype.element_ty), mask=i < size)


@triton.jit
@no_type_check
def _gelu_backward_kernel(dy, x, dx, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)
    wanted = tl.load(dy + i, mask=i < size, other=0.0).to(tl.float32)
    share, bell = _normal(value)
    tl.store(dx + i, (wanted * (share + 0.3989422804014327 * value * bell)).to(dx.dtype.element_ty), mask=i < size)


GELU_BLOCK = 2048


@torch.library.custom_op("msvit::gelu", mutates_args=())
def gelu(x: Tensor) -> Tensor:
    """x Phi(x), not its tanh approximation, to 3e-7 of x."""
    x = x.contiguous()
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _gelu_kernel[(triton.cdiv(x.numel(), GELU_BLOCK),)](x, y, x.numel(), BLOCK=GELU_BLOCK, num_warps=4)
    return y


@torch.library.custom_op("msvit::gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), GELU_BLOCK),)
    with torch.cuda.device_of(x):
        _gelu_backward_kernel[grid](dy, x, dx, x.numel(), BLOCK=GELU_BLOCK, num_warps=4)
    return dx


@gelu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_gelu(ctx: Any, dy: Tensor) -> Tensor:
    return _gelu_backward(dy, *ctx.saved_tensors)


gelu.register_autograd(_differentiate_gelu, setup_context=_save_input)
