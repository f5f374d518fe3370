"""Preprocessing: from an image of any size to the tensor that a model takes, as in the evaluation of its training.

    prepare = Preprocessing(size=224, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", crop=0.9)
    prepare(Image.open("photo.jpg"))         # (3, 224, 224)
    model.preprocessing                      # as saved with a model, or as its host's pretrained_cfg has it
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from msvit.checks import check_choice, check_int, check_kind, check_number
from msvit.gates.base import Normalization
from msvit.image_files import as_rgb
from msvit.shapes import Float

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
CROP_MODES = ("center", "squash")
MAX_SIZE = 1 << 16  # px


@dataclass(frozen=True)
class Preprocessing:
    """Crop, size and normalisation. `mean` and `std` are of pixel values in [0, 1]."""

    size: int  # px of the square
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop: float = 1.0  # share of the image that is shown
    crop_mode: str = "center"  # a square, by the shorter side; squash: of both sides, squeezed into a square

    def __post_init__(self) -> None:
        check_int("size", self.size, at_least=1, at_most=MAX_SIZE, example=224)
        for name, values in vars(Normalization(self.mean, self.std)).items():
            object.__setattr__(self, name, values)
        check_number("crop", self.crop, above=0, at_most=1, example=0.9)
        check_choice("interpolation", self.interpolation, FILTERS)
        check_choice("crop_mode", self.crop_mode, CROP_MODES)

    @classmethod
    def of_config(cls, config: Mapping[str, Any], size: int | None = None) -> "Preprocessing | None":
        """Read timm's `pretrained_cfg`, for images of `size` px if given; None where it has no mean and std."""
        mean, std, sides = (config.get(name) for name in ("mean", "std", "input_size"))
        size = sides[-1] if size is None and sides else size
        if mean is None or std is None or size is None:
            return None
        crop, mode = config.get("crop_pct") or 1.0, config.get("crop_mode") or "center"
        return cls(size, tuple(mean), tuple(std), config.get("interpolation") or "bicubic", min(crop, 1.0), mode)

    def box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom, in px, of what is shown of an image."""
        shown = (min(width, height),) * 2 if self.crop_mode == "center" else (width, height)
        half = [self.crop * part / side / 2 for part, side in zip(shown, (width, height), strict=True)]
        return (
            max(0.5 - half[0], 0.0) * width, max(0.5 - half[1], 0.0) * height,
            min(0.5 + half[0], 1.0) * width, min(0.5 + half[1], 1.0) * height,
        )  # fmt: skip

    def __call__(self, image: Image.Image) -> Float[Tensor, "c size size"]:
        """Crop, resize and normalise an image."""
        check_kind("image", image, Image.Image, "a PIL image, such as PIL.Image.open(path)")
        image = as_rgb(image)
        box = self.box(*image.size)
        square = np.array(image.resize((self.size, self.size), FILTERS[self.interpolation], box=box))
        mean, std = (torch.tensor(values).view(-1, 1, 1) * 255 for values in (self.mean, self.std))
        return torch.from_numpy(square).permute(2, 0, 1).float().sub_(mean).div_(std)
