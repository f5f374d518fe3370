"""Accuracy, tokens and multiply-adds of a classifier on a data set, and how many cells on objects are fine."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from msvit.model import MSViT
from msvit_lab.data import Batch, Loader
from msvit_lab.evaluation.shared import Costs, Evaluation, Samples, concatenate, drawn_samples, on_cpu, packed

COVERED = 0.1  # a cell belongs to the object when the object covers this share of it, to the ground when none


@torch.inference_mode()
def evaluate_classifier(
    model: MSViT, loader: Loader, num_classes: int, num_samples: int = 24, seed: int = 0
) -> Evaluation:
    """Run every image once, packed. The images that are kept as samples are drawn from `seed`."""
    from torchmetrics import MeanMetric  # here, as it takes seconds
    from torchmetrics.classification import MulticlassAccuracy

    device = next(model.parameters()).device
    local: dict[str, Any] = {"sync_on_compute": False}  # other processes, if any, do not take part
    top1 = MulticlassAccuracy(num_classes, average="micro", **local).to(device)
    top5 = MulticlassAccuracy(num_classes, average="micro", top_k=min(5, num_classes), **local).to(device)
    loss, on_object, on_ground = (MeanMetric(nan_strategy="disable", **local).to(device) for _ in range(3))
    costs: list[Costs] = []
    drawn, samples, num_images = drawn_samples(loader.plan.num_images, num_samples, seed), [], 0
    model = packed(model)
    for batch in loader.iterate(0):
        output = model(batch.image)
        logits, mask = output.logits.float(), output.gate.mask
        top1.update(logits, batch.label)
        top5.update(logits, batch.label)
        loss.update(F.cross_entropy(logits, batch.label, reduction="none"))
        costs.append(on_cpu(Costs(output.tokens.count, model.macs_of(output), mask)))
        if batch.object_mask is not None:
            objects, ground = object_cells(batch.object_mask, model.coarse)
            on_object.update(mask[objects])
            on_ground.update(mask[ground])
        samples += [sample(batch, mask, logits, row) for row in range(len(mask)) if num_images + row in drawn]
        num_images += len(mask)
    total = concatenate(costs)
    scores = {name: metric.compute().item() for name, metric in (("top1", top1), ("top5", top5), ("loss", loss))}
    has_objects = bool(on_object.weight > 0)
    fine = {
        "fine_share": total.masks.mean(0).mean().item(),
        "fine_on_object": on_object.compute().item() if has_objects else None,
        "fine_on_ground": on_ground.compute().item() if has_objects else None,
    }
    return Evaluation(scores, fine, num_images=num_images, costs=total, samples=concatenate(samples))


def sample(batch: Batch, mask: Float[Tensor, "b hc wc"], logits: Float[Tensor, "b classes"], row: int) -> Samples:
    """One image of a batch."""
    one = slice(row, row + 1)
    return on_cpu(Samples(batch.image[one], mask[one], batch.label[one], logits[one].argmax(1)))


def object_cells(
    object_mask: Float[Tensor, "b h w"], coarse: int
) -> tuple[Bool[Tensor, "b hc wc"], Bool[Tensor, "b hc wc"]]:
    """Cells that the object covers in part, and cells that hold nothing of it."""
    covered = F.avg_pool2d(object_mask[:, None], coarse)[:, 0]
    return covered > COVERED, covered == 0
