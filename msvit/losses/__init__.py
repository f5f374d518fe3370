"""Gate losses: they keep the gate from choosing fine cells everywhere. Probabilities or logits in, one number out.

    gate_loss = GeneralizedBatchShaping(target=0.5, grid=(7, 7))    # GBaS; has a parameter to optimize
    gate_loss = FlatBatchShaping(target=0.5, prior=Normal(std=0.2))
    gate_loss = LOSSES["l0"](target=0.5)
    loss = task_loss + 4.0 * gate_loss(fine_prob)                   # (b, hc, wc) in [0, 1], 1 = fine
    loss = task_loss + 4.0 * gate_loss(logits=gate.logits)          # the same, also for gates that are saturated
    loss = task_loss + edge_loss(logits, label, coarse=32)          # not the paper's: a target for each cell's logit
    loss = task_loss + attention_loss(logits, attention)

Under `torch.distributed` the batch-shaping losses use the global batch; see `gather_with_grad`.
"""

from msvit.losses.batch_shaping import L0, BatchShaping, FlatBatchShaping, GeneralizedBatchShaping
from msvit.losses.cdf import Beta, Normal, Prior, RelaxedBernoulli, normal_cdf, relaxed_bernoulli_cdf
from msvit.losses.targets import ThresholdController, attention_loss, edge_loss

LOSSES = {"l0": L0, "bas": BatchShaping, "bas-flat": FlatBatchShaping, "gbas": GeneralizedBatchShaping}

__all__ = [
    "L0", "LOSSES", "BatchShaping", "Beta", "FlatBatchShaping", "GeneralizedBatchShaping", "Normal", "Prior",
    "RelaxedBernoulli", "ThresholdController", "attention_loss", "edge_loss", "normal_cdf", "relaxed_bernoulli_cdf",
]  # fmt: skip
