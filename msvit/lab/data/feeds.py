"""Feeds: two ways from image numbers to batches on the device.

    DecodingFeed   decodes every image again in every epoch, in worker processes: any number of images
    CachedFeed     decodes every image once and keeps its bytes on the device, then cuts whole batches there
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from msvit.lab.data.crops import Crop
from msvit.lab.data.resampling import cut, resample
from msvit.lab.data.sources import BadImage, Source
from msvit.lab.data.workers import Decoding, next_good, read

CHUNK = 16  # images a worker hands over at once while a cache is filled


@dataclass(frozen=True)
class Batch:
    """What a training loop takes: on the device, normalised."""

    image: Float[Tensor, "b 3 h w"]
    label: Int[Tensor, " b"]
    object_mask: Float[Tensor, "b h w"] | None  # share of each pixel that the object covers, where it is known


class Normalise:
    """Grey levels 0 to 255 -> (x / 255 - mean) / std, on the device."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self.device = device
        self.mean = torch.tensor(mean, device=device).view(-1, 1, 1) * 255
        self.std = torch.tensor(std, device=device).view(-1, 1, 1) * 255

    def image(self, image: UInt8[Tensor, "*b 3 h w"] | Float[Tensor, "*b 3 h w"]) -> Float[Tensor, "*b 3 h w"]:
        return image.to(self.device, non_blocking=True).float().sub_(self.mean).div_(self.std)

    def __call__(self, image: Tensor, label: Tensor, mask: Tensor | None) -> Batch:
        image = self.image(image)
        mask = None if mask is None else mask.to(self.device, non_blocking=True).float() / 255
        return Batch(image=image, label=label.to(self.device, non_blocking=True), object_mask=mask)


class Rows(NamedTuple):
    """Some images as they leave the decoder: squares of bytes."""

    image: UInt8[Tensor, "b 3 s s"]
    label: Int[Tensor, " b"]
    mask: UInt8[Tensor, "b s s"] | None  # 0 to 255
    number: Int[Tensor, " b"]  # which images these are
    size: Int[Tensor, "b 2"]  # height and width they had
    bad: list[BadImage]  # what was wanted and could not be read


class Decoder(Dataset):
    """(epoch, image numbers) -> Rows: decoded, cut and resized. Runs in the workers."""

    makes = Rows

    def __init__(
        self, source: Source, crop: Crop, *, size: int, interpolation: str, seed: int, replace_bad: bool
    ) -> None:
        self.source, self.crop, self.seed = source, crop, seed
        self.size, self.interpolation, self.replace_bad = size, interpolation, replace_bad

    def __getitem__(self, key: tuple[int, np.ndarray]) -> Rows:
        epoch, wanted = key
        squares, masks, labels, numbers, sizes = [], [], [], [], []
        bad: list[BadImage] = []
        for index in wanted.tolist():
            found = read(self.source, index, bad, replace_bad=self.replace_bad)
            if found is None:
                continue
            number, item = found
            image = item.image if isinstance(item.image, Image.Image) else Image.fromarray(item.image)
            size = np.array([[image.height, image.width]])
            windows = self.crop(size, seed=self.seed, epoch=epoch, index=np.array([number]))
            box, flip = windows.box[0], bool(windows.flip[0])
            squares.append(cut(image, box, flip, size=self.size, interpolation=self.interpolation))
            if item.object_mask is not None:
                mask = Image.fromarray(item.object_mask.astype(np.uint8) * 255)
                masks.append(cut(mask, box, flip, size=self.size, interpolation="bilinear")[0])
            labels.append(item.label)
            numbers.append(number)
            sizes.append(size)
        assert len(masks) in (0, len(squares)), "a source has object masks for all of its images or for none"
        return Rows(
            image=torch.stack(squares) if squares else torch.empty(0, 3, self.size, self.size, dtype=torch.uint8),
            label=torch.tensor(labels, dtype=torch.long),
            mask=torch.stack(masks) if masks else None,
            number=torch.tensor(numbers, dtype=torch.long),
            size=torch.from_numpy(np.concatenate(sizes) if sizes else np.zeros((0, 2), np.int64)),
            bad=bad,
        )


class DecodingFeed(Decoding):
    """Decodes in worker processes. Workers change the speed and nothing else."""

    def __init__(self, decoder: Decoder, normalise: Normalise, *, workers: int, skip_bad: bool) -> None:
        super().__init__(decoder, device=normalise.device, workers=workers, skip_bad=skip_bad)
        self.normalise = normalise

    def batches(self, epoch: int, rows: list[np.ndarray]) -> Iterator[Batch]:
        for part in self.decode(epoch, rows):
            if len(part.label):
                yield self.normalise(part.image, part.label, part.mask)


def check_memory(num_images: int, size: int, device: torch.device) -> None:
    """Refuse a cache that cannot fit, before an hour of decoding."""
    need, have = num_images * 3 * size * size, free_memory(device)
    if need > have:
        raise ValueError(
            f"a cache of {num_images} images of {size}px needs {need / 2**30:.1f} GiB, but {device} has "
            f"{have / 2**30:.1f} GiB; pass cache=False, or a smaller cache_size"
        )


def free_memory(device: torch.device) -> float:
    """Bytes that a cache may take; infinitely many where nobody says."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float("inf")


class CachedFeed:
    """Every image is decoded once into a square of bytes on the device.

    Without a random crop these are the very squares that `decoding` gives. With one, they are the whole images,
    squeezed to `decoding.decoder.size`, and `crop` draws its windows in the shape each image had; so windows are
    exactly those of a `DecodingFeed`, and only detail finer than the stored square is lost.
    """

    def __init__(
        self, decoding: DecodingFeed, crop: Crop | None, *, size: int, interpolation: str, seed: int, replace_bad: bool
    ) -> None:
        decoder = decoding.decoder
        self.normalise, self.seed, self.skipped = decoding.normalise, seed, decoding.skipped
        self.crop, self.size, self.interpolation, self.replace_bad = crop, size, interpolation, replace_bad
        num, stored, device = len(decoder.source), decoder.size, decoding.normalise.device
        check_memory(num, stored, device)
        self.image = torch.empty(num, 3, stored, stored, dtype=torch.uint8, device=device)
        self.label = torch.zeros(num, dtype=torch.long, device=device)
        self.mask: Tensor | None = None
        self.shape = np.ones((num, 2), np.int64)
        good = np.zeros(num, bool)
        chunks = np.array_split(np.arange(num), -(-num // CHUNK))
        for part in decoding.decode_once(chunks):
            self.image[part.number] = part.image.to(device)
            self.label[part.number] = part.label.to(device)
            if part.mask is not None:
                if self.mask is None:
                    self.mask = torch.zeros(num, stored, stored, dtype=torch.uint8, device=device)
                self.mask[part.number] = part.mask.to(device)
            self.shape[part.number.numpy()] = part.size.numpy()
            good[part.number.numpy()] = True
        self.good, self.next_good = good, next_good(good)

    def batches(self, epoch: int, rows: list[np.ndarray]) -> Iterator[Batch]:
        for row in rows:
            row = self.next_good[row] if self.replace_bad else row[self.good[row]]
            if len(row):
                yield self.batch(epoch, row)

    def batch(self, epoch: int, row: np.ndarray) -> Batch:
        index = torch.from_numpy(row).to(self.image.device)
        image: Tensor = self.image[index]
        mask = None if self.mask is None else self.mask[index]
        if self.crop is not None:
            windows = self.crop(self.shape[row], seed=self.seed, epoch=epoch, index=row)
            image = resample(image, windows, size=self.size, interpolation=self.interpolation)
            if mask is not None:
                mask = resample(mask[:, None], windows, size=self.size, interpolation="bilinear")[:, 0]
        return self.normalise(image, self.label[index], mask)
