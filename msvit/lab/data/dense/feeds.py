"""Dense feeds: from image numbers to batches with a label for every pixel, decoded again or from a store.

    DecodedCrops, CachedCrops      training: DenseBatch, squares of one size
    DecodedImages, CachedImages    evaluation: DenseImages, each of its own size

Windows and colours are drawn from seed, epoch and image number, so the two of each kind give the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from msvit.lab.data.crops import uniform
from msvit.lab.data.dense.colour import NUM_DRAWS, apply, colour_transform
from msvit.lab.data.dense.decoding import CropDecoder, WholeDecoder, Wholes
from msvit.lab.data.dense.store import Store
from msvit.lab.data.dense.windows import COLOUR, RandomWindow
from msvit.lab.data.feeds import Normalise
from msvit.lab.data.workers import Decoding
from msvit.types import IGNORE


@dataclass(frozen=True)
class DenseBatch:
    """What a training loop takes: on the device. Padding is 0 in the image and IGNORE in the label."""

    image: Float[Tensor, "b 3 s s"]  # normalised
    label: Int64[Tensor, "b s s"]


@dataclass(frozen=True)
class DenseImages:
    """What an evaluation takes: on the device, images scaled, label maps as large as they were."""

    images: list[Float[Tensor, "3 _ _"]]  # normalised
    labels: list[Int64[Tensor, "_ _"]]
    names: list[str]
    indices: list[int]  # numbers in the source


@dataclass(frozen=True)
class Finish:
    """Squares as cut out -> DenseBatch: colours distorted, normalised, padded."""

    normalise: Normalise
    photometric: bool
    seed: int

    def __call__(
        self,
        image: UInt8[Tensor, "b 3 s s"] | Float[Tensor, "b 3 s s"],
        label: UInt8[Tensor, "b s s"],
        filled: np.ndarray,
        *,
        epoch: int,
        index: np.ndarray,
    ) -> DenseBatch:
        device = self.normalise.device
        image = image.to(device, non_blocking=True).float()
        if self.photometric:
            image = apply(colour_transform(uniform(self.seed, epoch, index, NUM_DRAWS, COLOUR)), image)
        inside = shown(torch.from_numpy(filled).to(device, non_blocking=True), image.shape[-1])
        return DenseBatch(
            image=self.normalise.image(image).mul_(inside[:, None]),
            label=label.to(device, non_blocking=True).long().masked_fill_(~inside, IGNORE),
        )


def shown(filled: Int64[Tensor, "b 2"], side: int) -> Tensor:
    """True where a square shows its image, False where it is padding, (b, s, s)."""
    place = torch.arange(side, device=filled.device)
    return (place < filled[:, :1])[:, :, None] & (place < filled[:, 1:])[:, None]


class DecodedCrops(Decoding):
    """Training squares, decoded in worker processes in every epoch: any number of images."""

    def __init__(self, decoder: CropDecoder, finish: Finish, *, workers: int, skip_bad: bool) -> None:
        super().__init__(decoder, device=finish.normalise.device, workers=workers, skip_bad=skip_bad)
        self.finish = finish

    def batches(self, epoch: int, rows: list[np.ndarray]) -> Iterator[DenseBatch]:
        for part in self.decode(epoch, rows):
            if len(part.number):
                yield self.finish(part.image, part.label, part.filled, epoch=epoch, index=part.number)


class CachedCrops:
    """Training squares, cut on the device from images that were decoded once."""

    def __init__(self, decoding: Decoding, rule: RandomWindow, finish: Finish, replace_bad: bool) -> None:
        self.store, self.skipped = Store(decoding), decoding.skipped
        self.rule, self.finish, self.replace_bad = rule, finish, replace_bad

    def batches(self, epoch: int, rows: list[np.ndarray]) -> Iterator[DenseBatch]:
        store = self.store
        for row in rows:
            row = store.next_good[row] if self.replace_bad else row[store.good[row]]
            if not len(row):
                continue
            windows = self.rule(store.label_size[row], store.thumb[row], seed=self.finish.seed, epoch=epoch, index=row)
            squares = store.cut(row, windows)
            yield self.finish(squares.image, squares.label, windows.filled, epoch=epoch, index=row)


class DecodedImages(Decoding):
    """Whole images, decoded in worker processes."""

    def __init__(self, decoder: WholeDecoder, normalise: Normalise, *, workers: int, skip_bad: bool) -> None:
        super().__init__(decoder, device=normalise.device, workers=workers, skip_bad=skip_bad)
        self.normalise = normalise

    def batches(self, epoch: int, rows: list[np.ndarray]) -> Iterator[DenseImages]:
        for part in self.decode(epoch, rows):
            if len(part.number):
                yield self.unpack(part)

    def unpack(self, part: Wholes) -> DenseImages:
        pixels = part.pixels.to(self.device, non_blocking=True)
        labels = part.labels.to(self.device, non_blocking=True).long()
        images = zip(pixels.split((3 * part.size.prod(1)).tolist()), part.size.tolist(), strict=True)
        maps = zip(labels.split(part.label_size.prod(1).tolist()), part.label_size.tolist(), strict=True)
        return DenseImages(
            images=[self.normalise.image(image.view(3, *size)) for image, size in images],
            labels=[label.view(*size) for label, size in maps],
            names=part.names,
            indices=part.number.tolist(),
        )


class CachedImages:
    """Whole images, decoded once and kept on the device."""

    def __init__(self, decoding: Decoding, normalise: Normalise) -> None:
        self.store, self.normalise, self.skipped = Store(decoding), normalise, decoding.skipped

    def batches(self, epoch: int, rows: list[np.ndarray]) -> Iterator[DenseImages]:
        for row in rows:
            numbers = row[self.store.good[row]].tolist()
            if not numbers:
                continue
            wholes = [self.store.whole(number) for number in numbers]
            yield DenseImages(
                images=[self.normalise.image(whole.image) for whole in wholes],
                labels=[whole.label.long() for whole in wholes],
                names=[self.store.names[number] for number in numbers],
                indices=numbers,
            )
