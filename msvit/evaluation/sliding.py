"""Sliding windows: a model of one input size looks at images of any size, and what it says is put together again.

    slide = Slide(window=512)                               # Segmenter's evaluation: 512 px, side by side
    slide = Slide(window=512, stride=341, flip=True, scales=(0.75, 1.0, 1.25))
    for view in look(model, images, sizes, slide):          # images (3, h, w) of their own sizes each
        view.prob.argmax(0)                                 # (H, W): at the size asked for
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from msvit.segmenter import Segmenter


@dataclass(frozen=True)
class Slide:
    """How images are looked at. Several scales and flips are averaged as probabilities."""

    window: int
    stride: int | None = None  # by default windows touch and do not overlap but at the last
    flip: bool = False
    scales: tuple[float, ...] = (1.0,)
    batch: int = 16  # windows at once

    def __post_init__(self) -> None:
        if not 0 < (self.stride or self.window) <= self.window:
            raise ValueError(f"stride is {self.stride}, but windows of {self.window} px leave gaps; make it smaller")
        if not self.scales or min(self.scales) <= 0:
            raise ValueError(f"scales are {self.scales}, but need at least one above 0; 1.0 is the image as it is")


@dataclass(frozen=True)
class View:
    """What was seen of one image."""

    prob: Float[Tensor, "classes height width"]
    fine: Float[Tensor, "height width"]  # share of the windows over a pixel in which its cell was fine
    windows: Float[Tensor, "n c s s"]  # as the model got them: unscaled, unflipped
    masks: Float[Tensor, "n hc wc"]
    tokens: Int[Tensor, " n"]
    macs: Int[Tensor, " n"]  # of gate and encoder


@torch.no_grad()
def look(
    model: Segmenter, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]], slide: Slide
) -> Iterator[View]:
    """Each image, at the size asked for it."""
    total: list[Any] = [0.0] * len(images)
    views: list[dict[str, Tensor]] = []
    for scale in slide.scales:
        scaled = [rescale(image, scale) for image in images]
        windows = [cut(image, slide) for image in scaled]
        for flipped in (False, True) if slide.flip else (False,):
            found = run(model, [part.flip(3) if flipped else part for part in windows], slide.batch)
            for i, part in enumerate(found):
                logits = part["logits"].flip(3) if flipped else part["logits"]
                logits = stitch(logits.float(), scaled[i].shape[1:], slide)
                total[i] = total[i] + resize(logits, sizes[i]).softmax(0)
                if not flipped and scale == slide.scales[0]:
                    fine = part["mask"].repeat_interleave(model.coarse, 1).repeat_interleave(model.coarse, 2)
                    fine = stitch(fine[:, None, : slide.window, : slide.window], scaled[i].shape[1:], slide)
                    views.append({**part, "windows": windows[i], "fine": resize(fine, sizes[i])[0]})
    num = len(slide.scales) * (1 + slide.flip)
    for prob, view in zip(total, views, strict=True):
        yield View(prob / num, view["fine"], view["windows"], view["mask"], view["tokens"], view["macs"])


def run(model: Segmenter, windows: Sequence[Tensor], batch: int) -> list[dict[str, Tensor]]:
    """The windows of several images, `batch` at a time, whichever image they are of."""
    found = []
    for these in torch.cat(list(windows)).split(batch):
        out = model(these)
        macs = model.encoder_macs_of(out)
        found.append({"logits": out.logits, "mask": out.gate.mask.float(), "tokens": out.tokens.count, "macs": macs})
    lengths = [len(part) for part in windows]
    columns = {name: torch.cat([part[name] for part in found]).split(lengths) for name in found[0]}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(lengths))]


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


def stitch(
    parts: Float[Tensor, "n c s s"], size: Sequence[int], slide: Slide
) -> Float[Tensor, "c h w"]:
    """The inverse of `cut`: where windows overlap, their mean."""
    height, width = size
    places = [(top, left) for top in starts(height, slide) for left in starts(width, slide)]
    total = parts.new_zeros(parts.shape[1], max(height, slide.window), max(width, slide.window))
    count = parts.new_zeros(1, *total.shape[1:])
    for part, (top, left) in zip(parts, places, strict=True):
        total[:, top : top + slide.window, left : left + slide.window] += part
        count[:, top : top + slide.window, left : left + slide.window] += 1
    return (total / count)[:, :height, :width]


def rescale(image: Float[Tensor, "c h w"], scale: float) -> Float[Tensor, "c h2 w2"]:
    size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[2] * scale)))
    return image if scale == 1 else resize(image, size)


def resize(image: Float[Tensor, "c h w"], size: Sequence[int]) -> Float[Tensor, "c h2 w2"]:
    if tuple(image.shape[1:]) == tuple(size):
        return image
    return F.interpolate(image[None], size=tuple(size), mode="bilinear", align_corners=False)[0]
