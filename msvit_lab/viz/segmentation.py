"""A segmentation run on one photograph: the gate's mask, and what is predicted.

    found = segment(photo, run, (photo.height, photo.width))     # as in the run's evaluation: at its own short side
    draw_prediction(photo, run, masks, labels)                   # the photograph with its masks, beside its classes
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from msvit.segmenter import Segmenter
from msvit_lab.config import Config
from msvit_lab.evaluation.sliding import Prediction, predict, starts
from msvit_lab.evaluation_files import name_of
from msvit_lab.tasks import slide
from msvit_lab.viz.pictures import PALETTE, label_picture, overlay, side_by_side

PANEL = 512  # px: panels are enlarged by whole numbers as long as their longer side is not above


@dataclass(frozen=True)
class SegmentationRun:
    """A trained Segmenter, and how images are prepared for it."""

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
