"""Store: every image and label map of a source, decoded once and kept as bytes on the device.

    store = Store(decoding)                   # decoding: Decoding(WholeDecoder(source, short_side), ...)
    store.cut(numbers, windows)               # squares for training, a whole batch at once
    store.whole(number)                       # one image and its label map, as they are

Images of any size lie one after the other in one long row of bytes, so none pays for the largest. A batch first
copies the part of each image that its window needs onto a canvas, then scales all canvases with two matrix products, as
`msvit.lab.data.resampling` does.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from msvit.lab.data.dense.decoding import WholeDecoder
from msvit.lab.data.dense.windows import THUMB, DenseWindows
from msvit.lab.data.feeds import free_memory
from msvit.lab.data.resampling import pixel_weights
from msvit.lab.data.workers import Decoding, next_good

PROBED = 64  # images from which the size of a cache is foretold
ROOM = 1.08  # so much more is kept free, as the others may be larger
CHUNK = 4  # images a worker hands over at once
STEP = 32  # canvases are multiples of this many px: fewer shapes, less memory held for each


class Squares(NamedTuple):
    image: Float[Tensor, "b 3 s s"]  # grey levels 0 to 255
    label: UInt8[Tensor, "b s s"]


class Whole(NamedTuple):
    image: UInt8[Tensor, "3 h w"]
    label: UInt8[Tensor, "h0 w0"]


class Bytes:
    """A row of bytes on the device that grows."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.data = torch.zeros(max(capacity, 1), dtype=torch.uint8, device=device)
        self.used = 0

    def append(self, part: UInt8[Tensor, " p"]) -> int:
        """Where the part begins."""
        start, stop = self.used, self.used + len(part)
        if stop > len(self.data):
            larger = torch.zeros(stop + stop // 8, dtype=torch.uint8, device=self.data.device)
            larger[:start] = self.data[:start]
            self.data = larger
        self.data[start:stop] = part.to(self.data.device, non_blocking=True)
        self.used = stop
        return start


class Canvas(NamedTuple):
    """Along one side: the pixel at which each canvas begins, and how many pixels all of them have."""

    first: Int[np.ndarray, " b"]
    num: int


def canvas(ends: Float[np.ndarray, "b 2"], count: Int[np.ndarray, " b"], side: int) -> Canvas:
    """Room for every pixel that counts between `ends` (in pixels) when these become `side` samples."""
    reach = np.maximum(abs(ends[:, 1] - ends[:, 0]) / side, 1)
    first = np.clip(np.floor(ends.min(1) - reach), 0, count - 1).astype(np.int64)
    last = np.minimum(np.ceil(ends.max(1) + reach), count).astype(np.int64)
    return Canvas(first, int(-(-(last - first).max() // STEP) * STEP))


class Store:
    """All images of a source. `good` says which could be read, `next_good` which stands in for each."""

    def __init__(self, decoding: Decoding) -> None:
        decoder, self.device = decoding.decoder, decoding.device
        num = len(decoder.source)
        expected = foretell(decoder)
        check_memory(num, ROOM * sum(expected) * num, self.device)
        pixels, labels = (Bytes(int(ROOM * each * num), self.device) for each in expected)
        self.start, self.label_start = np.zeros(num, np.int64), np.zeros(num, np.int64)
        self.size, self.label_size = np.ones((num, 2), np.int64), np.ones((num, 2), np.int64)
        self.thumb = np.zeros((num, THUMB, THUMB), np.uint8)
        self.names = [""] * num
        self.good = np.zeros(num, bool)
        for part in decoding.decode_once(np.array_split(np.arange(num), -(-num // CHUNK))):
            if not len(part.number):
                continue
            self.start[part.number] = pixels.append(part.pixels) + before(3 * part.size.prod(1))
            self.label_start[part.number] = labels.append(part.labels) + before(part.label_size.prod(1))
            self.size[part.number], self.label_size[part.number] = part.size, part.label_size
            self.thumb[part.number] = part.thumb
            self.good[part.number] = True
            for number, name in zip(part.number.tolist(), part.names, strict=True):
                self.names[number] = name
        spare = int(self.size.max()) + STEP  # a canvas may read beyond the last image
        pixels.append(torch.zeros(spare, dtype=torch.uint8))
        self.pixels, self.labels = pixels.data, labels.data
        self.next_good = next_good(self.good)

    def whole(self, number: int) -> Whole:
        (h, w), start = self.size[number].tolist(), int(self.start[number])
        (label_h, label_w), label_start = self.label_size[number].tolist(), int(self.label_start[number])
        return Whole(
            image=self.pixels[start : start + 3 * h * w].view(3, h, w),
            label=self.labels[label_start : label_start + label_h * label_w].view(label_h, label_w),
        )

    def cut(self, row: Int[np.ndarray, " b"], windows: DenseWindows) -> Squares:
        """The windows of these images. Padding holds anything."""
        return Squares(image=self.cut_images(row, windows), label=self.cut_labels(row, windows))

    def cut_images(self, row: Int[np.ndarray, " b"], windows: DenseWindows) -> Float[Tensor, "b 3 s s"]:
        height, width = self.size[row].T
        vertical, horizontal = windows.box[:, 1::2] * height[:, None], windows.columns() * width[:, None]  # (b, 2): px
        down, across = canvas(vertical, height, windows.side), canvas(horizontal, width, windows.side)
        line = np.minimum(down.first[:, None] + np.arange(down.num), height[:, None] - 1)  # (b, canvas h)
        plane = np.arange(3)[:, None] * (height * width)[:, None, None]  # (b, 3, 1)
        begin = (self.start[row] + across.first)[:, None, None] + plane + (line * width[:, None])[:, None]
        lines = self.pixels.unfold(0, across.num, 1)  # no copy: the bytes from each place on
        dtype = torch.float16 if self.pixels.is_cuda else torch.float32  # 11 bits are enough for 8
        canvases = lines[self.on_device(begin)].to(dtype)  # (b, 3, canvas h, canvas w)
        rows = self.weights(vertical, height, down, windows.side).to(dtype)  # (b, s, canvas h)
        columns = self.weights(horizontal, width, across, windows.side).to(dtype)  # (b, s, canvas w)
        narrow = canvases.flatten(1, 2) @ columns.mT  # (b, 3 * canvas h, s)
        return (rows[:, None] @ narrow.unflatten(1, (3, -1))).float().clamp_(0, 255)  # (b, 3, s, s)

    def weights(
        self, ends: Float[np.ndarray, "b 2"], count: Int[np.ndarray, " b"], where: Canvas, side: int
    ) -> Float[Tensor, "b s n"]:
        moved = np.stack([ends[:, 0] - where.first, ends[:, 1] - where.first, count - where.first])
        start, stop, num = self.on_device(moved.astype(np.float32))
        return pixel_weights(start, stop, num, canvas=where.num, size=side, interpolation="bilinear")

    def cut_labels(self, row: Int[np.ndarray, " b"], windows: DenseWindows) -> UInt8[Tensor, "b s s"]:
        samples = windows.samples(self.label_size[row])
        lines = self.label_start[row][:, None] + samples.rows * self.label_size[row][:, 1:]  # (b, s)
        return self.labels[self.on_device(lines)[:, :, None] + self.on_device(samples.columns)[:, None]]

    def on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def before(counts: Int[np.ndarray, " b"]) -> Int[np.ndarray, " b"]:
    """How many there are before each."""
    return np.cumsum(counts) - counts


def foretell(decoder: WholeDecoder) -> tuple[float, float]:
    """Mean bytes of an image and of a label map, from some that are spread over the source."""
    num = len(decoder.source)
    part = decoder[(0, np.unique(np.linspace(0, num - 1, min(num, PROBED)).astype(np.int64)))]
    found = max(len(part.number), 1)
    return len(part.pixels) / found, len(part.labels) / found


def check_memory(num_images: int, need: float, device: torch.device) -> None:
    """Refuse a cache that cannot fit, before an hour of decoding."""
    have = free_memory(device)
    if need > have:
        raise ValueError(
            f"a cache of {num_images} images with label maps needs about {need / 2**30:.1f} GiB, but {device} has "
            f"{have / 2**30:.1f} GiB; pass cache=False, or a smaller short_side"
        )
