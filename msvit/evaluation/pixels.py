"""Mean intersection over union, tokens and multiply-adds of a Segmenter on a data set, and which classes are coarse."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from msvit.data.dense import IGNORE
from msvit.evaluation.sliding import Slide, View, cut, look
from msvit.segmenter import Segmenter


@dataclass(frozen=True)
class PixelSamples:
    """The first window of some images, not chosen by anybody."""

    image: Float[Tensor, "n c s s"]
    mask: Float[Tensor, "n hc wc"]
    label: Int[Tensor, "n s s"]
    prediction: Int[Tensor, "n s s"]


@dataclass(frozen=True)
class PixelEvaluation:
    confusion: Int[Tensor, "classes classes"]  # pixels of a class, as what they were taken
    coarse: Float[Tensor, " classes"]  # share of a class's pixels in coarse cells
    tokens: Tensor  # (n,) of each window
    macs: Tensor  # (n,) of gate and encoder, each window
    masks: Float[Tensor, "n hc wc"] = field(repr=False)
    num_images: int
    samples: PixelSamples = field(repr=False)

    @property
    def frequency(self) -> Float[Tensor, " classes"]:
        """Share of all pixels that are of a class."""
        return self.confusion.sum(1) / self.confusion.sum()


def scores(confusion: Int[Tensor, "classes classes"]) -> dict[str, Any]:
    """mIoU, pixel accuracy and mean class accuracy over the classes that occur, and the IoU of each."""
    confusion = confusion.double()
    right, labelled, taken = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    union = labelled + taken - right
    iou = right / union  # NaN for a class that neither occurs nor is predicted
    known = [None if value.isnan() else value.item() for value in iou]
    return {
        "miou": iou[union > 0].mean().item(),
        "pixel_accuracy": (right.sum() / confusion.sum()).item(),
        "class_accuracy": (right / labelled)[labelled > 0].mean().item(),
        "iou": known,
    }


class Tally:
    """Pixels counted batch by batch: each class as what it was taken, and how much of it lay in coarse cells."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        alone: dict[str, Any] = {"sync_on_compute": False}  # processes are added up by whoever has several
        confusion = MulticlassConfusionMatrix(num_classes, ignore_index=IGNORE, validate_args=False, **alone)
        self.confusion = confusion.to(device)
        self.coarse = torch.zeros(num_classes, dtype=torch.float64, device=device)

    def add(self, labels: Sequence[Tensor], views: Sequence[View]) -> list[Tensor]:
        """Count a batch; returns what was predicted for each image. Asks the device once, not for every image."""
        found = [view.prob.argmax(0) for view in views]
        label = torch.cat([label.flatten() for label in labels])
        self.confusion.update(torch.cat([prediction.flatten() for prediction in found]), label)
        coarse = 1 - torch.cat([view.fine.flatten() for view in views]).double()
        num_classes = len(self.coarse)
        counted = torch.bincount(label.clamp(max=num_classes), coarse, minlength=num_classes + 1)  # ignored ones last
        self.coarse += counted[:num_classes]
        return found


@torch.no_grad()
def evaluate_pixels(
    model: Segmenter, loader: Any, slide: Slide, num_samples: int = 24, seed: int = 0
) -> PixelEvaluation:
    """Look at every image once, packed. Which images are kept as samples is drawn from `seed`."""
    model.eval()
    mode, model.mode = model.mode, "packed"
    tally = Tally(model.num_classes, next(model.parameters()).device)
    num_images, tokens, macs, masks, kept = 0, [], [], [], []
    order = torch.randperm(loader.plan.num_images, generator=torch.Generator().manual_seed(seed))
    chosen = set(order[:num_samples].tolist())
    for batch in loader.iterate(0):
        views = list(look(model, batch.images, [tuple(label.shape) for label in batch.labels], slide))
        predictions = tally.add(batch.labels, views)
        tokens.append(torch.cat([view.tokens for view in views]).cpu())
        macs.append(torch.cat([view.macs for view in views]).cpu())
        masks.append(torch.cat([view.masks for view in views]).cpu())
        for i, view in enumerate(views):
            if num_images + i in chosen:
                whole = batch.images[i], batch.labels[i], predictions[i]
                kept.append(sample(*whole, view.windows[0], view.masks[0], slide))
        num_images += len(views)
    model.mode = mode
    confusion = tally.confusion.compute().cpu()
    return PixelEvaluation(
        confusion=confusion,
        coarse=(tally.coarse.cpu() / confusion.sum(1)).float(),
        tokens=torch.cat(tokens),
        macs=torch.cat(macs),
        masks=torch.cat(masks),
        num_images=num_images,
        samples=PixelSamples(*(torch.stack(column) for column in zip(*kept, strict=True))),
    )


def sample(
    image: Tensor, label: Tensor, prediction: Tensor, window: Tensor, mask: Tensor, slide: Slide
) -> tuple[Tensor, ...]:
    """Image, mask, label and prediction of an image's first window."""
    size = image.shape[1:]
    maps = torch.stack([label, prediction])[None].float()
    maps = F.interpolate(maps, size=size, mode="nearest-exact")[0] - IGNORE  # so that padding, 0, is ignored
    maps = (cut(maps, slide)[0] + IGNORE).long()
    return window.cpu(), mask.cpu(), maps[0].cpu(), maps[1].cpu()
