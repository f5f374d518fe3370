"""Cumulative distribution functions that gradients pass through, and the priors made of them.

    relaxed_bernoulli_cdf(x, location=0.5, temperature=0.3)
    beta_cdf(x, a, b)                            # differentiable in x, a and b; no scipy
    normal_cdf(x, mean=0.5, std=0.1)
    Beta(concentration=2.0).cdf(x, theta)        # a prior: everything but its location is fixed

All broadcast; parameters may be floats. Half-precision input is computed, and returned, in float32.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from msvit.checks import check_number, check_tensor, check_values

Values = Float[Tensor, "..."]

# The relaxed Bernoulli's density has poles at 0 and 1 for temperatures below 1; the released loss clips here.
CLIP = 1e-3
# Locations are learned: a saturated sigmoid must not make the logit infinite.
LOCATION_CLIP = 1e-6


def relaxed_bernoulli_cdf(x: Values, location: Values | float, temperature: Values | float) -> Values:
    """CDF of sigmoid((logit(location) + logistic noise) / temperature), with x clipped to [1e-3, 1 - 1e-3].

    `location` is not the mean: at temperature 0.3, location 0.3 has mean 0.31.
    """
    _check_parameter("location", location, at_least=0, at_most=1)
    _check_parameter("temperature", temperature, above=0)
    x, location, temperature = _tensors(x, location, temperature)
    x = x.clamp(CLIP, 1 - CLIP)
    return torch.sigmoid(temperature * x.logit() - location.logit(eps=LOCATION_CLIP))


def normal_cdf(x: Values, mean: Values | float, std: Values | float) -> Values:
    """CDF of the normal distribution; `std` is a standard deviation, not a variance."""
    _check_parameter("mean", mean)
    _check_parameter("std", std, above=0)
    x, mean, std = _tensors(x, mean, std)
    return torch.special.ndtr((x - mean) / std)


def beta_cdf(x: Values, a: Values | float, b: Values | float) -> Values:
    """CDF of Beta(a, b), the regularised incomplete beta function; `a` and `b` are positive.

    Computed in float64, to about 1e-9 for a, b in [0.05, 50]. The density, which is the gradient in x and has
    poles at 0 and 1 for a < 1 and b < 1, is evaluated no nearer to them than 1e-12, so gradients stay finite.
    """
    _check_parameter("a", a, above=0)
    _check_parameter("b", b, above=0)
    x, a, b = _tensors(x, a, b)
    return _BetaCDF.apply(*torch.broadcast_tensors(x.double(), a.double(), b.double())).to(x.dtype)


class _BetaCDF(torch.autograd.Function):
    """Keeps three numbers per value for the backward pass; autograd would keep every quadrature node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        value, by_a, by_b = _integrate(x, a, b, slopes=any(ctx.needs_input_grad[1:]))
        inside = x.clamp(1e-12, 1 - 1e-12)
        density = torch.exp((a - 1) * inside.log() + (b - 1) * torch.log1p(-inside) - _log_beta(a, b))
        ctx.save_for_backward(density, by_a, by_b)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if slope is None else grad * slope for slope in ctx.saved_tensors)


def _integrate(x: Tensor, a: Tensor, b: Tensor, slopes: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The CDF and its derivatives in a and in b, by double-exponential quadrature.

    With t = sigmoid(s) the integrand is sigmoid(s)^p * sigmoid(-s)^q, s < logit(x). If x is below the mean
    it falls monotonically away from there; on the far side of the mean we integrate the other tail instead.
    s = logit(x) - exp(w - exp(-w)) / rate then makes it fall doubly exponentially in w, both ways.
    """
    inside = x.clamp(1e-300, 1 - 2**-53)
    far = inside * (a + b) > a
    p, q = torch.where(far, b, a), torch.where(far, a, b)
    y = torch.where(far, 1 - inside, inside)
    end = torch.where(far, -1.0, 1.0) * (inside.log() - torch.log1p(-inside))
    # From slope and curvature of the log integrand at its end: how fast it falls.
    rate = p - (p + q) * y + ((p + q) * y * (1 - y)).sqrt()

    step = 0.08
    w = torch.arange(-3.5, 6.5, step, dtype=x.dtype, device=x.device)
    reach = torch.exp(w - torch.exp(-w))
    weight = step * reach * (1 + torch.exp(-w))
    s = end[..., None] - reach / rate[..., None]  # (..., nodes)
    log_t = logsigmoid(s)
    log_f = (p + q)[..., None] * log_t - q[..., None] * s - (_log_beta(p, q) + rate.log())[..., None]
    f = weight * log_f.exp()
    tail = f.sum(-1)

    at_end = (x <= 0) | (x >= 1)
    value = torch.where(at_end, x.clamp(0, 1), torch.where(far, 1 - tail, tail))
    if not slopes:
        return value, None, None
    common = torch.digamma(p + q)
    by_p = (f * log_t).sum(-1) - tail * (torch.digamma(p) - common)
    by_q = (f * (log_t - s)).sum(-1) - tail * (torch.digamma(q) - common)
    by_a = torch.where(far, -by_q, by_p).masked_fill(at_end, 0)
    by_b = torch.where(far, -by_p, by_q).masked_fill(at_end, 0)
    return value, by_a, by_b


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


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
    """Distributions on [0, 1] with one free location, which a loss sets (target) or learns (theta)."""

    def cdf(self, x: Values, location: Values | float) -> Values: ...


@dataclass(frozen=True)
class RelaxedBernoulli:
    """The paper's prior: nearly binary for small temperatures. Its location is not its mean."""

    temperature: float = 0.3

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, above=0, example=0.3)

    def cdf(self, x: Values, location: Values | float) -> Values:
        return relaxed_bernoulli_cdf(x, location, self.temperature)


@dataclass(frozen=True)
class Beta:
    """Beta(location * c, (1 - location) * c): its location, kept in [1e-3, 1 - 1e-3], is its mean."""

    concentration: float = 1.0

    def __post_init__(self) -> None:
        check_number("concentration", self.concentration, above=0, example=0.3)

    def cdf(self, x: Values, location: Values | float) -> Values:
        _check_parameter("location", location, at_least=0, at_most=1)
        x, mean = _tensors(x, location)
        mean = mean.clamp(CLIP, 1 - CLIP)
        return beta_cdf(x, mean * self.concentration, (1 - mean) * self.concentration)


@dataclass(frozen=True)
class Normal:
    """A bell around its location; also the hyperprior of GBaS."""

    std: float = 0.1

    def __post_init__(self) -> None:
        check_number("std", self.std, above=0, example=0.3)

    def cdf(self, x: Values, location: Values | float) -> Values:
        return normal_cdf(x, location, self.std)


def _check_parameter(name: str, value: Any, **bounds: Any) -> None:
    """A number, or a float tensor of numbers, whose values are read on a CPU only."""
    if not isinstance(value, Tensor):
        check_number(name, value, **bounds)
        return
    check_tensor(name, value)
    check_values(name, value, **bounds)
