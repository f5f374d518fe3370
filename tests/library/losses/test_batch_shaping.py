"""What the gate losses of the paper reward, and that the CDFs of their priors are right."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch.autograd import gradcheck

from msvit.losses import (
    L0,
    LOSSES,
    BatchShaping,
    Beta,
    FlatBatchShaping,
    GeneralizedBatchShaping,
    Normal,
    RelaxedBernoulli,
    normal_cdf,
    relaxed_bernoulli_cdf,
)

PRIORS = [RelaxedBernoulli(temperature=0.3), RelaxedBernoulli(temperature=2.0), Normal(std=0.1)]
SHAPING = [BatchShaping, FlatBatchShaping, GeneralizedBatchShaping]
GRID = (2, 3)


def make(loss, target=0.5, prior=PRIORS[0]):
    """Any of the losses for GRID, in float64, GBaS starting at the target."""
    if loss is GeneralizedBatchShaping:
        return loss(target, grid=GRID, center=False, prior=prior).double()
    return loss(target) if loss is L0 else loss(target, prior=prior)


def draw(prior, location, num=400):
    """(num, *GRID) samples of `prior`, every position on its own."""
    torch.manual_seed(0)
    u = torch.rand(num, *GRID, dtype=torch.float64)
    if isinstance(prior, RelaxedBernoulli):
        return torch.sigmoid((torch.tensor(location).logit() + u.logit()) / prior.temperature)
    return (location + prior.std * torch.special.ndtri(u)).clamp(0, 1)


@pytest.mark.parametrize("loss", SHAPING)
@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_samples_of_the_prior_score_lower_than_any_others(loss, prior):
    score = make(loss, target=0.3, prior=prior)
    own = score(draw(prior, 0.3))
    for other in PRIORS:
        for location in (0.3, 0.6):
            if (other, location) != (prior, 0.3):
                assert own < score(draw(other, location)) - 1e-3, f"{other} at {location}"


class Uniform:
    """A prior of one's own: its CDF is x, whatever the location."""

    def cdf(self, x, location):
        return x


def test_the_loss_is_the_mean_squared_difference_to_ranks_over_n_plus_one():
    values, prior = torch.tensor([[0.9, 0.2], [0.1, 0.4]], dtype=torch.float64), Uniform()
    expected = ((0.1 - 1 / 3) ** 2 + (0.9 - 2 / 3) ** 2 + (0.2 - 1 / 3) ** 2 + (0.4 - 2 / 3) ** 2) / 4
    assert BatchShaping(0.5, prior)(values).item() == pytest.approx(expected, abs=1e-9)
    flat = sum((x - k / 5) ** 2 for k, x in enumerate([0.1, 0.2, 0.4, 0.9], start=1)) / 4
    assert FlatBatchShaping(0.5, prior)(values).item() == pytest.approx(flat, abs=1e-9)


def test_gbas_is_the_loss_of_each_position_at_its_theta_and_the_distance_of_thetas_to_the_hyperprior():
    values = torch.tensor([[0.9, 0.2], [0.1, 0.4]], dtype=torch.float64)
    loss = GeneralizedBatchShaping(0.3, grid=(1, 2), std=0.1, center=False).double()
    loss.raw.data = torch.tensor([[0.2, 0.5]], dtype=torch.float64).logit()
    below = [math.erfc((0.3 - theta) / 0.1 / math.sqrt(2)) / 2 for theta in (0.2, 0.5)]  # of Normal(0.3, 0.1)
    hyperprior = ((1 / 3 - below[0]) ** 2 + (2 / 3 - below[1]) ** 2) / 2
    by_position = [BatchShaping(theta)(values[:, [at]]).item() for at, theta in enumerate((0.2, 0.5))]
    assert loss(values).item() == pytest.approx(sum(by_position) / 2 + hyperprior, abs=1e-9)


def test_l0_is_each_images_excess_over_the_target():
    fine_prob = torch.tensor([[1.0, 1, 1, 0], [0.25, 0, 0, 0]])
    assert L0(0.5)(fine_prob).item() == pytest.approx((0.75 - 0.5) / 2)
    assert L0(0.5)(fine_prob.half()).dtype is torch.float32


@pytest.mark.parametrize("loss", SHAPING)
@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_gradients_in_values_and_theta_match_finite_differences(loss, prior):
    score = make(loss, target=0.4, prior=prior)
    fine_prob = draw(Normal(0.15), 0.6, num=5).requires_grad_()
    raw = torch.linspace(-1, 1.5, 6, dtype=torch.float64).view(GRID).requires_grad_()

    def compute(fine_prob, raw):
        return torch.func.functional_call(score, dict.fromkeys(dict(score.named_parameters()), raw), (fine_prob,))

    assert gradcheck(compute, (fine_prob, raw), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES.values())
@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_logits_score_as_their_probabilities_do_flattened_or_not(loss, prior):
    logits = torch.linspace(-15, 15, 30, dtype=torch.float64).view(5, *GRID)
    score = make(loss, prior=prior)
    for values in (logits.sigmoid(), logits.sigmoid().flatten(1)):
        torch.testing.assert_close(score(logits=logits), score(values), rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", SHAPING)
@pytest.mark.parametrize("start", [-30.0, -12.0, 12.0, 30.0])
def test_a_saturated_gate_is_moved_back_to_the_prior(loss, start):
    """At 30 a float32 sigmoid is exactly 1. The released loss has no gradient beyond 6.9: there it stays."""
    torch.manual_seed(0)
    score = make(loss, target=0.3).float()
    score = getattr(score, "prior_term", score)  # of GBaS, which has a term that does not depend on the gate
    logits = (start + 0.1 * torch.randn(64, *GRID)).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.3)
    before = score(logits=logits).item()
    for _ in range(300):
        optimizer.zero_grad()
        score(logits=logits).backward()
        assert logits.grad.isfinite().all()
        optimizer.step()
    assert score(logits=logits) < 0.05 * before
    assert (logits > 0).float().mean() == pytest.approx(0.3, abs=0.1)


@pytest.mark.parametrize("loss", SHAPING)
def test_a_saturated_probability_is_moved_back_unless_it_is_exactly_0_or_1(loss):
    logits = torch.tensor([-80.0, -12, 12, 15]).view(4, 1, 1).repeat(1, *GRID).requires_grad_()
    score = make(loss, target=0.5).float()
    score(logits.sigmoid()).backward()
    from_probabilities, logits.grad = logits.grad, None
    score(logits=logits).backward()
    torch.testing.assert_close(from_probabilities, logits.grad, rtol=0.1, atol=0)
    lower, upper = logits.grad[1], logits.grad[2]  # the second and third quarter belong inside
    assert (lower < 0).all()
    assert (upper > 0).all()


@pytest.mark.parametrize("loss", SHAPING)
def test_no_logit_is_pushed_further_out_than_the_loss_can_see(loss):
    """A tenth of this prior lies beyond the clip on either side; the values that stand for it need not move."""
    logits = torch.linspace(-9, 9, 39).view(39, 1, 1).repeat(1, *GRID).double().requires_grad_()
    make(loss, target=0.5)(logits=logits).backward()
    assert (logits.grad[:3] == 0).all()
    assert (logits.grad[-3:] == 0).all()
    assert (logits.grad[5:-5] != 0).any()


@pytest.mark.parametrize("loss", LOSSES.values())
@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_no_value_is_read_back_from_a_device(loss, prior):
    fine_prob = torch.rand(4, *GRID, device="meta", requires_grad=True)  # has no values: reading one raises
    make(loss, prior=prior).to("meta")(fine_prob).backward()
    assert fine_prob.grad.shape == fine_prob.shape


def test_theta_starts_at_the_target_or_falls_from_centre_to_corners():
    flat = GeneralizedBatchShaping(0.2, grid=(4, 6), center=False).theta
    torch.testing.assert_close(flat, torch.full((4, 6), 0.2))

    places = torch.arange(-3, 4) / 3
    falling = 1 - (places[:, None] ** 2 + places**2).sqrt() / 2**0.5
    theta = GeneralizedBatchShaping(0.2, grid=(7, 7), center=True).theta
    torch.testing.assert_close(theta, falling.clamp(0.02, 0.98))


def test_resized_resamples_theta_and_leaves_the_loss_alone():
    loss = GeneralizedBatchShaping(0.4, grid=(4, 4), std=0.2, prior=Normal(0.3)).double()
    other = loss.resized((2, 2))
    pooled = torch.nn.functional.avg_pool2d(loss.theta[None], 2)[0]  # bilinear by 2 is the 2x2 mean
    torch.testing.assert_close(other.theta, pooled)
    assert loss.theta.shape == (4, 4)
    assert (other.raw.requires_grad, other.raw.dtype) == (True, torch.float64)
    assert (other.target, other.prior, other.hyperprior) == (loss.target, loss.prior, loss.hyperprior)
    torch.testing.assert_close(loss.resized((4, 4)).theta, loss.theta)


# Cumulative distribution functions

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
