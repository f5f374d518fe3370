"""Mean intersection over union, tokens and multiply-adds of a Segmenter on a data set, and which classes are coarse."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from msvit.lab.evaluation.shared import Chosen, join, packed
from msvit.lab.evaluation.sliding import Slide, View, cut, look
from msvit.segmenter import Segmenter
from msvit.types import IGNORE


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
    coarse: Float[Tensor, " classes"]  # share of a class's pixels in coarse cells, NaN for a class that never occurs
    tokens: Tensor  # (n,) of each window
    macs: Tensor  # (n,) of gate and encoder, each window
    masks: Float[Tensor, "n hc wc"] = field(repr=False)
    num_images: int
    samples: PixelSamples = field(repr=False)

    @property
    def frequency(self) -> Float[Tensor, " classes"]:
        """Share of all labelled pixels that are of a class; NaN if none is labelled."""
        return self.confusion.sum(1) / self.confusion.sum()


def scores(confusion: Int[Tensor, "classes classes"]) -> dict[str, Any]:
    """mIoU, pixel accuracy and mean class accuracy over the classes that occur, and the IoU of each.

    What is unknown, as all is when nothing is labelled, is None.
    """
    confusion = confusion.double()
    right, labelled, taken = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    union = labelled + taken - right
    iou = right / union  # NaN for a class that neither occurs nor is predicted
    return {
        "miou": known(iou[union > 0].mean()),
        "pixel_accuracy": known(right.sum() / confusion.sum()),
        "class_accuracy": known((right / labelled)[labelled > 0].mean()),
        "iou": [known(value) for value in iou],
    }


def known(value: Float[Tensor, ""]) -> float | None:
    """A number, and None for NaN, which JSON does not have."""
    return None if value.isnan() else value.item()


class Tally:
    """Pixels counted batch by batch: each class as what it was taken, and how much of it lay in coarse cells."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        alone: dict[str, Any] = {"sync_on_compute": False}  # processes are added up by whoever has several
        confusion = MulticlassConfusionMatrix(num_classes, ignore_index=IGNORE, validate_args=False, **alone)
        self.confusion = confusion.to(device)
        self.coarse = torch.zeros(num_classes, dtype=torch.float64, device=device)

    def add(self, labels: Sequence[Tensor], predictions: Sequence[Tensor], fine: Sequence[Tensor]) -> None:
        """Count a batch: label, prediction and share of fine windows of each pixel. Asks the device once, not for
        every image."""
        label = torch.cat([label.flatten() for label in labels])
        self.confusion.update(torch.cat([prediction.flatten() for prediction in predictions]), label)
        coarse = 1 - torch.cat([share.flatten() for share in fine]).double()
        num_classes = len(self.coarse)
        counted = torch.bincount(label.clamp(max=num_classes), coarse, minlength=num_classes + 1)  # ignored ones last
        self.coarse += counted[:num_classes]


@dataclass(frozen=True)
class Judged:
    """What is kept of a view until its batch is counted: not the probabilities, which are large."""

    prediction: Int[Tensor, "height width"]
    fine: Float[Tensor, "height width"]
    image: Float[Tensor, "c h w"]
    label: Int[Tensor, "height width"]
    window: Float[Tensor, "c s s"]  # the first
    masks: Float[Tensor, "n hc wc"]
    tokens: Int[Tensor, " n"]
    macs: Int[Tensor, " n"]


@torch.no_grad()
def judge(
    model: Segmenter,
    loader: Any,
    slide: Slide,
    tally: Tally,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Judged]:
    """Look at every image once and count its pixels in `tally`."""
    for batch in loader.iterate(0):
        with autocast():
            views = look(model, batch.images, [tuple(label.shape) for label in batch.labels], slide)
            pairs = zip(batch.images, batch.labels, strict=True)
            found = [decide(image, label, next(views)) for image, label in pairs]
        tally.add(batch.labels, [each.prediction for each in found], [each.fine for each in found])
        yield from found


def decide(image: Tensor, label: Tensor, view: View) -> Judged:
    return Judged(
        prediction=view.prob.argmax(0), fine=view.fine, image=image, label=label, window=view.windows[0],
        masks=view.masks, tokens=view.tokens, macs=view.macs,
    )  # fmt: skip


@torch.no_grad()
def evaluate_pixels(
    model: Segmenter, loader: Any, slide: Slide, num_samples: int = 24, seed: int = 0
) -> PixelEvaluation:
    """Look at every image once, packed. Which images are kept as samples is drawn from `seed`."""
    tally = Tally(model.num_classes, next(model.parameters()).device)
    tokens, macs, masks = [], [], []
    chosen: Chosen[PixelSamples] = Chosen(num_samples, seed)
    with packed(model) as model:
        for judged in judge(model, loader, slide, tally):
            tokens.append(judged.tokens)
            macs.append(judged.macs)
            masks.append(judged.masks)
            chosen.offer(sample, judged, slide)
    samples = join(chosen.kept())
    confusion = tally.confusion.compute().cpu()
    return PixelEvaluation(
        confusion=confusion,
        coarse=(tally.coarse.cpu() / confusion.sum(1)).float(),
        tokens=torch.cat(tokens).cpu(),
        macs=torch.cat(macs).cpu(),
        masks=torch.cat(masks).cpu(),
        num_images=len(tokens),
        samples=samples,
    )


def sample(judged: Judged, slide: Slide) -> PixelSamples:
    """An image's first window."""
    maps = torch.stack([judged.label, judged.prediction])[None].float()
    maps = F.interpolate(maps, size=judged.image.shape[1:], mode="nearest-exact")[0]
    maps = (cut(maps - IGNORE, slide)[:1] + IGNORE).long()  # so that padding, 0, is ignored
    columns = judged.window[None], judged.masks[:1], maps[:, 0], maps[:, 1]
    return PixelSamples(*(column.to("cpu", copy=True) for column in columns))
