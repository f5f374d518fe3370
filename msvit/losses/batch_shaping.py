"""Batch-shaping, where the gate's outputs shall be distributed like a prior, and L0, the plain sparsity loss.

    L0(target=0.5)                                                # 0 for an image with at most half of its cells fine
    BatchShaping(target=0.5)                                      # BaS: the same prior at every position
    FlatBatchShaping(target=0.5)                                  # BaS-flat: one prior on all values together
    GeneralizedBatchShaping(target=0.5, grid=(7, 7), std=0.1)     # GBaS: a learned prior per position
    BatchShaping(target=0.5, prior=Normal(std=0.2))               # another family
    loss(fine_prob), loss(logits=logits)                          # the same value

L0 bounds a mean only: a gate that ignores the image can satisfy it, which is what batch-shaping is for.

From logits, cells whose probability has rounded to 0 or 1 have a gradient, too. The distance is between cumulative
distribution functions, over the global batch (`gather_with_grad`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import interpolate

from msvit.checks import check_flag, check_ints, check_number, check_tensor, check_values, check_weights, shown
from msvit.losses.cdf import Normal, Prior, RelaxedBernoulli
from msvit.shapes import Float

Probs = Float[Tensor, "b *cells"]

# The paper's choice, "easier to parametrize than the Beta distribution".
PAPER_PRIOR = RelaxedBernoulli(temperature=0.3)


def cdf_distance(values: Float[Tensor, "n *positions"], cdf: Callable[[Tensor], Tensor]) -> Float[Tensor, ""]:
    """Return the squared difference of the values' empirical CDF along dim 0 and `cdf`, a mean over all.

    The paper writes a sum over positions; the released loss takes the mean, which its lambdas (1, 4, 20) fit.
    """
    num_values = values.shape[0]
    expected = cdf(values.sort(dim=0).values)  # (n, *positions)
    rank = torch.arange(1, num_values + 1, dtype=expected.dtype, device=expected.device)
    empirical = (rank / (num_values + 1)).view(-1, *[1] * (values.ndim - 1))  # k / (n + 1)
    return (empirical - expected).square().mean()


class L0(nn.Module):
    """The share of an image's fine cells above the target, averaged over the batch.

    The paper prints min(0, .); max(0, .) is meant: fewer fine cells cost nothing. The batch is the local
    one: DDP's averaging of gradients makes a mean over images global by itself, given equal batch sizes.
    """

    def __init__(self, target: float) -> None:
        super().__init__()
        self.target = check_target(target)

    def forward(self, fine_prob: Probs | None = None, logits: Probs | None = None) -> Float[Tensor, ""]:
        """Return the loss of probabilities (b, hc, wc) or of logits."""
        values = check_given(fine_prob, logits)
        fine_prob = values if logits is None else torch.sigmoid(values)
        dtype = torch.promote_types(fine_prob.dtype, torch.float32)  # as the other losses do
        share = fine_prob.flatten(1).mean(dim=1, dtype=dtype)  # (b,)
        return torch.relu(share - self.target).mean()

    def extra_repr(self) -> str:
        return f"target={self.target}"


class BatchShaping(nn.Module):
    """The loss BaS: at every position, the values across the batch follow one and the same prior at `target`."""

    def __init__(self, target: float, prior: Prior = PAPER_PRIOR) -> None:
        super().__init__()
        self.target, self.prior = check_target(target), check_prior(prior)

    def forward(self, fine_prob: Probs | None = None, logits: Probs | None = None) -> Float[Tensor, ""]:
        """Return the loss of probabilities (b, hc, wc) or of logits."""
        values, cdf = values_and_cdf(self.prior, fine_prob, logits)
        return cdf_distance(_global_batch(values), lambda x: cdf(x, self.target))  # over (B, *cells)

    def extra_repr(self) -> str:
        return f"target={self.target}, prior={self.prior}"


class FlatBatchShaping(BatchShaping):
    """The loss BaS-flat: all values, of every image and position together, follow one prior at `target`."""

    def forward(self, fine_prob: Probs | None = None, logits: Probs | None = None) -> Float[Tensor, ""]:
        values, cdf = values_and_cdf(self.prior, fine_prob, logits)
        values = _global_batch(values, min_images=1).flatten()  # (B * cells,)
        return cdf_distance(values, lambda x: cdf(x, self.target))


class GeneralizedBatchShaping(nn.Module):
    """The loss GBaS: position i has a prior at a learned theta_i, and the thetas follow Normal(target, std).

    `raw` is a parameter: give it to the optimizer, without weight decay. `center` is the paper's `ctr init`:
    theta starts high in the centre and low in the corners; otherwise it starts at `target`. A theta is of
    one cell of one grid: another grid raises ValueError, not interpolated in passing; see `resized`.
    """

    def __init__(
        self,
        target: float,
        grid: tuple[int, int] = (7, 7),
        std: float = 0.1,
        center: bool = True,
        prior: Prior = PAPER_PRIOR,
    ) -> None:
        super().__init__()
        rows, columns = check_ints("grid", grid, 2, example=(7, 7))
        check_weights(rows * columns, f"grid {rows}x{columns}")
        grid = rows, columns
        self.target, self.prior, self.hyperprior = check_target(target), check_prior(prior), Normal(std)
        theta = center_theta(grid) if check_flag("center", center) else torch.full(grid, self.target)
        self.raw = nn.Parameter(theta.logit())

    @property
    def theta(self) -> Float[Tensor, "hc wc"]:
        """The location of every position's prior."""
        return torch.sigmoid(self.raw)

    def forward(self, fine_prob: Probs | None = None, logits: Probs | None = None) -> Float[Tensor, ""]:
        """Return the loss of probabilities (b, hc, wc) or of logits: `prior_term`, and the same for the thetas.

        The latter, their distance to Normal(target, std), hardly pulls at a theta beyond about 4 std.
        """
        of_thetas = cdf_distance(self.theta.flatten(), lambda theta: self.hyperprior.cdf(theta, self.target))
        return self.prior_term(fine_prob, logits) + of_thetas

    def prior_term(self, fine_prob: Probs | None = None, logits: Probs | None = None) -> Float[Tensor, ""]:
        """Return the distance of each position's values to that position's prior."""
        values, cdf = values_and_cdf(self.prior, fine_prob, logits)
        cells, (hc, wc) = tuple(values.shape[1:]), self.raw.shape
        if cells not in ((hc, wc), (hc * wc,)):
            raise ValueError(
                f"{'fine_prob has' if logits is None else 'logits have'} cells {cells}, but this loss has a theta for "
                f"each of {hc}x{wc}; pass grid=(hc, wc) of your images, or use loss.resized((hc, wc)), which resamples "
                f"theta"
            )
        return cdf_distance(_global_batch(values), lambda x: cdf(x, self.theta.view(cells)))  # over (B, *cells)

    def resized(self, grid: tuple[int, int]) -> "GeneralizedBatchShaping":
        """Return a new loss for another grid, theta interpolated bilinearly; give its `raw` to the optimizer."""
        std = self.hyperprior.std
        other = GeneralizedBatchShaping(self.target, grid, std, center=False, prior=self.prior).to(self.raw)
        with torch.no_grad():
            theta = interpolate(self.theta[None, None], size=other.raw.shape, mode="bilinear", align_corners=False)
            other.raw.copy_(theta[0, 0].logit())
        return other

    def extra_repr(self) -> str:
        grid = tuple(self.raw.shape)
        return f"target={self.target}, grid={grid}, std={self.hyperprior.std}, prior={self.prior}"


def check_target(target: float) -> float:
    """Return the target, or raise ValueError unless it is a share strictly between 0 and 1."""
    return check_number("target", target, above=0, below=1, example=0.5)


def check_given(fine_prob: Probs | None, logits: Probs | None) -> Probs:
    """Return the batch given, probabilities or logits, or raise ValueError.

    Values are read on a CPU only: a GPU would wait.
    """
    if fine_prob is not None and logits is not None:
        raise ValueError("fine_prob and logits are both given, but a loss takes one of them; leave fine_prob out")
    name, values = ("fine_prob", fine_prob) if logits is None else ("logits", logits)
    check_tensor(name, values, axes="b, hc, wc")
    assert values is not None, "it is a tensor"
    shape = tuple(values.shape)
    if values.ndim not in (2, 3):
        raise ValueError(f"{name} has shape {shape}, but must be (b, hc, wc) or (b, cells); reshape it")
    if values.numel() == 0:
        raise ValueError(f"{name} has shape {shape}, which is empty; pass at least one image and one cell")
    bounds: Any = {"at_least": 0, "at_most": 1, "remedy": "; pass sigmoid(logits)"} if logits is None else {}
    check_values(name, values, **bounds)
    return values


def check_prior(prior: Prior) -> Prior:
    if not isinstance(prior, Prior) or isinstance(prior, type):
        raise ValueError(f"prior is {shown(prior)}, but must be one such as RelaxedBernoulli(temperature=0.3)")
    return prior


def center_theta(grid: tuple[int, int]) -> Float[Tensor, "hc wc"]:
    """Return theta by `ctr init`: 1 - distance to the centre (0 there, 1 in the corners), kept in [0.02, 0.98]."""
    y, x = (torch.arange(size) - (size - 1) / 2 for size in grid)
    distance = torch.hypot(y[:, None], x[None, :])  # (hc, wc)
    return (1 - distance / distance.max().clamp_min(1e-6)).clamp(0.02, 0.98)


def values_and_cdf(
    prior: Prior, fine_prob: Probs | None, logits: Probs | None
) -> tuple[Probs, Callable[[Tensor, Tensor | float], Tensor]]:
    """Return the checked values of a gate, and the prior's CDF of them: of its logits, where the prior has one."""
    values = check_given(fine_prob, logits)
    if logits is not None and hasattr(prior, "cdf_of_logits"):
        return values, prior.cdf_of_logits
    return values if logits is None else torch.sigmoid(values), prior.cdf


def _global_batch(values: Tensor, min_images: int = 2) -> Tensor:
    """The values of all processes. One image has no distribution: its CDF is 1/2 wherever it is."""
    values = gather_with_grad(values)
    if len(values) < min_images:
        raise ValueError(
            f"fine_prob (or logits) has {len(values)} image, but batch-shaping needs at least {min_images} to "
            "speak of a distribution; use larger batches (drop_last=True), FlatBatchShaping or L0"
        )
    return values


def gather_with_grad(x: Float[Tensor, "b *rest"]) -> Float[Tensor, "total *rest"]:
    """Concatenate `x` of every process along dim 0, in rank order; batch sizes may differ, the rest may not.

    Without torch.distributed, or with one process, it is `x` itself.

    The gradient is right if (1) every process computes the same loss L from the result and (2) parameter
    gradients are then AVERAGED over the W processes, as DDP and FSDP do. So backward hands process r the
    gradient of its own rows times W: the average, 1/W * sum_r (W * dL/dx_r * dx_r/dw), is dL/dw of the whole
    batch. A parameter used after the gather (theta of GBaS) has the whole gradient on every process, and
    averaging keeps it. By (1) backward needs no communication, so it cannot fall out of step with DDP's own.

    The shapes are exchanged first. With a CPU backend in the group (torch's default, "cpu:gloo,cuda:nccl")
    this leaves the GPU alone; with "nccl" only, it costs one GPU sync.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return x
    return _Gather.apply(x, _batch_sizes(x))


def _batch_sizes(x: Tensor) -> list[int]:
    """The batch size of every process; raises, on all of them, if the other dimensions differ."""
    device = torch.device("cpu") if "cpu:" in dist.get_backend_config() else x.device
    mine = torch.tensor(x.shape, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    shapes = [tuple(shape) for shape in torch.stack(every).tolist()]
    for rank, shape in enumerate(shapes):
        if shape[1:] != shapes[0][1:]:
            raise ValueError(
                f"process 0 brings shape {shapes[0]} and process {rank} brings {shape}, "
                "but only batch sizes may differ; give all processes images of one size in each step"
            )
    return [shape[0] for shape in shapes]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> Tensor:
        ctx.start, ctx.size = sum(sizes[: dist.get_rank()]), x.shape[0]
        ctx.world = len(sizes)
        padded = x.new_zeros(max(sizes), *x.shape[1:])  # all_gather wants equal shapes
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.world * grad.narrow(0, ctx.start, ctx.size), None
