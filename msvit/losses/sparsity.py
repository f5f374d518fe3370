"""L0, the plain sparsity loss, and the checks that all gate losses share.

    L0(target=0.5)(fine_prob)    # 0 for an image with at most half of its cells fine
    L0(target=0.5)(logits=logits)

It bounds a mean only: a gate that ignores the image can satisfy it, which is what batch-shaping is for.
"""

from typing import Any

import torch
from torch import Tensor, nn

from msvit.checks import check_number, check_tensor, check_values
from msvit.shapes import Float

Probs = Float[Tensor, "b *cells"]


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
