"""From a gate's logits to decisions: the Gumbel-sigmoid with a straight-through gradient (Eqs. 1 and 2).

    decide(logits, temperature=1.0, noise=1.0)             # training: noisy, differentiable
    decide(logits, temperature=1.0, noise=0.0, threshold=0.0)   # noise-free
"""

import torch
from torch import Tensor

from msvit.shapes import Float
from msvit.types import GateOutput, unchecked


def decide(
    logits: Float[Tensor, "b hc wc"], temperature: float = 1.0, noise: float = 0.0, threshold: float | Tensor = 0.0
) -> GateOutput:
    """Decide by logits. `noise` scales the logistic noise: 1 is the paper's, 0 makes the decision deterministic."""
    sample, mask = straight_through(logits - threshold, temperature, noise)
    return unchecked(GateOutput, logits=logits, fine_prob=torch.sigmoid(logits), sample=sample, mask=mask)


def straight_through(
    logits: Float[Tensor, "*any"], temperature: float = 1.0, noise: float = 0.0
) -> tuple[Float[Tensor, "*any"], Float[Tensor, "*any"]]:
    """Return the soft decision, and the hard one with its gradient. Both are NaN where the logit is."""
    if noise:
        uniform = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
        logits = logits + noise * torch.logit(uniform)
    sample = torch.sigmoid(logits / temperature)
    hard = (logits > 0).to(sample.dtype)
    return sample, hard + (sample - sample.detach())
