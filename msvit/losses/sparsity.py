"""L0, the plain sparsity loss, and the checks that all gate losses share.

    L0(target=0.5)(fine_prob)    # 0 for an image with at most half of its cells fine

It bounds a mean only: a gate that ignores the image can satisfy it, which is what batch-shaping is for.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from msvit.checks import check_number, check_tensor, check_values


class L0(nn.Module):
    """Each image's share of fine cells above the target, averaged over the batch.

    The paper prints min(0, .); max(0, .) is meant: fewer fine cells cost nothing. The batch is the local
    one: DDP's averaging of gradients makes a mean over images global by itself, given equal batch sizes.
    """

    def __init__(self, target: float) -> None:
        super().__init__()
        self.target = check_target(target)

    def forward(self, fine_prob: Float[Tensor, "b *cells"]) -> Float[Tensor, ""]:
        check_fine_prob(fine_prob)
        dtype = torch.promote_types(fine_prob.dtype, torch.float32)  # as the other losses do
        share = fine_prob.flatten(1).mean(dim=1, dtype=dtype)  # (b,)
        return torch.relu(share - self.target).mean()

    def extra_repr(self) -> str:
        return f"target={self.target}"


def check_target(target: float) -> float:
    """The target itself, if it is a share strictly between 0 and 1."""
    return check_number("target", target, above=0, below=1, example=0.5)


def check_fine_prob(fine_prob: Float[Tensor, "b *cells"]) -> None:
    """Raise unless `fine_prob` is a batch of probabilities. Values are read on CPU only: a GPU would wait."""
    check_tensor("fine_prob", fine_prob, axes="b, hc, wc")
    shape = tuple(fine_prob.shape)
    if fine_prob.ndim not in (2, 3):
        raise ValueError(f"fine_prob has shape {shape}, but must be (b, hc, wc) or (b, cells); reshape it")
    if fine_prob.numel() == 0:
        raise ValueError(f"fine_prob has shape {shape}, which is empty; pass at least one image and one cell")
    check_values("fine_prob", fine_prob, at_least=0, at_most=1, remedy="; pass sigmoid(logits)")
