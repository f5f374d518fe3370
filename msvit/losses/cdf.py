"""Cumulative distribution functions that gradients pass through, and the priors made of them.

    relaxed_bernoulli_cdf(x, location=0.5, temperature=0.3)
    normal_cdf(x, mean=0.5, std=0.1)
    RelaxedBernoulli(temperature=0.3).cdf(x, theta)                  # a prior: everything but its location is fixed
    RelaxedBernoulli(temperature=0.3).cdf_of_logits(logits, theta)   # at sigmoid(logits), also where that rounds to 1

All broadcast; parameters may be floats. Half-precision input is computed, and returned, in float32.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from msvit.checks import check_number, check_tensor, check_values
from msvit.shapes import Float

Values = Float[Tensor, "..."]

# The relaxed Bernoulli's density has poles at 0 and 1 for temperatures below 1; the released loss clips here.
CLIP = 1e-3
MAX_LOGIT = math.log((1 - CLIP) / CLIP)
NODES = 64  # of the midpoint rule for a Beta: its error is about 1e-5
# Locations are learned: a saturated sigmoid must not make the logit infinite.
LOCATION_CLIP = 1e-6


def relaxed_bernoulli_cdf(x: Values, location: Values | float, temperature: Values | float) -> Values:
    """Compute the CDF of sigmoid((logit(location) + logistic noise) / temperature), x clipped to [1e-3, 1 - 1e-3].

    `location` is not the mean: at temperature 0.3, location 0.3 has mean 0.31. Beyond the clip the gradient is that at
    the clip where it leads back, and 0 where it leads further out; it is 0, too, where x rounded to 0 or 1.
    """
    return relaxed_bernoulli_cdf_of_logits(_finite_logits(x), location, temperature)


def relaxed_bernoulli_cdf_of_logits(logits: Values, location: Values | float, temperature: Values | float) -> Values:
    """Compute `relaxed_bernoulli_cdf` at sigmoid(logits): its gradient does not vanish where the sigmoid is 1."""
    _check_parameter("location", location, at_least=0, at_most=1)
    _check_parameter("temperature", temperature, above=0)
    logits, location, temperature = _tensors(logits, location, temperature)
    return torch.sigmoid(temperature * _Clip.apply(logits) - location.logit(eps=LOCATION_CLIP))


def _finite_logits(x: Values) -> Values:
    check_tensor("x", x)
    smallest = torch.finfo(x.dtype).smallest_normal  # the gradient, about 1 / x, must be a number of the same type
    (x,) = _tensors(x)
    return x.clamp(smallest, 1 - torch.finfo(x.dtype).eps / 2).logit()


class _Clip(torch.autograd.Function):
    """Clip logits to +-MAX_LOGIT. Beyond, gradients pass whose descent leads back, and those that lead out do not.

    A plain clip has no gradient there: a gate that has once overshot would stay. If all gradients passed, the share of
    the prior that lies beyond the clip (27 % for location 0.25 and temperature 0.3) would push logits out for ever.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.clamp(-MAX_LOGIT, MAX_LOGIT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        outwards = (logits.abs() > MAX_LOGIT) & (logits * grad < 0)
        return grad.masked_fill(outwards, 0.0)


def normal_cdf(x: Values, mean: Values | float, std: Values | float) -> Values:
    """Compute the CDF of the normal distribution; `std` is a standard deviation, not a variance."""
    _check_parameter("mean", mean)
    _check_parameter("std", std, above=0)
    x, mean, std = _tensors(x, mean, std)
    return torch.special.ndtr((x - mean) / std)


def _tensors(x: Tensor, *parameters: Tensor | float) -> list[Tensor]:
    """x and its parameters in one dtype, at least float32: 1 - 1e-3 rounds to 1 in bfloat16."""
    check_tensor("x", x)
    # new_full fills on the device; torch.tensor would copy from the host at every step.
    every = [x, *(p if isinstance(p, Tensor) else x.new_full((), p, dtype=torch.float64) for p in parameters)]
    dtype = torch.float32
    for given in (x, *(p for p in parameters if isinstance(p, Tensor))):
        dtype = torch.promote_types(dtype, given.dtype)
    return [tensor.to(dtype) for tensor in every]


@runtime_checkable
class Prior(Protocol):
    """Distributions on [0, 1] with one free location; they may also have `cdf_of_logits(logits, location)`."""

    def cdf(self, x: Values, location: Values | float) -> Values:
        """Compute the CDF at x."""


@dataclass(frozen=True)
class RelaxedBernoulli:
    """The paper's prior: nearly binary for small temperatures. Its location is not its mean."""

    temperature: float = 0.3

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, above=0, example=0.3)

    def cdf(self, x: Values, location: Values | float) -> Values:
        return relaxed_bernoulli_cdf(x, location, self.temperature)

    def cdf_of_logits(self, logits: Values, location: Values | float) -> Values:
        return relaxed_bernoulli_cdf_of_logits(logits, location, self.temperature)


@dataclass(frozen=True)
class Normal:
    """A normal prior around its location; also the hyperprior of GBaS."""

    std: float = 0.1

    def __post_init__(self) -> None:
        check_number("std", self.std, above=0, example=0.3)

    def cdf(self, x: Values, location: Values | float) -> Values:
        return normal_cdf(x, location, self.std)


@dataclass(frozen=True)
class Beta:
    """The prior Beta(p, 1 - p), with mean p, its location: that of the published batch shaping, which has p = 0.6.

    x is clipped as for the relaxed Bernoulli. Up to its nearer end, y = x or 1 - x, the density is integrated over u in
    [0, 1] with t = y u^(1/p): it becomes y^p / p (1 - y u^(1/p))^-p.
    """

    def cdf(self, x: Values, location: Values | float) -> Values:
        return self.cdf_of_logits(_finite_logits(x), location)

    def cdf_of_logits(self, logits: Values, location: Values | float) -> Values:
        _check_parameter("location", location, at_least=0, at_most=1)
        logits, location = _tensors(logits, location)
        x, a = torch.sigmoid(_Clip.apply(logits)), location.clamp(CLIP, 1 - CLIP)
        low = x <= 0.5
        p, y = torch.where(low, a, 1 - a), torch.where(low, x, 1 - x)
        u = (torch.arange(NODES, device=x.device, dtype=x.dtype) + 0.5) / NODES
        inside = (1 - y[..., None] * u ** (1 / p[..., None])) ** -p[..., None]  # (..., nodes)
        tail = torch.sin(math.pi * a) / math.pi * y**p / p * inside.mean(-1)
        return torch.where(low, tail, 1 - tail)


def _check_parameter(name: str, value: Any, **bounds: Any) -> None:
    """A number, or a float tensor of numbers, whose values are read on a CPU only."""
    if not isinstance(value, Tensor):
        check_number(name, value, **bounds)
        return
    check_tensor(name, value)
    check_values(name, value, **bounds)
