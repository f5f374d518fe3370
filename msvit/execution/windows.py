"""Attention inside windows that may be partly empty: only occupied windows are gathered and attended.

    frame = Frame(size=(7, 7), shift=(3, 3))                      # how a block cuts its tokens into windows
    y = attend_windows(q, k, v, places, frame, bias, scale)       # q, k, v: (slots, heads, head_dim)

A query sees the tokens of its window. Absent ones it does not see; those that are foreign to it, because a shifted
window has wrapped around the image, it sees with 100 taken off their score, as the hosts have it. Where a grid of
tokens is filled up to whole windows, the padding is a token of zeros, which the hosts' queries see too: q, k and v
then have one more row for it. With weights (a mask that is being learned, or the masked mode) it is Eq. 10.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from msvit.execution.attention import choose_backend, weighted_attention
from msvit.execution.cells import Places, spread
from msvit.execution.fused import kernels

ABSENT, PADDING = -1, -2
FOREIGN = -100.0  # added to the score of a key from the other side of the image


@dataclass(frozen=True)
class Frame:
    """Windows of `size` tokens, after all tokens have moved up and to the left by `shift`."""

    size: tuple[int, int]
    shift: tuple[int, int]

    @property
    def area(self) -> int:
        return self.size[0] * self.size[1]

    def num_windows(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of windows that cover a grid of tokens."""
        return -(-size[0] // self.size[0]), -(-size[1] // self.size[1])

    def pads(self, size: tuple[int, int]) -> bool:
        return any(have % side for have, side in zip(size, self.size, strict=True))


@dataclass(frozen=True)
class Windows:
    """The occupied windows of a batch."""

    slot: Int[Tensor, "windows area"]  # of each token of a window, ABSENT or PADDING
    seen: Float[Tensor, "#windows 1 area area"]  # what is added to scores: -inf for absent keys, FOREIGN for foreign
    back: Int[Tensor, " slots"]  # the entry of `slot` that holds each slot


def cut(values: Int[Tensor, "b rows columns"], frame: Frame) -> Int[Tensor, "b windows area"]:
    """Move, fill up with PADDING, and cut into windows."""
    (high, wide), (down, right) = frame.size, frame.shift
    values = values.roll((-down, -right), (1, 2)) if down or right else values
    values = F.pad(values, (0, -values.shape[2] % wide, 0, -values.shape[1] % high), value=PADDING)
    return values.unflatten(2, (-1, wide)).unflatten(1, (-1, high)).transpose(2, 3).flatten(3).flatten(1, 2)


def occupied(present: Bool[Tensor, "b rows columns"], frame: Frame) -> Bool[Tensor, "b windows"]:
    """Which windows hold a token."""
    return (cut(present.long(), frame) > 0).any(2)


def foreign(size: tuple[int, int], frame: Frame, device: torch.device) -> Bool[Tensor, "windows area area"] | None:
    """Which keys of a window come from the other side of the image; None where nothing has moved."""
    if not any(frame.shift):
        return None
    parts = []
    for num, side, shift in zip(frame.num_windows(size), frame.size, frame.shift, strict=True):
        place = torch.arange(num * side, device=device)
        parts.append((place >= (num - 1) * side).long() + (place >= num * side - shift).long())
    region = 3 * parts[0][:, None] + parts[1]  # of the image, after it has moved
    region = cut(region[None], Frame(frame.size, (0, 0)))[0]  # (windows, area)
    return region[:, :, None] != region[:, None, :]


def find_windows(places: Places, frame: Frame) -> Windows:
    """On a GPU this waits for the number of occupied windows, unless all tokens are there."""
    slot = cut(places.map, frame)  # (b, windows, area)
    num_windows = slot.shape[1]
    other = foreign(places.size, frame, slot.device)
    seen = torch.zeros(1, 1, frame.area, frame.area, device=slot.device)
    if other is not None:
        seen = seen.repeat(num_windows, 1, 1, 1).masked_fill_(other[:, None], FOREIGN)
    if places.whole:
        slot, seen = slot.flatten(0, 1), seen if other is None else seen.repeat(places.batch, 1, 1, 1)
    else:
        here = (slot >= 0).any(2).flatten().nonzero()[:, 0]
        slot = slot.flatten(0, 1)[here]
        seen = (seen if other is None else seen[here % num_windows]).masked_fill(
            (slot == ABSENT)[:, None, None, :], -torch.inf
        )
    entry = torch.arange(slot.numel(), device=slot.device)
    place = torch.where(slot < 0, places.num_slots, slot).flatten()  # nobody's go to one entry past the end
    back = entry.new_zeros(places.num_slots + 1).scatter_(0, place, entry)[:-1]
    return Windows(slot=slot, seen=seen, back=back)


class Finder:
    """The windows of one stage's tokens: found once, for all of its blocks."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._found: dict[Frame, Windows] = {}

    def windows(self, frame: Frame) -> Windows:
        if frame not in self._found:
            self._found[frame] = find_windows(self.places, frame)
        return self._found[frame]


def attend_windows(
    q: Float[Tensor, "rows heads head_dim"],
    k: Float[Tensor, "rows heads head_dim"],
    v: Float[Tensor, "rows heads head_dim"],
    finder: Finder,
    frame: Frame,
    bias: Float[Tensor, "heads area area"],
    scale: float,
) -> Float[Tensor, "slots heads head_dim"]:
    """`bias` is added to the scores. A row more than slots is that of padding."""
    places = finder.places
    q, k = q.type_as(v), k.type_as(v)
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, bias))
    if places.weight is None and not learns and can_fuse(v, frame):
        return kernels.window_attention(
            q, k, v, places.cell, places.rank, bias, places.num_slots, places.side, [*frame.size], [*frame.shift], scale
        )
    windows = finder.windows(frame)
    rows = torch.where(windows.slot < 0, v.shape[0] - 1, windows.slot)  # absent ones: any row will do
    q, k, v = (t[rows].transpose(1, 2) for t in (q, k, v))  # (windows, heads, area, head_dim)
    if places.weight is not None:
        added = bias if not any(frame.shift) else bias + windows.seen.clamp(min=FOREIGN)
        y = weighted_attention(q, k, v, key_weight(places, windows), scale, added)
    else:
        y = spelled_out(q, k, v, (bias + windows.seen).to(q.dtype), scale)
    return y.transpose(1, 2).flatten(0, 1)[windows.back]  # (slots, heads, head_dim)


def can_fuse(v: Tensor, frame: Frame) -> bool:
    """Our own kernel, where there is one for these numbers."""
    return choose_backend(v.dtype, v.shape[-1], v.is_cuda) == "triton" and frame.area <= 256


def spelled_out(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float) -> Tensor:
    """Windows are short: two products and a softmax are faster than the fused kernels."""
    score = (q * scale) @ k.transpose(-2, -1) + added  # (windows, heads, area, area)
    return score.softmax(-1) @ v


def key_weight(places: Places, windows: Windows) -> Float[Tensor, "windows 1 1 area"]:
    """w_j of each key: its cell's, 0 where it is absent, 1 for padding."""
    assert places.weight is not None
    token = spread(places.weight, places.side).flatten()  # in raster order
    slot = torch.where(places.map < 0, places.num_slots, places.map).flatten()
    by_slot = token.new_zeros(places.num_slots + 2).index_put((slot,), token)
    last = torch.tensor([0.0, 1.0], dtype=token.dtype, device=token.device)
    by_slot = torch.cat([by_slot[: places.num_slots], last])
    nobody = torch.where(windows.slot == ABSENT, places.num_slots, places.num_slots + 1)
    return by_slot[torch.where(windows.slot < 0, nobody, windows.slot)][:, None, None, :]
