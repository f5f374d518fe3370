"""Sliding-window inference: a model of one input size on images of any size.

    slide = Slide(window=512)                               # windows of 512 px side by side
    slide = Slide(window=512, stride=341)                   # windows that overlap
    for found in predict(model, images, sizes, slide):      # images (3, h, w), each of its own size
        found.prob.argmax(0)                                # (H, W): at the size asked for
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from msvit.segmenter import Segmenter
from msvit_lab.evaluation.shared import Costs, concatenate


@dataclass(frozen=True)
class Slide:
    """Windows over an image."""

    window: int
    stride: int | None = None  # by default windows touch, and only the last overlaps another
    batch: int = 16  # windows at once

    def __post_init__(self) -> None:
        if self.stride is not None and self.stride > self.window:
            raise ValueError(f"stride is {self.stride}, but windows of {self.window} px leave gaps; make it smaller")


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    prob: Float[Tensor, "classes height width"]
    fine: Float[Tensor, "height width"]  # share of the windows over a pixel in which its cell is fine
    costs: Costs  # of each window


@torch.no_grad()
def predict(
    model: Segmenter, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]], slide: Slide
) -> Iterator[Prediction]:
    """Each image, at the size asked for it. The model gets windows of several images at once, but these are put
    together one by one: the probabilities of all would take gigabytes."""
    outputs = run(model, (window for image in images for window in cut(image, slide)), slide.batch)
    for image, size in zip(images, sizes, strict=True):
        canvas, costs = Canvas(image.shape[1:], slide), []
        for _ in range(canvas.num_windows):
            logits, cost = next(outputs)
            canvas.add(logits)
            costs.append(cost)
            del logits  # a view of a whole batch, which must be freed before the next is computed
        all_costs = concatenate(costs)
        yield Prediction(
            prob=resize(canvas.whole(), size).softmax(0),
            fine=resize(fine_pixels(all_costs.masks, model.coarse, image.shape[1:], slide), size)[0],
            costs=all_costs,
        )


def run(model: Segmenter, windows: Iterable[Tensor], batch: int) -> Iterator[tuple[Tensor, Costs]]:
    """Logits (classes, s, s) and costs of each window; the model gets `batch` at a time, of one image or several."""
    windows = iter(windows)
    while these := list(islice(windows, batch)):
        out = model(torch.stack(these))
        columns = out.tokens.count, model.encoder.macs_of(out, head=False), out.gate.mask.float()
        found = zip(out.logits, map(Costs, *(column.split(1) for column in columns)), strict=True)
        del out  # tokens and features are not needed while the windows are taken
        yield from found


def fine_pixels(
    masks: Float[Tensor, "n hc wc"], coarse: int, size: Sequence[int], slide: Slide
) -> Float[Tensor, "1 h w"]:
    """Share of the windows over a pixel in which its cell was fine."""
    fine = masks.repeat_interleave(coarse, 1).repeat_interleave(coarse, 2)
    return stitch(fine[:, None, : slide.window, : slide.window], size, slide)


def starts(length: int, slide: Slide) -> list[int]:
    """Where windows begin along a side; the last ends with the image."""
    last = max(0, length - slide.window)
    return [*range(0, last, slide.stride or slide.window), last]


def cut(image: Float[Tensor, "c h w"], slide: Slide) -> Float[Tensor, "n c s s"]:
    """All windows, row by row; an image smaller than one is padded with zeros to the right and below."""
    side = slide.window
    rows, columns = (starts(length, slide) for length in image.shape[1:])
    image = F.pad(image, (0, max(0, side - image.shape[2]), 0, max(0, side - image.shape[1])))
    return torch.stack([image[:, top : top + side, left : left + side] for top in rows for left in columns])


def stitch(parts: Float[Tensor, "n c s s"], size: Sequence[int], slide: Slide) -> Float[Tensor, "c h w"]:
    """The inverse of `cut`: where windows overlap, their mean."""
    canvas = Canvas(size, slide)
    for part in parts:
        canvas.add(part)
    return canvas.whole()


class Canvas:
    """Windows of an image, put together as they come, row by row."""

    def __init__(self, size: Sequence[int], slide: Slide) -> None:
        self.height, self.width = size
        self.side = slide.window
        places = [(top, left) for top in starts(self.height, slide) for left in starts(self.width, slide)]
        self.num_windows = len(places)
        self._places = iter(places)
        self._total = self._count = torch.zeros(0)

    def add(self, part: Float[Tensor, "c s s"]) -> None:
        if not len(self._total):
            size = max(self.height, self.side), max(self.width, self.side)
            exact = torch.promote_types(part.dtype, torch.float32)
            self._total = part.new_zeros(len(part), *size, dtype=exact)
            self._count = part.new_zeros(1, *size, dtype=exact)
        top, left = next(self._places)
        here = slice(None), slice(top, top + self.side), slice(left, left + self.side)
        self._total[here] += part
        self._count[here] += 1

    def whole(self) -> Float[Tensor, "c h w"]:
        """Once all windows are there."""
        return self._total.div_(self._count)[:, : self.height, : self.width]


def resize(image: Float[Tensor, "c h w"], size: Sequence[int]) -> Float[Tensor, "c h2 w2"]:
    if tuple(image.shape[1:]) == tuple(size):
        return image
    return F.interpolate(image[None], size=tuple(size), mode="bilinear", align_corners=False)[0]
