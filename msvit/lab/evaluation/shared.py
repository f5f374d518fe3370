"""What evaluations of classifiers and of Segmenters share.

    chosen = Chosen(num=24, seed=0)
    with packed(model) as model:
        for image in images:
            chosen.offer(keep, image)      # keep(image) is called if it is among the chosen so far
    samples = join(chosen.kept())
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


@contextmanager
def packed(model: Any) -> Iterator[Any]:
    """The model in evaluation and in packed mode, with the same weights."""
    model.eval()
    yield model if model.mode == "packed" else model.with_options(mode="packed")


class Chosen(Generic[T]):
    """Some of the images that come by, drawn from `seed`; how many will come, nobody knows: bad ones are skipped.

    Each gets a random number, and those with the smallest stay. So neither batches nor what comes later matter to it.
    """

    def __init__(self, num: int, seed: int) -> None:
        if num < 1:
            raise ValueError(f"num_samples is {num}, but at least 1 image must be kept; 24 is usual")
        self.num = num
        self._draw = random.Random(seed)
        self._kept: dict[float, T] = {}  # in the order they came

    def offer(self, make: Callable[..., T], *given: Any) -> None:
        """The next image: `make(*given)` is called, and kept, only if the image is among the chosen so far."""
        number = self._draw.random()
        if len(self._kept) == self.num:
            largest = max(self._kept)
            if number > largest:
                return
            del self._kept[largest]
        self._kept[number] = make(*given)

    def kept(self) -> list[T]:
        """In the order they came."""
        if not self._kept:
            raise ValueError("0 images were evaluated: there are none, or none that can be read; give other data")
        return list(self._kept.values())


def join(rows: Sequence[T]) -> T:
    """Several records of tensors as one."""
    kind: Any = type(rows[0])
    return kind(**{part.name: torch.cat([getattr(row, part.name) for row in rows]) for part in fields(kind)})
