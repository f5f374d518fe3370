"""Two segmentation runs on one photograph: image, gate's mask, and what each predicts (the paper's figure 13).

    pair = read_pair(Path("runs/gated"), Path("runs/dense"))
    for drawn in draw_segmentation(photo, pair, Path("photo.segmentation.png")):
        print(drawn)                                     # photo.segmentation.png: 586 of 1024 tokens (57 %)

Each run sees the photograph as in its evaluation: scaled to its own short side, in windows of its own size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from msvit.segmenter import Segmenter
from msvit_lab.config import Config
from msvit_lab.evaluation.sliding import Prediction, predict, starts
from msvit_lab.evaluation_files import name_of
from msvit_lab.hosts import read_run
from msvit_lab.runs import Run
from msvit_lab.tasks import slide
from msvit_lab.viz.compare import label
from msvit_lab.viz.pictures import PALETTE, label_picture, overlay, save_png, side_by_side, with_caption
from msvit_lab.viz.tokens import Drawn, in_words

PANEL = 512  # px: panels are enlarged by whole numbers as long as their longer side is not above


@dataclass(frozen=True)
class SegmentationRun:
    """A trained Segmenter, and how images are prepared for it."""

    name: str  # for readers
    model: Segmenter
    config: Config
    classes: list[str]

    @property
    def window_tokens(self) -> int:
        """Tokens of a window whose cells are all fine."""
        return (self.config.data.img_size // self.model.fine) ** 2

    def scaled(self, photo: Image.Image) -> tuple[int, int]:
        """Width and height at which the run sees a photograph: its shorter side as in the run's evaluation."""
        short = self.config.data.short_side
        factor = 1.0 if short is None else short / min(photo.size)
        return max(1, round(photo.width * factor)), max(1, round(photo.height * factor))

    def prepare(self, photo: Image.Image) -> Float[Tensor, "3 h w"]:
        """At that size, normalised."""
        data = self.config.data
        assert data.mean is not None, "a run has resolved it"
        assert data.std is not None, "a run has resolved it"
        pixels = torch.from_numpy(np.array(photo.resize(self.scaled(photo), Image.Resampling.BILINEAR)))
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.std))
        return (pixels.permute(2, 0, 1) / 255 - mean) / std


class Pair(NamedTuple):
    mixed: SegmentationRun
    other: SegmentationRun


def read_pair(mixed: Path, other: Path) -> Pair:
    """Both runs; raises ValueError unless both segment, into the same classes."""
    pair = Pair(read_segmenter(mixed), read_segmenter(other))
    if pair.mixed.classes != pair.other.classes:
        raise ValueError(
            f"{mixed} has {len(pair.mixed.classes)} classes and {other} {len(pair.other.classes)}, which are not the "
            f"same; give runs that were trained on the same data"
        )
    return pair


def read_segmenter(folder: Path) -> SegmentationRun:
    run = Run(folder)
    if run.config.task != "segment":
        raise ValueError(
            f"{folder} is no segmentation run (its task is {run.config.task}), but --against compares predicted label "
            f"maps; give two runs of a segmentation recipe, such as voc or ade20k, or leave out --against"
        )
    model, config = read_run(folder)
    return SegmentationRun(label(run), model.eval(), config, run.classes)


def draw_segmentation(photo: Image.Image, pair: Pair, picture: Path) -> Iterator[Drawn]:
    """Image, mask, prediction of the first run, prediction of the second."""
    mixed, other = pair
    shown, scale = panel(photo, mixed)
    first, second = (segment(photo, run, (shown.shape[0], shown.shape[1])) for run in pair)
    labels = [found.prob.argmax(0).numpy() for found in (first, second)]
    tokens, most = int(first.costs.tokens.sum()), mixed.window_tokens * len(first.costs.tokens)
    same = f"{(labels[0] == labels[1]).mean():.0%} of pixels as {mixed.name}".replace("%", " %")
    panels = [
        (shown, "image"),
        (draw_masks(shown, first.costs.masks.numpy(), mixed, scale), f"mask: {in_words(tokens, most)}"),
        (label_picture(labels[0]), mixed.name),
        (label_picture(labels[1]), f"{other.name}: {same}"),
    ]
    classes = legend(np.stack(labels), mixed)
    row = side_by_side([with_caption(panel, text) for panel, text in panels])
    yield Drawn(save_png(with_caption(row, "predicted classes:", classes), picture), tokens, most)


def draw_prediction(
    photo: Image.Image, run: SegmentationRun, masks: UInt8[np.ndarray, "n hc wc"], labels: np.ndarray
) -> UInt8[np.ndarray, "height width 3"]:
    """The photograph with the masks of its windows beside its classes (h, w) in colour."""
    shown, scale = panel(photo, run)
    size = shown.shape[1], shown.shape[0]
    resized = np.array(Image.fromarray(labels.astype(np.uint8)).resize(size, Image.Resampling.NEAREST))
    return side_by_side([draw_masks(shown, masks, run, scale), label_picture(resized)])


def panel(photo: Image.Image, run: SegmentationRun) -> tuple[UInt8[np.ndarray, "height width 3"], int]:
    """The photograph at the size that the run sees, enlarged by a whole number, and that number."""
    width, height = run.scaled(photo)
    scale = max(1, PANEL // max(width, height))
    return np.array(photo.resize((width * scale, height * scale), Image.Resampling.BICUBIC)), scale


def legend(labels: np.ndarray, run: SegmentationRun) -> list[tuple[np.ndarray, str]]:
    """A patch of its colour, and the name, of each class there is."""
    return [
        (np.full((64, 64, 3), PALETTE[index], np.uint8), name_of(index, run.classes))
        for index in np.unique(labels).tolist()
    ]


@torch.inference_mode()
def segment(photo: Image.Image, run: SegmentationRun, size: tuple[int, int]) -> Prediction:
    """The prediction of a run at this height and width."""
    image = run.prepare(photo).to(next(run.model.parameters()).device)
    (found,) = predict(run.model, [image], [size], slide(run.config))
    return found


def draw_masks(
    shown: np.ndarray, masks: UInt8[np.ndarray, "n hc wc"], run: SegmentationRun, scale: int
) -> UInt8[np.ndarray, "height width 3"]:
    """The mask of each window where it lies on the picture, which has `scale` x `scale` px for each px of the run.

    Where windows overlap, that of the last is shown.
    """
    how, k = slide(run.config), run.model.coarse // run.model.fine
    height, width = shown.shape[:2]
    side = how.window * scale
    plain = np.pad(shown, ((0, max(0, side - height)), (0, max(0, side - width)), (0, 0)))
    drawn = plain.copy()
    corners = product(starts(height // scale, how), starts(width // scale, how))
    for (top, left), mask in zip(corners, masks, strict=True):
        part = np.s_[top * scale : top * scale + side, left * scale : left * scale + side]
        drawn[part] = overlay(plain[part], mask, k)
    return drawn[:height, :width]
