"""Gate losses: they keep the gate from choosing fine cells everywhere. Probabilities in, one number out.

    gate_loss = GeneralizedBatchShaping(target=0.5, grid=(7, 7))    # GBaS; has a parameter to optimize
    gate_loss = FlatBatchShaping(target=0.5, prior=Beta(concentration=2.0))
    gate_loss = LOSSES["l0"](target=0.5)
    loss = task_loss + 4.0 * gate_loss(fine_prob)                   # (b, hc, wc) in [0, 1], 1 = fine
    loss = task_loss + EdgeLoss(target=0.5, coarse=32)(logits, label)     # dense tasks: the label maps tell
    loss = task_loss + AttentionLoss(target=0.5)(logits, attention)       # a dense model tells

Under `torch.distributed` the batch-shaping losses look at the global batch; see `msvit.losses.distributed`.
"""

from msvit.losses.batch_shaping import BatchShaping, FlatBatchShaping, GeneralizedBatchShaping
from msvit.losses.cdf import (
    Beta,
    Normal,
    Prior,
    RelaxedBernoulli,
    beta_cdf,
    normal_cdf,
    relaxed_bernoulli_cdf,
)
from msvit.losses.direct import AttentionLoss, DirectLoss, EdgeLoss
from msvit.losses.sparsity import L0

LOSSES = {"l0": L0, "bas": BatchShaping, "bas-flat": FlatBatchShaping, "gbas": GeneralizedBatchShaping}

__all__ = [
    "L0",
    "LOSSES",
    "AttentionLoss",
    "BatchShaping",
    "Beta",
    "DirectLoss",
    "EdgeLoss",
    "FlatBatchShaping",
    "GeneralizedBatchShaping",
    "Normal",
    "Prior",
    "RelaxedBernoulli",
    "beta_cdf",
    "normal_cdf",
    "relaxed_bernoulli_cdf",
]
