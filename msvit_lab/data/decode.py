"""Decoding: image numbers become batches on the device, decoded in worker processes in every epoch.

    decoder = Decoder(source, RandomCrop(side=224, area=(0.9, 1.0)), seed=0)
    feed = DecodingFeed(decoder, Finish(mean, std, torch.device("cuda")), workers=8, skip_bad=True)
    for batch in feed.batches(epoch=0, rows=[np.array([4, 1]), np.array([0, 3])]):
        batch.image, batch.label            # or batch.images, batch.labels for whole images of segmentation
    feed.skipped                            # names of the bad images met

Workers change the speed and nothing else.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from msvit.types import IGNORE
from msvit_lab.data.augmentation import SeededRandAugment
from msvit_lab.data.items import Item, Source
from msvit_lab.data.opening import BadImage
from msvit_lab.data.transforms import Crop, Key, Scaled, cut, distort, thumbnail
from msvit_lab.interrupts import WARNINGS


@dataclass(frozen=True)
class Batch:
    """What a training loop takes: on the device, normalised. Padding is 0 in the image and IGNORE in a label map."""

    image: Float[Tensor, "b 3 h w"]
    label: Int64[Tensor, " b"] | Int64[Tensor, "b h w"] | Float[Tensor, "b classes"]  # shares of classes where mixed
    object_mask: Float[Tensor, "b h w"] | None = None  # share of each pixel that the object covers, where it is known


@dataclass(frozen=True)
class DenseImages:
    """What an evaluation of segmentation takes: on the device, images scaled, label maps as large as on disk."""

    images: list[Float[Tensor, "3 _ _"]]  # normalised
    labels: list[Int64[Tensor, "_ _"]]


class Decoded(NamedTuple):
    """Some images as they leave a decoder, one after the other in rows of bytes: workers send few tensors quickly."""

    pixels: UInt8[Tensor, " p"]  # (3, h, w) of each image: padded squares, or whole images
    label_maps: UInt8[Tensor, " q"]  # (h, w) of each image, if the source has label maps
    object_masks: UInt8[Tensor, " r"]  # (h, w) of each image, 0 to 255, if the source has them
    labels: list[int]
    filled: list[list[int]]  # rows and columns that show the image
    sizes: list[list[int]]  # height and width that image and label map had
    numbers: list[int]  # which images these are, or which views of them (as in Key)
    bad: list[BadImage]  # what was wanted and could not be read


class Decoder(Dataset):
    """(epoch, numbers of views) -> Decoded: image, label map and object mask cut alike. Runs in the workers.

    `augment` changes the image after the crop. It may move the object, so there are no object masks then.
    """

    def __init__(
        self, source: Source, crop: Crop, *, seed: int = 0, replace_bad: bool = False,
        augment: SeededRandAugment | None = None,
    ) -> None:  # fmt: skip
        self.source, self.crop, self.seed, self.replace_bad = source, crop, seed, replace_bad
        self.augment = augment

    def __getitem__(self, key: tuple[int, np.ndarray]) -> Decoded:
        epoch, wanted = key
        images, label_maps, masks = [], [], []
        part = Decoded(joined([]), joined([]), joined([]), [], [], [], [], [])
        for index in wanted.tolist():
            found = self.read(index, part.bad)
            if found is None:
                continue
            number, item = found
            size = np.array([[item.image.height, item.image.width]])
            thumb = thumbnail(item.label_map)[None] if item.label_map is not None and self.crop.random else None
            drawn = Key(self.seed, epoch, np.array([number]))
            windows = self.crop(size, drawn, thumb)
            image = cut(item.image, windows, self.crop.interpolation)
            images.append(image if self.augment is None else self.augment(image, drawn))
            if item.label_map is not None:
                rows, columns = windows.nearest(size)
                label_maps.append(item.label_map[rows[0][:, None], columns[0]] if self.crop.side else item.label_map)
            if item.object_mask is not None and self.augment is None:
                masks.append(cut(Image.fromarray(item.object_mask.astype(np.uint8) * 255), windows, "bilinear"))
            part.labels.append(-1 if item.label is None else item.label)
            part.filled.append(windows.filled[0].tolist())
            part.sizes.append(size[0].tolist())
            part.numbers.append(number)
        assert len(masks) in (0, len(images)), "a source has object masks for all of its images or for none"
        return part._replace(pixels=joined(images), label_maps=joined(label_maps), object_masks=joined(masks))

    def read(self, index: int, bad: list[BadImage]) -> tuple[int, Item] | None:
        """An image and the number of its view; where it is bad, the next good one or nothing.

        What was bad goes on the list.
        """
        num = len(self.source)
        view, image = divmod(index, num)
        for step in range(num if self.replace_bad else 1):
            here = (image + step) % num
            try:
                return here + view * num, self.source[here]
            except BadImage as error:
                bad.append(error)
        return None


def joined(images: list[np.ndarray]) -> UInt8[Tensor, " p"]:
    return torch.from_numpy(np.concatenate([image.ravel() for image in images] or [np.zeros(0, np.uint8)]))


class Finish:
    """Bytes -> what a model takes, on the device: colours distorted, (x / 255 - mean) / std, padding blank."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self.device = device
        self.mean, self.std = (torch.tensor(values, device=device).view(-1, 1, 1) * 255 for values in (mean, std))

    def to_device(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=True)

    def normalise(self, image: UInt8[Tensor, "*b 3 h w"] | Float[Tensor, "*b 3 h w"]) -> Float[Tensor, "*b 3 h w"]:
        return self.to_device(image).float().sub_(self.mean).div_(self.std)

    def batch(
        self, image: UInt8[Tensor, "b 3 s s"] | Float[Tensor, "b 3 s s"],
        label: Int64[Tensor, " b"] | UInt8[Tensor, "b s s"], *, object_mask: Tensor | None = None,
        filled: Int64[Tensor, "b 2"] | None = None, photometric: Key | None = None,
    ) -> Batch:  # fmt: skip
        """Move square crops to the device and normalise them.

        `filled`: rows and columns that show the image; beyond them images become 0 and label maps IGNORE.
        `photometric`: distort colours with random numbers from this key; None leaves them as they are.
        """
        image, label = self.to_device(image).float(), self.to_device(label).long()
        image = self.normalise(image if photometric is None else distort(image, photometric))
        if filled is not None:
            place, filled = torch.arange(image.shape[-1], device=self.device), self.to_device(filled)
            inside = (place < filled[:, :1])[:, :, None] & (place < filled[:, 1:])[:, None]  # (b, s, s)
            image, label = image.mul_(inside[:, None]), label.masked_fill_(~inside, IGNORE)
        mask = None if object_mask is None else self.to_device(object_mask).float() / 255
        return Batch(image=image, label=label, object_mask=mask)

    def squares(self, part: Decoded, side: int, photometric: Key | None) -> Batch:
        """Squares as they leave a decoder."""
        image = part.pixels.view(-1, 3, side, side)
        if len(part.label_maps):
            label, filled = part.label_maps.view(-1, side, side), torch.tensor(part.filled)
            return self.batch(image, label, filled=filled, photometric=photometric)
        mask = part.object_masks.view(-1, side, side) if len(part.object_masks) else None
        return self.batch(image, torch.tensor(part.labels), object_mask=mask)

    def wholes(self, part: Decoded) -> DenseImages:
        """Whole images as they leave a decoder."""
        images = self.to_device(part.pixels).split([3 * h * w for h, w in part.filled])
        labels = self.to_device(part.label_maps).long().split([h * w for h, w in part.sizes])
        return DenseImages(
            images=[self.normalise(image.view(3, *size)) for image, size in zip(images, part.filled, strict=True)],
            labels=[label.view(*size) for label, size in zip(labels, part.sizes, strict=True)],
        )


class DecodingFeed:
    """Runs a decoder in worker processes; bad images raise or go on the list `skipped`."""

    def __init__(
        self, decoder: Decoder, finish: Finish, *, workers: int, skip_bad: bool, photometric: bool = False
    ) -> None:
        self.decoder, self.finish, self.photometric = decoder, finish, photometric
        self.workers, self.skip_bad = workers, skip_bad
        self.skipped: list[str] = []

    def batches(self, epoch: int, rows: list[Int[np.ndarray, " b"]]) -> Iterator[Batch | DenseImages]:
        for part in self.decode(epoch, rows):
            if part.numbers and isinstance(self.decoder.crop, Scaled):
                yield self.finish.wholes(part)
            elif part.numbers:
                key = Key(self.decoder.seed, epoch, np.array(part.numbers))
                yield self.finish.squares(part, self.decoder.crop.side, key if self.photometric else None)

    def decode(self, epoch: int, rows: list[Int[np.ndarray, " b"]]) -> Iterator[Decoded]:
        loader = DataLoader(
            self.decoder,
            batch_size=None,
            sampler=[(epoch, row) for row in rows],
            num_workers=min(self.workers, len(rows)),
            collate_fn=unchanged,
            worker_init_fn=leave_interrupts_to_the_parent,
            pin_memory=self.finish.device.type == "cuda",
            generator=torch.Generator(),  # else the loader would draw from the global one
        )
        for part in loader:
            if part.bad and not self.skip_bad:
                raise part.bad[0]
            self.skip(part.bad)
            if len(self.skipped) == len(self.decoder.source):
                raise ValueError(f"all {len(self.skipped)} images are bad, none can be shown; the last: {part.bad[-1]}")
            yield part

    def skip(self, bad: list[BadImage]) -> None:
        self.skipped += dict.fromkeys(error.name for error in bad if error.name not in self.skipped)


def leave_interrupts_to_the_parent(worker: int) -> None:
    """They reach every process of a terminal or a job; the parent still needs its batch to end the step and save."""
    for number in (signal.SIGINT, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)


def unchanged(part: Any) -> Any:
    return part
