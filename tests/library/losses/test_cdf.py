"""The CDFs are right, and so are their gradients."""

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch.autograd import gradcheck

from msvit.losses import Beta, Normal, RelaxedBernoulli, normal_cdf, relaxed_bernoulli_cdf

INSIDE = torch.tensor([0.002, 0.03, 0.2, 0.5, 0.77, 0.99, 0.9985], dtype=torch.float64)


def test_normal_cdf_is_scipys():
    x = torch.linspace(-1, 2, 301, dtype=torch.float64)
    np.testing.assert_allclose(normal_cdf(x, 0.4, 0.1), stats.norm.cdf(x, 0.4, 0.1), rtol=0, atol=1e-12)
    single = normal_cdf(x.float(), 0.4, 0.1)
    np.testing.assert_allclose(single, stats.norm.cdf(x.float(), 0.4, 0.1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mean", [0.1, 0.25, 0.6])
def test_the_beta_prior_is_scipys_with_its_density_as_gradient(mean):
    x = torch.linspace(0.002, 0.998, 201, dtype=torch.float64).requires_grad_()
    cdf = Beta().cdf(x, mean)
    (density,) = torch.autograd.grad(cdf.sum(), x)
    expected = stats.beta(mean, 1 - mean)
    np.testing.assert_allclose(cdf.detach(), expected.cdf(x.detach()), rtol=0, atol=2e-5)
    np.testing.assert_allclose(density, expected.pdf(x.detach()), rtol=1e-3)


def test_the_relaxed_bernoulli_prior_is_a_squashed_logistic_clipped_of_values_and_of_logits():
    prior, logits = RelaxedBernoulli(0.4), torch.linspace(-20, 20, 401, dtype=torch.float64)
    logistic = stats.logistic(loc=special.logit(0.3) / 0.4, scale=1 / 0.4)
    expected = logistic.cdf(special.logit(logits.sigmoid().clamp(1e-3, 1 - 1e-3).numpy()))
    np.testing.assert_allclose(prior.cdf_of_logits(logits, 0.3), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(prior.cdf(logits.sigmoid(), 0.3), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("cdf", "first", "second"), [(relaxed_bernoulli_cdf, 0.9, 1.5), (normal_cdf, 0.4, 0.2)])
def test_gradients_in_the_value_and_in_both_parameters_match_finite_differences(cdf, first, second):
    x = INSIDE.clone().requires_grad_()
    parameters = [torch.full((2, 1), p, dtype=torch.float64).requires_grad_() for p in (first, second)]
    assert gradcheck(cdf, (x, *parameters), eps=1e-6, atol=1e-7, rtol=1e-5)  # broadcast: (7,) and (2, 1)


@pytest.mark.parametrize("prior", [RelaxedBernoulli(0.3), Normal(0.2), Beta()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_finite_for_saturated_gates_and_locations(prior, dtype):
    logits = torch.tensor([-200.0, -90, -40, -15, 0, 15, 40, 90, 200], dtype=dtype).requires_grad_()
    raw = logits.detach()[:, None].clone().requires_grad_()
    value = prior.cdf(logits.sigmoid(), raw.sigmoid())  # (9, 9)
    value.sum().backward()
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    assert ((value >= 0) & (value <= 1)).all()
    assert logits.grad.isfinite().all()
    assert raw.grad.isfinite().all()
