"""The worth of each cell's fine tokens, measured on the dense model without labels: the targets of `fit_gate`.

    attention    the share of the class token's attention
    pooling      the share of the attention that pools the tokens, as in SigLIP
    edges        of a Segmenter: whether its dense prediction has more than one class in the cell
    masks        the divergence from the dense model that a coarse cell adds, regressed on random masks
    gradient     the same to first order: the derivative of the divergence by the mask (Eq. 10, masked mode)
    distortion   the distance of a coarse cell's features from the dense ones, under random masks
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.budget.divergence import dense_model, divergence
from msvit.budget.images import gated_encoder
from msvit.gates.ranking import top_num
from msvit.losses.targets import attention_loss, edge_cells
from msvit.output import MSViTOutput
from msvit.reduction.attention_recorder import AttentionRecorder
from msvit.segmenter import Segmenter
from msvit.shapes import Float
from msvit.tokens import dense_map
from msvit.types import TokenBatch

NUM_MASKS, NUM_GRADIENTS = 16, 4  # random masks of each image on a GPU, half of them on a CPU
SHARES = (0.25, 0.75)  # of fine cells in these, whatever the budget
MAX_DEVIATION = 3.0  # standard deviations: what is further from the mean counts as this much

Images = Float[Tensor, "b c h w"]
Cells = Float[Tensor, "b hc wc"]
Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "attention": attention_loss, "pooling": attention_loss, "edges": F.binary_cross_entropy_with_logits,
    "masks": F.mse_loss, "gradient": F.mse_loss, "distortion": F.mse_loss,
}  # fmt: skip


def targets_for(model: Any) -> tuple[str, ...]:
    """Return the names of the targets that apply to a model."""
    segments, has_class_token = isinstance(model, Segmenter), getattr(model.host, "cls_token", None) is not None
    applies = {
        "attention": has_class_token and not segments,
        "pooling": pooling_of(model.host) is not None and not segments,
        "edges": segments,
        "distortion": segments or not has_class_token or not model.num_classes,
    }
    return tuple(name for name in LOSSES if applies.get(name, True))


class Measures:
    """Targets of batches of images, for masks with about `share` of fine cells."""

    def __init__(self, model: Any, names: Iterable[str], share: float, draw: torch.Generator) -> None:
        self.names, self.draw, self.share = frozenset(names), draw, min(max(share, SHARES[0]), SHARES[1])
        self.dense, self.masked, self.gate = dense_model(model), dense_model(model, "masked"), gated_encoder(model).gate
        self.pad = getattr(model, "pad", lambda image: image)
        self.recorder = AttentionRecorder() if "attention" in self.names else None
        self.recorded = self.dense.with_options(reducer=self.recorder)
        self.weight = next(self.dense.parameters())
        self.fewer = 1 if self.weight.is_cuda else 2

    @torch.no_grad()
    def __call__(self, image: Images) -> dict[str, Cells]:
        image = image.to(self.weight.dtype)
        cuda = self.weight.is_cuda and self.weight.dtype is torch.float32 and torch.cuda.is_bf16_supported()
        with torch.autocast(self.weight.device.type, torch.bfloat16, enabled=cuda):  # precise enough for targets
            dense = self.recorded(image)
            targets: dict[str, Cells] = {}
            if self.recorder is not None:
                targets["attention"] = self.recorder.attention_map()
            if "pooling" in self.names:
                targets["pooling"] = pooling_attention(pooling_of(self.dense.host), dense.tokens)
            if "edges" in self.names:
                num_classes = dense.logits.shape[1]
                targets["edges"] = edge_cells(dense.logits.argmax(1), self.dense.coarse, ignore=num_classes)
            if self.names & {"masks", "distortion"}:
                targets |= self.by_masks(image, dense)
            if "gradient" in self.names:
                targets["gradient"] = self.gradient(image, dense)
        return {name: targets[name].float() for name in self.names}

    def by_masks(self, image: Images, dense: MSViTOutput) -> dict[str, Cells]:
        """Measure "masks" and "distortion": divergence and features of the model with random masks."""
        masks, changes, distances = [], [], []
        before = cell_features(dense.tokens)
        for _ in range(NUM_MASKS // self.fewer):
            mask = self.random_mask(torch.zeros(dense.gate.mask.shape, device=image.device))
            mixed = self.dense(image, mask=mask)
            masks.append(mask)
            changes.append(divergence(self.dense, dense, mixed).float())
            distances.append(1 - F.cosine_similarity(before, cell_features(mixed.tokens), dim=1))
        coarse = 1 - torch.stack(masks, 1)  # (b, masks, hc, wc)
        total, num = (coarse * torch.stack(distances, 1)).sum(1), coarse.sum(1)
        mean = total.sum((1, 2), keepdim=True) / num.sum((1, 2), keepdim=True)
        distortion = (total + mean) / (num + 1)  # a cell that was never coarse has the mean
        return {"masks": regressed(coarse, torch.stack(changes, 1)), "distortion": distortion}

    def gradient(self, image: Images, dense: MSViTOutput) -> Cells:
        """Return minus the mean derivative of the divergence by the mask, at masks near those of the given gate.

        In masked mode it has the right sign for coarse cells, too. At masks without a preference it says less.
        """
        scores, gradients = self.gate.scores(self.pad(image)).float(), []
        scores = (scores - scores.mean((1, 2), keepdim=True)) / scores.std((1, 2), keepdim=True).clamp(min=1e-6)
        for _ in range(NUM_GRADIENTS // self.fewer):
            mask = self.random_mask(scores).requires_grad_()
            with torch.enable_grad():
                change = divergence(self.dense, dense, self.masked(image, mask=mask)).sum()
            gradients.append(torch.autograd.grad(change, mask)[0])
        return -torch.stack(gradients).mean(0)

    def random_mask(self, scores: Cells) -> Cells:
        """Draw a mask of the cells with the highest scores plus logistic noise."""
        noise = torch.rand(scores.shape, generator=self.draw).logit().to(scores)
        return top_num(scores + noise, round(self.share * scores[0].numel()))


def regressed(coarse: Float[Tensor, "b masks hc wc"], change: Float[Tensor, "b masks"]) -> Cells:
    """Estimate what each coarse cell adds, by ridge regression of an image's changes on its masks."""
    with torch.autocast(change.device.type, enabled=False):
        share, cells = coarse.mean(), coarse[0, 0].numel()
        x = (coarse - coarse.mean(1, keepdim=True)).flatten(2)  # (b, masks, cells)
        y = (change - change.mean(1, keepdim=True))[..., None]
        ridge = cells * share * (1 - share) * torch.eye(x.shape[1], device=x.device)  # best for half linear variance
        return (x.mT @ torch.linalg.solve(x @ x.mT + ridge, y)).view_as(coarse[:, 0])


def standardized(values: Cells) -> Cells:
    """Scale the values of all images to a gate's target, with mean 0 and deviation 1.

    Divergences differ a hundredfold between images: each is divided by the root of its image's level, so that images
    which lose more get more fine cells, but not all of them.
    """
    level = values.abs().mean((1, 2), keepdim=True)
    values = values / level.sqrt().clamp(min=1e-12)
    return ((values - values.mean()) / values.std().clamp(min=1e-12)).clamp(-MAX_DEVIATION, MAX_DEVIATION)


def cell_features(tokens: TokenBatch) -> Float[Tensor, "b d hc wc"]:
    """Return the mean of each cell's features."""
    return F.avg_pool2d(dense_map(tokens).float(), tokens.layout.grid.k)


def pooling_of(host: Any) -> Any:
    """Return the attention pooling of timm's or transformers' SigLIP; None where there is none."""
    return getattr(host, "attn_pool", None) or getattr(host, "attention_pooling", None)


def pooling_attention(pool: Any, tokens: TokenBatch) -> Cells:
    """Return the share of a pooling's attention that each cell of a dense model gets, mean over heads and queries."""
    if hasattr(pool, "latent"):  # timm's AttentionPoolLatent
        q, k = pool.q(pool.latent[0]), pool.kv(tokens.x).chunk(2, dim=-1)[0]
        q, k = (norm(t.unflatten(-1, (pool.num_heads, -1))) for norm, t in ((pool.q_norm, q), (pool.k_norm, k)))
    else:  # transformers' SiglipMultiheadAttentionPoolingHead
        attention = pool.attention
        weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        q, k = F.linear(pool.probe[0], weights[0], biases[0]), F.linear(tokens.x, weights[1], biases[1])
        q, k = (t.unflatten(-1, (attention.num_heads, -1)) for t in (q, k))
    k = k.unflatten(0, (tokens.layout.batch, -1))  # (b, n, heads, head_dim): all images have as many tokens
    scores = torch.einsum("qhd,bnhd->bnhq", q.float(), k.float()) * q.shape[-1] ** -0.5
    shares = scores.softmax(1).mean((2, 3)).flatten()[:, None]
    return F.avg_pool2d(dense_map(tokens.with_x(shares)), tokens.layout.grid.k)[:, 0]
