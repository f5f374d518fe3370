"""What evaluations of classifiers and of Segmenters share.

    reservoir = Reservoir(size=24, seed=0)
    model = packed(model)
    for image in images:
        reservoir.offer(copy, image)          # copy(image) is called only if the image is drawn
    samples = concatenate(reservoir.items())
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Costs:
    """Tokens, multiply-adds and masks of some inputs: images of a classifier, windows of a Segmenter."""

    tokens: Tensor  # (n,)
    macs: Tensor  # (n,) of gate and encoder, for a classifier also of the head
    masks: Float[Tensor, "n hc wc"]


@dataclass(frozen=True)
class Samples:
    """Randomly drawn images, of a Segmenter the first window of each; labels and predictions are per image or pixel."""

    image: Float[Tensor, "n c h w"]
    mask: Float[Tensor, "n hc wc"]
    label: Tensor
    prediction: Tensor


@dataclass(frozen=True)
class Evaluation:
    scores: dict[str, Any]  # top1, top5 and loss; or miou, pixel_accuracy, class_accuracy and iou
    fine: dict[str, Any]  # shares of fine cells: of all, on objects and ground, or of each class
    num_images: int
    costs: Costs = field(repr=False)
    samples: Samples = field(repr=False)


def packed(model: Any) -> Any:
    """The model in evaluation and in packed mode, with the same weights."""
    model.eval()
    return model if model.mode == "packed" else model.with_options(mode="packed")


class Reservoir(Generic[T]):
    """A uniform sample, drawn from `seed`, of a stream of unknown length (bad images are skipped).

    Every item gets a random number, and those with the smallest are kept: neither the batches nor the items that come
    later change which numbers these are.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._draw = random.Random(seed)
        self._items: dict[float, T] = {}  # in the order they came

    def offer(self, make: Callable[..., T], *args: Any) -> None:
        """Draw for the next item; `make(*args)` is called only if it is kept."""
        number = self._draw.random()
        if len(self._items) == self.size:
            largest = max(self._items)
            if number > largest:
                return
            del self._items[largest]
        self._items[number] = make(*args)

    def items(self) -> list[T]:
        """In the order they came."""
        if not self._items:
            raise ValueError("0 images were evaluated: there are none, or none that can be read; give other data")
        return list(self._items.values())


def concatenate(rows: Sequence[T]) -> T:
    """Several records of tensors as one."""
    kind: Any = type(rows[0])
    return kind(**{part.name: torch.cat([getattr(row, part.name) for row in rows]) for part in fields(kind)})


def on_cpu(record: T) -> T:
    """A copy of a record of tensors: what they were cut from can be freed."""
    kind: Any = type(record)
    return kind(**{part.name: getattr(record, part.name).to("cpu", copy=True) for part in fields(kind)})
