"""What a source of images is, and what it gives; sources.py and scenes.py have those that there are."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image


@dataclass(frozen=True)
class Item:
    """One image with its target: a class, or a class for every pixel."""

    image: Image.Image  # RGB
    name: str
    label: int | None = None
    label_map: UInt8[np.ndarray, "h w"] | None = None  # 0 to num_classes - 1, or IGNORE
    object_mask: Bool[np.ndarray, "h w"] | None = None  # True where the labelled object is, where that is known


class Source(Protocol):
    """Images with targets. `classes[label]` is a label's name; `[i]` raises `BadImage` for one that is corrupt."""

    classes: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...
