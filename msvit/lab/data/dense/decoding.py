"""Decoding: images and label maps as they leave the workers.

    CropDecoder(source, rule, ...)[(epoch, numbers)]     # Crops: squares cut out for training
    WholeDecoder(source, short_side=512)[(0, numbers)]   # Wholes: evaluation, and what a cache is filled with
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from msvit.lab.data.dense.sources import DenseSource
from msvit.lab.data.dense.windows import DenseWindows, RandomWindow, scaled, thumbnail, to_short_side
from msvit.lab.data.sources import BadImage
from msvit.lab.data.workers import read


class Crops(NamedTuple):
    """Squares for training. What lies outside of `filled` is padding, and holds anything."""

    image: UInt8[Tensor, "b 3 s s"]
    label: UInt8[Tensor, "b s s"]
    filled: Int[np.ndarray, "b 2"]
    number: Int[np.ndarray, " b"]  # which images these are
    bad: list[BadImage]  # what was wanted and could not be read


class Wholes(NamedTuple):
    """Whole images of any size, one after the other in one row of bytes: workers hand over few tensors quickly."""

    pixels: UInt8[Tensor, " p"]  # each (3, h, w)
    labels: UInt8[Tensor, " q"]  # each (h, w), as large as it was
    size: Int[np.ndarray, "b 2"]  # of the images
    label_size: Int[np.ndarray, "b 2"]
    thumb: UInt8[np.ndarray, "b t t"]
    number: Int[np.ndarray, " b"]
    names: list[str]
    bad: list[BadImage]


class CropDecoder(Dataset):
    """(epoch, image numbers) -> Crops."""

    makes = Crops

    def __init__(self, source: DenseSource, rule: RandomWindow, *, seed: int, replace_bad: bool) -> None:
        self.source, self.rule, self.seed, self.replace_bad = source, rule, seed, replace_bad

    def __getitem__(self, key: tuple[int, np.ndarray]) -> Crops:
        epoch, wanted = key
        side = self.rule.side
        images = torch.zeros(len(wanted), 3, side, side, dtype=torch.uint8)
        labels = torch.zeros(len(wanted), side, side, dtype=torch.uint8)
        filled: list[np.ndarray] = []
        numbers: list[int] = []
        bad: list[BadImage] = []
        for index in wanted.tolist():
            found = read(self.source, index, bad, replace_bad=self.replace_bad)
            if found is None:
                continue
            number, item = found
            size = np.array([item.label_map.shape])
            thumb = thumbnail(item.label_map)[None]
            windows = self.rule(size, thumb, seed=self.seed, epoch=epoch, index=np.array([number]))
            height, width = windows.filled[0]
            rows, columns = windows.samples(size)
            row = len(numbers)
            images[row, :, :height, :width] = cut_window(item.image, windows)
            labels[row] = torch.from_numpy(item.label_map[rows[0][:, None], columns[0]])
            filled.append(windows.filled)
            numbers.append(number)
        return Crops(
            image=images[: len(numbers)],
            label=labels[: len(numbers)],
            filled=np.concatenate(filled) if filled else np.zeros((0, 2), np.int64),
            number=np.array(numbers, np.int64),
            bad=bad,
        )


def cut_window(image: Image.Image, windows: DenseWindows) -> UInt8[Tensor, "3 h w"]:
    """What the first window shows of its image, without padding."""
    left, top, right, bottom = np.minimum(windows.box[0], 1) * (image.size * 2)
    height, width = windows.filled[0].tolist()
    square = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, right, bottom)))
    square = square[:, ::-1] if windows.flip[0] else square
    return torch.from_numpy(np.array(square.transpose(2, 0, 1), order="C"))


class WholeDecoder(Dataset):
    """(epoch, image numbers) -> Wholes; images are scaled so that the shorter side is `short_side` px."""

    makes = Wholes

    def __init__(self, source: DenseSource, short_side: int | None) -> None:
        self.source, self.short_side = source, short_side

    def __getitem__(self, key: tuple[int, np.ndarray]) -> Wholes:
        bad: list[BadImage] = []
        found = [read(self.source, index, bad, replace_bad=False) for index in key[1].tolist()]
        good = [pair for pair in found if pair is not None]
        items = [item for _, item in good]
        images = [resized(item.image, self.short_side) for item in items]
        sizes = [image.shape[1:] for image in images]
        nothing = [np.zeros(0, np.uint8)]
        return Wholes(
            pixels=torch.from_numpy(np.concatenate([image.ravel() for image in images] or nothing)),
            labels=torch.from_numpy(np.concatenate([item.label_map.ravel() for item in items] or nothing)),
            size=np.array(sizes, np.int64).reshape(-1, 2),
            label_size=np.array([item.label_map.shape for item in items], np.int64).reshape(-1, 2),
            thumb=np.array([thumbnail(item.label_map) for item in items]),
            number=np.array([number for number, _ in good], np.int64),
            names=[item.name for item in items],
            bad=bad,
        )


def resized(image: Image.Image, short_side: int | None) -> UInt8[np.ndarray, "3 h w"]:
    size = np.array([[image.height, image.width]])
    height, width = scaled(size, to_short_side(size, short_side))[0].tolist()
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)
