"""Accuracy, tokens and multiply-adds of a model on a data set, and where its fine cells lie."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from msvit.lab.data import Batch, Loader
from msvit.lab.evaluation.shared import Chosen, join, packed
from msvit.model import MSViT

COVERED = 0.1  # a cell belongs to the object when the object covers this share of it, to the ground when none


@dataclass(frozen=True)
class Samples:
    """Some images as they were seen, not chosen by anybody."""

    image: Float[Tensor, "n c h w"]
    mask: Float[Tensor, "n hc wc"]
    label: Tensor
    prediction: Tensor


@dataclass(frozen=True)
class Evaluation:
    top1: float
    top5: float
    loss: float
    tokens: Tensor  # (n,) of each image
    macs: Tensor  # (n,)
    mask_mean: Float[Tensor, "hc wc"]
    mask_var: Float[Tensor, "hc wc"]
    fine_on_object: float | None  # share of fine cells among those that hold some of the object
    fine_on_ground: float | None
    samples: Samples = field(repr=False)


@torch.inference_mode()
def evaluate(model: MSViT, loader: Loader, num_classes: int, num_samples: int = 24, seed: int = 0) -> Evaluation:
    """Run every image once, packed. Which images are kept as samples is drawn from `seed`."""
    device = next(model.parameters()).device
    alone: dict[str, Any] = {"sync_on_compute": False}  # other processes, if any, are not here to be asked
    top1 = MulticlassAccuracy(num_classes, average="micro", **alone).to(device)
    top5 = MulticlassAccuracy(num_classes, average="micro", top_k=min(5, num_classes), **alone).to(device)
    loss, on_object, on_ground = (MeanMetric(nan_strategy="disable", **alone).to(device) for _ in range(3))
    tokens, macs, masks = [], [], []
    chosen: Chosen[Samples] = Chosen(num_samples, seed)
    with packed(model) as model:
        for batch in loader.iterate(0):
            output = model(batch.image)
            logits, mask = output.logits.float(), output.gate.mask
            top1.update(logits, batch.label)
            top5.update(logits, batch.label)
            loss.update(F.cross_entropy(logits, batch.label, reduction="none"))
            tokens.append(output.tokens.count.cpu())
            macs.append(model.macs_of(output).cpu())
            masks.append(mask.cpu())
            if batch.object_mask is not None:
                objects, ground = object_cells(batch.object_mask, model.coarse)
                on_object.update(mask[objects])
                on_ground.update(mask[ground])
            for row in range(len(mask)):
                chosen.offer(sample, batch, mask, logits, row)
    samples = join(chosen.kept())
    decisions = torch.cat(masks)
    known = bool(on_object.weight > 0)
    return Evaluation(
        top1=top1.compute().item(),
        top5=top5.compute().item(),
        loss=loss.compute().item(),
        tokens=torch.cat(tokens),
        macs=torch.cat(macs),
        mask_mean=decisions.mean(0),
        mask_var=decisions.var(0, correction=0),
        fine_on_object=on_object.compute().item() if known else None,
        fine_on_ground=on_ground.compute().item() if known else None,
        samples=samples,
    )


def sample(batch: Batch, mask: Float[Tensor, "b hc wc"], logits: Float[Tensor, "b classes"], row: int) -> Samples:
    """One image of a batch, as a copy: the batch can go."""
    one = slice(row, row + 1)
    columns = batch.image[one], mask[one], batch.label[one], logits[one].argmax(1)
    return Samples(*(column.to("cpu", copy=True) for column in columns))


def object_cells(
    object_mask: Float[Tensor, "b h w"], coarse: int
) -> tuple[Bool[Tensor, "b hc wc"], Bool[Tensor, "b hc wc"]]:
    """Cells that hold some of the object, and cells that hold nothing of it."""
    covered = F.avg_pool2d(object_mask[:, None], coarse)[:, 0]
    return covered > COVERED, covered == 0
