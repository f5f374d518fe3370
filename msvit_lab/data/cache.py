"""Cache: every image of a source, decoded once and kept as bytes on the device, from which whole batches are cut.

    cache = Cache(feed, crop, seed=0, replace_bad=True)    # feed: a DecodingFeed of what is stored
    cache.batches(epoch=0, rows=[np.array([4, 1])])        # as a DecodingFeed's
    with keep_decoded_in(folder):
        ...                     # what any process has decoded once for this folder is not decoded again

Without a random crop batches are those of the feed, to the bit. With one, classification stores whole images squeezed
to squares, and segmentation whole images at their short side. Windows are drawn in the shape that each image had, so
they are exactly those of decoding, and only detail finer than what is stored is lost.
"""

import hashlib
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from jaxtyping import Float, Int, UInt8
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from msvit.saving.file import replacing
from msvit_lab.data.decode import Batch, Decoded, Decoder, DecodingFeed, DenseImages
from msvit_lab.data.opening import BadImage
from msvit_lab.data.transforms import THUMB, Crop, Key, Scaled, Windows, pixel_weights, resample, thumbnail, weighted

CHUNK = 8  # images that a worker sends at once
PROBED = 64  # images from which the size of a cache is estimated
ROOM = 1.08  # how much larger than estimated it may be without a copy
STEP = 32  # canvases are multiples of this many px: fewer shapes, less memory held for each

KEPT: list[Path] = []  # the folder of the innermost `keep_decoded_in` last


class Plane:
    """Bytes of `num` images of any size one after the other, so that none takes the space of the largest."""

    def __init__(self, num: int, channels: int, bytes_per_image: float, device: torch.device) -> None:
        self.channels, self.capacity, self.device = channels, int(num * bytes_per_image), device
        self.data = torch.zeros(0, dtype=torch.uint8, device=device)
        self.used = 0
        self.start, self.size = np.zeros(num, np.int64), np.ones((num, 2), np.int64)

    def append(self, part: UInt8[Tensor, " p"], numbers: list[int], sizes: list[list[int]]) -> None:
        """The images of these numbers, heights and widths."""
        if not len(part):
            return
        self.size[numbers] = sizes
        counts = self.channels * self.size[numbers].prod(1)
        self.start[numbers] = self.used + np.cumsum(counts) - counts
        self.reserve(self.used + len(part))
        self.data[self.used : self.used + len(part)] = part.to(self.device, non_blocking=True)
        self.used += len(part)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > len(self.data):
            capacity = max(self.capacity, num_bytes + num_bytes // 8 if len(self.data) else num_bytes)
            larger = torch.zeros(capacity, dtype=torch.uint8, device=self.device)
            larger[: self.used] = self.data[: self.used]
            self.data = larger

    def whole(self, number: int) -> UInt8[Tensor, "c h w"]:
        size, start = (self.channels, *self.size[number].tolist()), self.start[number]
        return self.data[start : start + int(np.prod(size))].view(size)

    def squares(self, row: Int[np.ndarray, " b"]) -> UInt8[Tensor, "b c s s"]:
        """Images that all have one size."""
        count = self.channels * int(self.size[row[0]].prod())
        images = self.data[: self.used].view(-1, self.channels, *self.size[row[0]].tolist())
        return images[self.on_device(self.start[row] // count)]

    def cut(self, row: Int[np.ndarray, " b"], windows: Windows) -> Float[Tensor, "b c s s"]:
        """The windows of images of any size, bilinear. Padding holds anything.

        The part of each image that its window needs is copied onto a canvas, then all canvases are scaled at once.
        """
        height, width = self.size[row].T
        vertical, horizontal = windows.box[:, 1::2] * height[:, None], windows.columns() * width[:, None]  # (b, 2): px
        top, num_rows = canvas(vertical, height, windows.side)
        left, num_columns = canvas(horizontal, width, windows.side)
        line = np.minimum(top[:, None] + np.arange(num_rows), height[:, None] - 1)  # (b, canvas h)
        plane = np.arange(self.channels)[:, None] * (height * width)[:, None, None]  # (b, c, 1)
        begin = (self.start[row] + left)[:, None, None] + plane + (line * width[:, None])[:, None]
        self.reserve(self.used + num_columns)  # the last canvas may read beyond the last image
        lines = self.data.unfold(0, num_columns, 1)  # no copy: the bytes from each place on
        return weighted(
            lines[self.on_device(begin)],  # (b, c, canvas h, canvas w)
            self.weights(vertical, height, top, num_rows, windows.side),
            self.weights(horizontal, width, left, num_columns, windows.side),
        )

    def weights(
        self, ends: Float[np.ndarray, "b 2"], count: np.ndarray, first: np.ndarray, num: int, side: int
    ) -> Float[Tensor, "b s n"]:
        moved = np.stack([ends[:, 0] - first, ends[:, 1] - first, count - first])
        start, stop, inside = self.on_device(moved.astype(np.float32))
        return pixel_weights(start, stop, inside, canvas=num, size=side, interpolation="bilinear")

    def nearest(self, row: Int[np.ndarray, " b"], windows: Windows) -> UInt8[Tensor, "b s s"]:
        """The windows of label maps."""
        rows, columns = windows.nearest(self.size[row])
        lines = self.start[row][:, None] + rows * self.size[row][:, 1:]  # (b, s)
        return self.data[self.on_device(lines)[:, :, None] + self.on_device(columns)[:, None]]

    def on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def canvas(ends: Float[np.ndarray, "b 2"], count: np.ndarray, side: int) -> tuple[Int[np.ndarray, " b"], int]:
    """Along one side, the first pixel of each canvas and the number of pixels of all: every pixel that counts between
    `ends` (px) when these become `side` samples."""
    reach = np.maximum(abs(ends[:, 1] - ends[:, 0]) / side, 1)
    first = np.clip(np.floor(ends.min(1) - reach), 0, count - 1).astype(np.int64)
    last = np.minimum(np.ceil(ends.max(1) + reach), count).astype(np.int64)
    return first, int(-(-(last - first).max() // STEP) * STEP)


class Cache:
    """A feed from memory. `crop` is drawn anew in every epoch; None gives what is stored."""

    def __init__(self, feed: DecodingFeed, crop: Crop | None, *, seed: int, replace_bad: bool) -> None:
        self.finish, self.photometric, self.skipped = feed.finish, feed.photometric, feed.skipped
        self.crop, self.seed, self.replace_bad = crop, seed, replace_bad
        num, device = len(feed.decoder.source), feed.finish.device
        image_bytes, map_bytes = estimated_bytes(feed.decoder)
        check_memory(num, (image_bytes + map_bytes) * num, device)
        self.image, self.label_map = Plane(num, 3, image_bytes, device), Plane(num, 1, map_bytes, device)
        self.object_mask = Plane(num, 1, image_bytes / 3, device)
        self.label = torch.zeros(num, dtype=torch.long, device=device)
        self.shape = np.ones((num, 2), np.int64)
        self.thumb = np.zeros((num, THUMB, THUMB), np.uint8) if map_bytes else None
        self.good = np.zeros(num, bool)
        for part in decode_once(feed, np.array_split(np.arange(num), -(-num // CHUNK))):
            if part.numbers:
                self.add(part)
        good = np.flatnonzero(self.good)
        self.next_good = good[np.searchsorted(good, np.arange(num)) % len(good)]  # as Decoder.read finds them

    def add(self, part: Decoded) -> None:
        self.image.append(part.pixels, part.numbers, part.filled)
        self.object_mask.append(part.object_masks, part.numbers, part.filled)
        self.label_map.append(part.label_maps, part.numbers, part.sizes)
        self.label[part.numbers] = torch.tensor(part.labels, device=self.label.device)
        self.shape[part.numbers], self.good[part.numbers] = part.sizes, True
        if self.thumb is not None:
            maps = part.label_maps.split([h * w for h, w in part.sizes])
            self.thumb[part.numbers] = [thumbnail(m.view(*s).numpy()) for m, s in zip(maps, part.sizes, strict=True)]

    def batches(self, epoch: int, rows: list[Int[np.ndarray, " b"]]) -> Iterator[Batch | DenseImages]:
        make = self.squares if self.thumb is None else self.whole_images if self.crop is None else self.windows
        for row in rows:
            image = row % len(self.good)  # of each view
            row = row - image + self.next_good[image] if self.replace_bad else row[self.good[image]]
            if len(row):
                yield make(Key(self.seed, epoch, row))

    def squares(self, key: Key) -> Batch:
        """Views of images, with their classes."""
        numbers = key.index % len(self.good)
        label = self.label[self.image.on_device(numbers)]
        image = self.image.squares(numbers)
        mask = self.object_mask.squares(numbers) if self.object_mask.used else None
        if self.crop is not None:
            windows = self.crop(self.shape[numbers], key)
            image = resample(image, windows, self.crop.interpolation)
            mask = None if mask is None else resample(mask, windows, "bilinear")
        return self.finish.batch(image, label, object_mask=None if mask is None else mask[:, 0])

    def windows(self, key: Key) -> Batch:
        """Windows of images and of their label maps."""
        assert self.crop is not None
        assert self.thumb is not None
        windows = self.crop(self.shape[key.index], key, self.thumb[key.index])
        image, label = self.image.cut(key.index, windows), self.label_map.nearest(key.index, windows)
        filled = torch.from_numpy(windows.filled)
        return self.finish.batch(image, label, filled=filled, photometric=key if self.photometric else None)

    def whole_images(self, key: Key) -> DenseImages:
        numbers = key.index.tolist()
        return DenseImages(
            images=[self.finish.normalise(self.image.whole(number)) for number in numbers],
            labels=[self.label_map.whole(number)[0].long() for number in numbers],
        )


def estimated_bytes(decoder: Decoder) -> tuple[float, float]:
    """Bytes per image and per label map, with room; of whole images the mean of some, spread over the source."""
    if not isinstance(decoder.crop, Scaled):
        return 3.0 * decoder.crop.side**2, 0.0
    num = len(decoder.source)
    part = decoder[(0, np.unique(np.linspace(0, num - 1, min(num, PROBED)).astype(np.int64)))]
    found = max(len(part.numbers), 1)
    return ROOM * len(part.pixels) / found, ROOM * len(part.label_maps) / found


def check_memory(num_images: int, need: float, device: torch.device) -> None:
    """Raise ValueError for a cache that cannot fit, before an hour of decoding."""
    have = free_memory(device)
    if need > have:
        raise ValueError(
            f"a cache of {num_images} images needs about {need / 2**30:.1f} GiB, but {device} has "
            f"{have / 2**30:.1f} GiB; pass cache=False, or store smaller images (img_size, or short_side)"
        )


def free_memory(device: torch.device) -> float:
    """Bytes that a cache may take; infinitely many where that is unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float("inf")


@contextmanager
def keep_decoded_in(folder: Path) -> Iterator[None]:
    """Inside, decoded images lie in files there, for all caches and processes that need the same: they decode once."""
    KEPT.append(folder)
    try:
        yield
    finally:
        KEPT.pop()


def decode_once(feed: DecodingFeed, rows: list[np.ndarray]) -> Iterator[Decoded]:
    """What the feed decodes, or what another process has decoded of the same."""
    if not KEPT:
        yield from feed.decode(0, rows)
        return
    path = KEPT[-1] / hashlib.sha256(pickle.dumps((feed.decoder, rows, feed.skip_bad))).hexdigest()
    parts = None
    with FileLock(f"{path}.lock"):  # one decodes, the others wait for it
        if not path.is_file():
            parts = [deepcopy(part) for part in feed.decode(0, rows)]  # what workers send keeps files open
            with suppress(OSError, RuntimeError), replacing(path) as unfinished:  # a full disk
                write_parts(unfinished, parts)
    for part in parts or read_parts(path):
        feed.skip(part.bad)
        yield part


def write_parts(path: Path, parts: list[Decoded]) -> None:
    """What a decoder made, as safetensors: bytes as they are, the rest as JSON in the header."""
    tensors: dict[str, Tensor] = {}
    rest: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        values = part._asdict() | {"bad": [error.args for error in part.bad]}
        tensors |= {f"{number}.{name}": value for name, value in values.items() if isinstance(value, Tensor)}
        rest.append({name: value for name, value in values.items() if not isinstance(value, Tensor)})
    save_file(tensors, path, {"parts": json.dumps(rest)})


def read_parts(path: Path) -> Iterator[Decoded]:
    """Their bytes are mapped from the file and not copied."""
    with safe_open(path, framework="pt") as file:
        for number, rest in enumerate(json.loads(file.metadata()["parts"])):
            tensors = {name: file.get_tensor(f"{number}.{name}") for name in ("pixels", "label_maps", "object_masks")}
            yield Decoded(**tensors, **rest | {"bad": [BadImage(*error) for error in rest["bad"]]})
