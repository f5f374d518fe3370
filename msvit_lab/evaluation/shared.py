"""What evaluations of classifiers and of Segmenters share.

    model = packed(model)
    drawn = drawn_samples(len(images), 24, seed=0)
    samples = concatenate([copy(image) for number, image in enumerate(images) if number in drawn])
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

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


def drawn_samples(num_images: int, num: int, seed: int) -> set[int]:
    """Numbers of the images that are kept as samples: the first, and others drawn from `seed`.

    The first, as there may be fewer images: bad ones are skipped.
    """
    return {0, *random.Random(seed).sample(range(1, num_images), min(num, num_images) - 1)}


def concatenate(rows: Sequence[T]) -> T:
    """Several records of tensors as one."""
    if not rows:
        raise ValueError("0 images were evaluated: there are none, or none that can be read; give other data")
    kind: Any = type(rows[0])
    return kind(**{part.name: torch.cat([getattr(row, part.name) for row in rows]) for part in fields(kind)})


def on_cpu(record: T) -> T:
    """A copy of a record of tensors: what they were cut from can be freed."""
    kind: Any = type(record)
    return kind(**{part.name: getattr(record, part.name).to("cpu", copy=True) for part in fields(kind)})
