"""Attention inside windows that may be partly empty: only occupied windows are gathered and attended.

    frame = Frame(size=(7, 7), shift=(3, 3))                      # how a block cuts its tokens into windows
    y = attend_windows(q, k, v, Finder(places), frame, bias, scale)   # q, k, v: (slots, heads, head_dim)

Each query attends to the tokens of its window; absent ones are masked out. In a shifted window, keys from the opposite
side of the image get -100 added to their scores, as in the hosts. Where the grid is padded to whole windows, padding is
a token of zeros that the hosts do not mask either: q, k and v then have one more row for it. With weights (a gate in
training, or masked mode) attention is Eq. 10.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.caching import cache_by_size
from msvit.execution.attention import choose_backend, weighted_attention
from msvit.fast.find_kernels import kernels
from msvit.shapes import Bool, Float, Int
from msvit.swin.cells import Places, spread

ABSENT, PADDING = -1, -2
MAX_AREA = 256  # tokens of a window that our kernel can hold
SHIFTED = -100.0  # added to the score of a key from the other side of the image


@dataclass(frozen=True)
class Frame:
    """A division into windows of `size` tokens, after all tokens have moved up and to the left by `shift`."""

    size: tuple[int, int]
    shift: tuple[int, int]

    @property
    def area(self) -> int:
        return self.size[0] * self.size[1]

    def num_windows(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return rows and columns of windows that cover a grid of tokens."""
        return -(-size[0] // self.size[0]), -(-size[1] // self.size[1])

    def pads(self, size: tuple[int, int]) -> bool:
        """Return whether a grid of tokens is padded to whole windows."""
        return any(have % side for have, side in zip(size, self.size, strict=True))


@dataclass(frozen=True)
class Windows:
    """The occupied windows of a batch."""

    slot: Int[Tensor, "windows area"]  # of each token of a window, ABSENT or PADDING
    mask: Float[Tensor, "some 1 #area area"] | None  # added to scores: -inf for absent keys, SHIFTED by `shift_mask`
    back: Int[Tensor, " slots"]  # the entry of `slot` that holds each slot


def cut(values: Int[Tensor, "b rows columns"], frame: Frame) -> Int[Tensor, "b windows area"]:
    """Shift tokens, pad with PADDING, and cut into windows."""
    (high, wide), (down, right) = frame.size, frame.shift
    values = values.roll((-down, -right), (1, 2)) if down or right else values
    values = F.pad(values, (0, -values.shape[2] % wide, 0, -values.shape[1] % high), value=PADDING)
    return values.unflatten(2, (-1, wide)).unflatten(1, (-1, high)).transpose(2, 3).flatten(3).flatten(1, 2)


def occupied(present: Bool[Tensor, "b rows columns"], frame: Frame) -> Bool[Tensor, "b windows"]:
    """Return which windows hold a token."""
    return (cut(present.long(), frame) > 0).any(2)


@cache_by_size
def shift_mask(size: tuple[int, int], frame: Frame, device: torch.device) -> Float[Tensor, "windows 1 area area"]:
    """Return the mask of shifted windows: SHIFTED for pairs of tokens from opposite sides of the image, else 0."""
    parts = []
    for num, side, shift in zip(frame.num_windows(size), frame.size, frame.shift, strict=True):
        place = torch.arange(num * side, device=device)
        parts.append((place >= (num - 1) * side).long() + (place >= num * side - shift).long())
    region = 3 * parts[0][:, None] + parts[1]  # which of 9 parts of the shifted image a token comes from
    region = cut(region[None], Frame(frame.size, (0, 0)))[0]  # (windows, area)
    return SHIFTED * (region[:, :, None] != region[:, None, :])[:, None]


def find_windows(places: Places, frame: Frame) -> Windows:
    """Find slots and mask of every window with a token. On a GPU this waits for their number, unless all have one."""
    if places.whole:
        return all_windows(places.batch, places.size, places.side, places.num_merges_left, frame, places.cell.device)
    slot = cut(places.map, frame)  # (b, windows, area)
    num_windows = slot.shape[1]
    here = (slot >= 0).any(2).flatten().nonzero()[:, 0]
    slot = slot.flatten(0, 1)[here]
    mask = torch.zeros(slot.shape, device=slot.device).masked_fill(slot == ABSENT, -torch.inf)[:, None, None, :]
    if any(frame.shift):
        mask = mask + shift_mask(places.size, frame, slot.device)[here % num_windows]
    return Windows(slot, mask, entries(slot, places.num_slots))


@cache_by_size
def all_windows(
    batch: int, size: tuple[int, int], side: int, num_merges_left: int, frame: Frame, device: torch.device
) -> Windows:
    """Find the windows of a batch without absent tokens."""
    cell = torch.arange(batch * size[0] * size[1] // side**2, device=device)
    num_slots = len(cell) * side**2
    cell = cell.view(batch, size[0] // side, size[1] // side)
    slot = cut(Places(cell, side, num_merges_left, num_slots, whole=True).map, frame).flatten(0, 1)
    mask = shift_mask(size, frame, device) if any(frame.shift) else None
    return Windows(slot, mask, entries(slot, num_slots))


def entries(slot: Int[Tensor, "windows area"], num_slots: int) -> Int[Tensor, " slots"]:
    """Invert `slot`: return the flat index in it that holds each slot."""
    entry = torch.arange(slot.numel(), device=slot.device)
    place = torch.where(slot < 0, num_slots, slot).flatten()  # absent ones go to one entry past the end
    return entry.new_zeros(num_slots + 1).scatter_(0, place, entry)[:-1]


class Finder:
    """The windows of one stage's tokens: found once, for all of its blocks."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._windows: dict[Frame, Windows] = {}

    def windows(self, frame: Frame) -> Windows:
        """Return the windows of a frame."""
        if frame not in self._windows:
            self._windows[frame] = find_windows(self.places, frame)
        return self._windows[frame]


def attend_windows(
    q: Float[Tensor, "rows heads head_dim"],
    k: Float[Tensor, "rows heads head_dim"],
    v: Float[Tensor, "rows heads head_dim"],
    finder: Finder,
    frame: Frame,
    bias: Float[Tensor, "heads area area"],
    scale: float,
) -> Float[Tensor, "slots heads head_dim"]:
    """Attend inside windows. `bias` is added to the scores. A row more than slots is that of padding."""
    places = finder.places
    q, k = q.type_as(v), k.type_as(v)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, bias))
    if places.weight is None and not needs_grad and can_fuse(v, frame):
        return kernels.window_attention(
            q, k, v, places.cell, places.rank, bias, places.num_slots, places.side, [*frame.size], [*frame.shift], scale
        )
    windows = finder.windows(frame)
    if not len(windows.slot):
        return v[: places.num_slots]  # padding at most, whose values do not matter
    some = windows.slot.amax(1, keepdim=True)  # for absent ones a token of their window: other images' may be NaN
    rows = torch.where(windows.slot == ABSENT, some, windows.slot)
    rows = torch.where(windows.slot == PADDING, v.shape[0] - 1, rows)
    q, k, v = (t[rows].transpose(1, 2) for t in (q, k, v))  # (windows, heads, area, head_dim)
    if places.weight is not None:
        added = bias if windows.mask is None else bias + repeated(windows.mask, len(q)).clamp(min=SHIFTED)
        y = weighted_attention(q, k, v, key_weight(places, windows), scale, added)
    else:
        y = naive_attention(q, k, v, bias, windows.mask, scale)
    return y.transpose(1, 2).flatten(0, 1)[windows.back]  # (slots, heads, head_dim)


def repeated(mask: Tensor, num: int) -> Tensor:
    """Repeat a mask that is the same for every image."""
    return mask if len(mask) == num else mask.repeat(num // len(mask), 1, 1, 1)


def can_fuse(v: Tensor, frame: Frame) -> bool:
    """Return whether our own kernel takes these values and windows."""
    return choose_backend(v.dtype, v.shape[-1], v.is_cuda) == "triton" and frame.area <= MAX_AREA


def naive_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend by two products and a softmax: windows are short, and fused kernels slower."""
    score = (q * scale) @ k.transpose(-2, -1) + bias.to(q.dtype)  # (windows, heads, area, area)
    score = score if mask is None else score + repeated(mask, len(q)).to(q.dtype)
    return score.softmax(-1) @ v


def key_weight(places: Places, windows: Windows) -> Float[Tensor, "windows 1 1 area"]:
    """Return w_j of each key: its cell's, 0 where it is absent, 1 for padding."""
    assert places.weight is not None
    token = spread(places.weight, places.side).flatten()  # in raster order
    slot = torch.where((slot := places.map) < 0, places.num_slots, slot).flatten()
    by_slot = token.new_zeros(places.num_slots + 2).index_put((slot,), token)
    last = torch.tensor([0.0, 1.0], dtype=token.dtype, device=token.device)
    by_slot = torch.cat([by_slot[: places.num_slots], last])
    absent = torch.where(windows.slot == ABSENT, places.num_slots, places.num_slots + 1)
    return by_slot[torch.where(windows.slot < 0, absent, windows.slot)][:, None, None, :]
