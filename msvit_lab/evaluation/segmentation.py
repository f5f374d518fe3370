"""Mean intersection over union, tokens and multiply-adds of a Segmenter on a data set, and which classes are coarse."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from msvit.segmenter import Segmenter
from msvit.types import IGNORE
from msvit_lab.evaluation.shared import Costs, Evaluation, Samples, concatenate, drawn_samples, on_cpu, packed
from msvit_lab.evaluation.sliding import Slide, cut, predict


def scores(confusion: Int[Tensor, "classes classes"]) -> dict[str, Any]:
    """mIoU, pixel accuracy and mean class accuracy over the classes that occur, and the IoU of each.

    A row of `confusion` counts the pixels of a class by prediction. Undefined values, as all are where nothing is
    labelled, are None.
    """
    confusion = confusion.double()
    right, labelled, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    union = labelled + predicted - right
    iou = right / union  # NaN for a class that neither occurs nor is predicted
    return {
        "miou": or_none(iou[union > 0].mean()),
        "pixel_accuracy": or_none(right.sum() / confusion.sum()),
        "class_accuracy": or_none((right / labelled)[labelled > 0].mean()),
        "iou": [or_none(value) for value in iou],
    }


def or_none(value: Float[Tensor, ""]) -> float | None:
    """A number, and None for NaN, which JSON does not have."""
    return None if value.isnan() else value.item()


class PixelCounts:
    """Pixels counted batch by batch: the confusion matrix, and how much of each class lies in coarse cells."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        from torchmetrics.classification import MulticlassConfusionMatrix  # here, as it takes seconds

        local: dict[str, Any] = {"sync_on_compute": False}  # a caller with several processes adds them up
        confusion = MulticlassConfusionMatrix(num_classes, ignore_index=IGNORE, validate_args=False, **local)
        self.confusion = confusion.to(device)
        self.coarse = torch.zeros(num_classes, dtype=torch.float64, device=device)

    def add(self, labels: Sequence[Tensor], predictions: Sequence[Tensor], fine: Sequence[Tensor]) -> None:
        """Count a batch: label, prediction and share of fine windows of each pixel. Waits for the device once per
        batch, not per image."""
        label = torch.cat([label.flatten() for label in labels])
        self.confusion.update(torch.cat([prediction.flatten() for prediction in predictions]), label)
        coarse = 1 - torch.cat([share.flatten() for share in fine]).double()
        num_classes = len(self.coarse)
        counted = torch.bincount(label.clamp(max=num_classes), coarse, minlength=num_classes + 1)  # ignored ones last
        self.coarse += counted[:num_classes]


@dataclass(frozen=True)
class Segmented:
    """An image with its prediction, without the probabilities, which are large."""

    image: Float[Tensor, "c h w"]
    label: Int[Tensor, "height width"]
    prediction: Int[Tensor, "height width"]
    fine: Float[Tensor, "height width"]
    costs: Costs


@torch.no_grad()
def segment(
    model: Segmenter, loader: Any, slide: Slide, counts: PixelCounts,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Segmented]:  # fmt: skip
    """Segment every image once, and add its pixels to `counts`."""
    for batch in loader.iterate(0):
        with autocast():
            found = predict(model, batch.images, [tuple(label.shape) for label in batch.labels], slide)
            done = [
                Segmented(image, label, each.prob.argmax(0), each.fine, each.costs)
                for image, label, each in zip(batch.images, batch.labels, found, strict=True)
            ]
        counts.add(batch.labels, [each.prediction for each in done], [each.fine for each in done])
        yield from done


@torch.no_grad()
def evaluate_segmenter(
    model: Segmenter, loader: Any, slide: Slide, num_samples: int = 24, seed: int = 0
) -> Evaluation:
    """Segment every image once, packed. The images that are kept as samples are drawn from `seed`."""
    counts = PixelCounts(model.num_classes, next(model.parameters()).device)
    costs: list[Costs] = []
    drawn, samples = drawn_samples(loader.plan.num_images, num_samples, seed), []
    model = packed(model)
    for number, each in enumerate(segment(model, loader, slide, counts)):
        costs.append(each.costs)
        samples += [sample(each, slide)] if number in drawn else []
    total = on_cpu(concatenate(costs))
    confusion = counts.confusion.compute().cpu()
    labelled = confusion.sum(1)
    fine = {
        "fine_share": total.masks.mean().item(), "fine_on_object": None, "fine_on_ground": None,
        "class_coarse": [or_none(share) for share in (counts.coarse.cpu() / labelled).float()],
        "class_frequency": [or_none(share) for share in labelled / labelled.sum()],
    }  # fmt: skip
    return Evaluation(scores(confusion), fine, num_images=len(costs), costs=total, samples=concatenate(samples))


def sample(done: Segmented, slide: Slide) -> Samples:
    """An image's first window."""
    maps = torch.stack([done.label, done.prediction])[None].float()
    maps = F.interpolate(maps, size=done.image.shape[1:], mode="nearest-exact")[0]
    maps = (cut(maps - IGNORE, slide)[:1] + IGNORE).long()  # so that padding, 0, is ignored
    return on_cpu(Samples(cut(done.image, slide)[:1], done.costs.masks[:1], maps[:, 0], maps[:, 1]))
