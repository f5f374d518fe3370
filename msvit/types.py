"""The main data types: ScaleGrid, GateOutput, and TokenBatch with its Layout.

    grid   = ScaleGrid(224, 224, fine=16, coarse=32)   # pure geometry: 7x7 cells, 14x14 fine patches
    gate   = GateOutput.from_mask(mask)                    # what was decided for each cell, 1 = fine
    tokens = TokenBatch(x, layout)                     # features, and the image and token id of each slot

Every token that could exist in an image has an id: first the prefix tokens (class, distillation,
registers), then one per coarse cell, then one per fine patch, each in raster order. A `Layout` says which
of them run and in what order; everything about a token (scale, cell, area, position) follows from its id.

Constructors check their arguments. What msvit computes itself is made by `unchecked`.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor

from msvit.caching import cache_by_size
from msvit.checks import check_int, check_kind, check_tensor, is_traced, is_vmapped, shown
from msvit.shapes import Bool, Float, Int

IGNORE = 255  # the label of pixels that count nowhere
ALIGNED_BYTES = 16  # kernels read images at addresses that are multiples of it

Record = TypeVar("Record")


def unchecked(kind: type[Record], **values: Any) -> Record:
    """Make a record of values computed inside msvit, without the checks of its constructor; others are the defaults."""
    record = object.__new__(kind)
    for name, value in values.items():  # a call that torch.compile knows, as the constructor's are
        object.__setattr__(record, name, value)
    return record


def changed(record: Record, **values: Any) -> Record:
    """Replace some values of a record, as `dataclasses.replace` does, by others computed inside msvit."""
    instance: Any = record
    kept = {each.name: getattr(record, each.name) for each in fields(instance) if each.name not in values}
    return unchecked(type(record), **kept, **values)


@dataclass(frozen=True)
class ScaleGrid:
    """An image of `height` x `width` px, cut into coarse cells of k x k fine patches; k = 1: a dense model."""

    height: int
    width: int
    fine: int
    coarse: int

    def __post_init__(self) -> None:
        if is_traced():
            return
        for name in ("height", "width", "fine", "coarse"):
            check_int(name, getattr(self, name), at_least=1)
        check_scales(self.fine, self.coarse, min_factor=1)
        check_divides(self.height, self.width, self.coarse)

    @property
    def k(self) -> int:
        """Fine patches per side of a cell."""
        return self.coarse // self.fine

    @property
    def cells(self) -> tuple[int, int]:
        """(hc, wc): rows and columns of coarse cells."""
        return self.height // self.coarse, self.width // self.coarse

    @property
    def patches(self) -> tuple[int, int]:
        """(hf, wf): rows and columns of fine patches."""
        return self.height // self.fine, self.width // self.fine

    @property
    def num_cells(self) -> int:
        return (self.height // self.coarse) * (self.width // self.coarse)

    @property
    def num_patches(self) -> int:
        return (self.height // self.fine) * (self.width // self.fine)

    @property
    def num_ids(self) -> int:
        """Tokens an image could have, prefix not counted: one per cell and one per fine patch."""
        return self.num_cells + self.num_patches


def check_scales(fine: int, coarse: int, min_factor: int = 2) -> None:
    """Raise ValueError unless coarse is a multiple of fine, at least `min_factor` times."""
    check_int("coarse", coarse, example=2 * fine)
    if fine < 1 or coarse % fine or coarse < min_factor * fine:
        raise ValueError(
            f"coarse is {coarse}px and fine is {fine}px, but coarse must be {min_factor}, {min_factor + 1}, ... "
            f"times fine; pass coarse={2 * fine} for this patch size"
        )


def whole_cells(side: int, coarse: int) -> int:
    """Return the side of whole cells that is nearest, of two the larger."""
    return max(1, (2 * side + coarse) // (2 * coarse)) * coarse


def check_divides(height: int, width: int, coarse: int) -> None:
    """Raise ValueError unless cells divide the image."""
    if height < coarse or width < coarse or height % coarse or width % coarse:
        near = [whole_cells(side, coarse) for side in (height, width)]
        raise ValueError(
            f"image is {height}x{width}px, but cells of {coarse}px need a height and width of multiples of {coarse}; "
            f"resize it, for example to {near[0]}x{near[1]}"
        )


def check_image(image: object, coarse: int, num_channels: int | None = None) -> None:
    """Raise ValueError unless it is a batch of images of whole cells."""
    check_channels(image, num_channels)
    assert isinstance(image, Tensor)
    check_divides(image.shape[2], image.shape[3], coarse)


def check_channels(image: object, num_channels: int | None = None) -> None:
    """Raise ValueError unless it is a batch of images."""
    if not isinstance(image, Tensor) or image.ndim != 4 or not image.is_floating_point():
        got = f"{tuple(image.shape)} {image.dtype}" if isinstance(image, Tensor) else type(image).__name__
        raise ValueError(f"images must be a float tensor (b, c, h, w), got {got}; {_remedy(image)}")
    if 0 in image.shape:
        raise ValueError(f"the batch is empty: images is {tuple(image.shape)}; pass at least one image")
    if num_channels is not None and image.shape[1] != num_channels:
        if image.shape[3] == num_channels:
            raise ValueError(
                f"images are {tuple(image.shape)}, which looks like channels last: permute(0, 3, 1, 2) makes them "
                f"(b, {num_channels}, h, w)"
            )
        raise ValueError(
            f"images have {image.shape[1]} channels, but the model or gate was built for {num_channels}; "
            f"convert them, or build it with in_chans={image.shape[1]}"
        )


def _remedy(image: object) -> str:
    """Say how to make a batch of what was given for one."""
    prepare = "model.preprocessing(picture) makes a (c, h, w) tensor of a PIL image"
    if isinstance(image, Tensor):
        if image.ndim == 3 and image.is_floating_point():
            hwc = image.shape[2] == 3 != image.shape[0]
            return f"add a batch axis: images{'.permute(2, 0, 1)' if hwc else ''}[None]"
        pixels = image.dtype is torch.uint8
        return f"pixels must be normalised as for the host: {prepare}" if pixels else "add a batch axis or convert it"
    if type(image).__module__ == "numpy":
        return "make a tensor of it: torch.from_numpy(images).float()"
    one = image[0] if isinstance(image, list | tuple) and image else image
    if isinstance(one, Tensor):
        return "make one batch of them: torch.stack(images)"
    if isinstance(one, str | PathLike) or type(one).__module__.startswith("PIL."):
        return f"model.predict takes files and PIL images; for tensors, {prepare}"
    return "add a batch axis or convert it"


@dataclass(frozen=True)
class GateOutput:
    """A decision for every cell of every image."""

    logits: Float[Tensor, "b hc wc"]
    fine_prob: Float[Tensor, "b hc wc"]  # sigmoid(logits), noise-free: what the gate losses take
    sample: Float[Tensor, "b hc wc"]  # the soft decision with the noise of training (paper: m)
    mask: Float[Tensor, "b hc wc"]  # 1 = fine, 0 = coarse, NaN = no decision; straight-through gradient in training

    def __post_init__(self) -> None:
        check_tensor("logits", self.logits, (None, None, None), "b, hc, wc")
        for name in ("fine_prob", "sample", "mask"):
            check_tensor(name, getattr(self, name), tuple(self.logits.shape), "b, hc, wc of logits")

    @staticmethod
    def from_mask(mask: Tensor) -> "GateOutput":
        """Make a certain decision of a mask. A float mask keeps its gradient."""
        check_tensor("mask", mask, (None, None, None), "b, hc, wc", kind="real")
        mask = mask if mask.is_floating_point() else mask.float()
        return unchecked(GateOutput, logits=torch.logit(mask.detach()), fine_prob=mask, sample=mask, mask=mask)


def check_mask(mask: object, batch: int, cells: tuple[int, int]) -> None:
    """Raise ValueError unless it is one 0 or 1 for each cell of each image."""
    want = (batch, *cells)
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a tensor {want} of 0 (coarse) and 1 (fine), got {type(mask).__name__}")
    if tuple(mask.shape) != want:
        raise ValueError(
            f"mask is {tuple(mask.shape)}, but these images have cells {want} (b, hc, wc); give one value per cell"
        )
    if mask.is_complex():
        raise ValueError(f"mask is {mask.dtype}, but must be bool, integer or float; convert it with mask.float()")
    if mask.dtype is torch.bool or torch.compiler.is_compiling() or mask.is_meta or is_vmapped(mask):
        return
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    wrong = mask.detach()[(mask != 0) & (mask != 1)]
    if wrong.numel():
        raise ValueError(
            f"mask has values other than 0 (coarse) and 1 (fine), such as {wrong[0].item():g}; "
            f"threshold it first, for example mask > 0.5"
        )


@dataclass(frozen=True)
class Bucket:
    """Images of a packed layout that have about as many tokens, each in a row of its own."""

    images: Int[Tensor, " images"]
    slots: Int[Tensor, "images n"]  # a row shorter than the longest repeats its last slot
    real: Bool[Tensor, "images n"] | None  # which of them count; None: all


SLACK = 0.93  # the shortest image of a bucket has at least this share of the longest one's tokens


@dataclass(frozen=True)
class Layout:
    """The tokens that run, in order: all arrays have one entry per slot, image after image, prefix tokens first.

    A layout is a `PaddedLayout` or a `PackedLayout`. After a reduction a token may cover other patches than its id
    says: `patch_to_slot` then maps each patch to the slot that covers it.
    """

    grid: ScaleGrid
    num_prefix: int
    batch: int
    token: Int[Tensor, " slots"]  # token id
    image: Int[Tensor, " slots"]  # which image of the batch
    weight: Float[Tensor, " slots"]  # w_j of Eq. 10: 1 = active, 0 = inactive; carries the gate's gradient
    cu_seqlens: Int[Tensor, " b1"]  # (b + 1,) int32: image i has slots cu_seqlens[i]:cu_seqlens[i + 1]
    max_len: int  # no image has more slots than this
    size: Float[Tensor, " slots"] | None = None  # how often a key counts in attention, beside its weight; None: once
    patch_to_slot: Int[Tensor, "b patches"] | None = None  # after a reduction: the slot that covers a patch, -1: none
    initial_count: Int[Tensor, " b"] | None = None  # of a hierarchical host: tokens of an image before any was merged
    has_padding: bool = False  # whether slots after the last image may belong to none; they have weight 0
    has_inactive: bool = True  # whether tokens inside an image may have weight 0

    @property
    def valid(self) -> Bool[Tensor, " slots"]:
        """Whether each token is active."""
        return self.weight.detach() > 0.5

    @property
    def padding(self) -> Bool[Tensor, " slots"]:
        """Whether each slot belongs to no image."""
        return torch.arange(self.token.shape[0], device=self.token.device) >= self.cu_seqlens[-1]

    @property
    def patch_slots(self) -> Int[Tensor, " patches"]:
        """Slots of all tokens but prefix tokens, fine and coarse, computed without a device sync."""
        index = torch.arange(self.token.shape[0] - self.batch * self.num_prefix, device=self.token.device)
        if self.batch == 1:
            return index + self.num_prefix
        before = self.num_prefix * torch.arange(1, self.batch + 1, device=self.token.device)
        image = torch.searchsorted(self.cu_seqlens[1:].long() - before, index, right=True)
        return index + self.num_prefix * (image + 1).clamp(max=self.batch)

    @property
    def fine(self) -> Bool[Tensor, " slots"]:
        return self.token >= self.num_prefix + self.grid.num_cells

    @property
    def cell(self) -> Int[Tensor, " slots"]:
        """The cell a token lies in, in raster order; -1 for prefix tokens."""
        return id_table(self.grid, self.num_prefix, self.token.device)[0][self.token]

    @property
    def area(self) -> Int[Tensor, " slots"]:
        """Fine patches covered by a token: 1, k*k, or 0 for prefix tokens; after a reduction also any other number."""
        if self.patch_to_slot is None:
            return id_table(self.grid, self.num_prefix, self.token.device)[1][self.token]
        area = torch.zeros(self.token.shape[0] + 1, dtype=torch.long, device=self.token.device)
        past = self.token.shape[0]  # where dropped ones go
        slot = torch.where(self.patch_to_slot >= 0, self.patch_to_slot, past).flatten()
        return area.index_add(0, slot, torch.ones_like(slot))[:-1]

    @property
    def owner(self) -> Int[Tensor, "b patches"]:
        """The slot of the active token that covers each fine patch; -1 where a reducer has dropped it."""
        return self.covering(self.valid) if self.patch_to_slot is None else self.patch_to_slot

    def covering(self, which: Bool[Tensor, " slots"]) -> Int[Tensor, "b patches"]:
        """Return for each fine patch the slot of the token that covers it, of the slots in `which`; -1 if none does."""
        num_ids = self.num_prefix + self.grid.num_ids
        slot = torch.full((self.batch * num_ids + 1,), -1, device=self.token.device)
        slots = torch.arange(self.token.shape[0], device=slot.device)
        place = self.image * num_ids + self.token
        slot = slot.index_put((torch.where(which, place, self.batch * num_ids),), slots)  # others: one past the end
        slot = slot[:-1].view(self.batch, num_ids)
        first = self.num_prefix + self.grid.num_cells
        cell, _ = id_table(self.grid, self.num_prefix, slot.device)
        fine, coarse = slot[:, first:], slot[:, self.num_prefix + cell[first:]]
        return torch.where(fine >= 0, fine, coarse)

    def sum_by_image(self, x: Float[Tensor, "slots d"]) -> Float[Tensor, "b d"]:
        return x.new_zeros(self.batch, x.shape[1]).index_add(0, self.image, x)

    @property
    def count(self) -> Int[Tensor, " b"]:
        """Active tokens of each image, prefix not counted; of a hierarchical host, those it began with."""
        if self.initial_count is not None:
            return self.initial_count
        active = torch.zeros(self.batch, dtype=torch.long, device=self.token.device)
        return active.index_add(0, self.image, self.valid.long()) - self.num_prefix


@dataclass(frozen=True)
class PaddedLayout(Layout):
    """A layout with `max_len` slots for every image, some inactive (weight 0): masked and trimmed execution."""

    @property
    def patch_slots(self) -> Int[Tensor, " patches"]:
        slots = torch.arange(self.token.shape[0], device=self.token.device)
        return slots.view(self.batch, -1)[:, self.num_prefix :].flatten()


@dataclass(frozen=True)
class PackedLayout(Layout):
    """A layout with any number of tokens per image: only active ones, unless `has_inactive`."""

    has_inactive: bool = False  # True of a policy that is being trained, or padded execution in a compiled model

    @property
    def is_full(self) -> bool:
        """Whether every image has all the tokens it can have: counts are known without waiting."""
        return not self.has_padding and self.token.shape[0] == self.batch * self.max_len

    @cached_property
    def lengths(self) -> list[int]:
        """Slots of each image, as numbers. On a GPU this waits for the device; fused kernels do not need it."""
        return self.cu_seqlens.diff().tolist()

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The images of a packed layout, those of like length together, so that attention takes few calls."""
        lengths, device = self.lengths, self.token.device
        groups: list[list[int]] = []
        for image in sorted(range(self.batch), key=lengths.__getitem__, reverse=True):
            if groups and lengths[image] >= SLACK * lengths[groups[-1][0]]:
                groups[-1].append(image)
            else:
                groups.append([image])
        buckets = []
        for group in groups:
            longest, same = lengths[group[0]], lengths[group[0]] == lengths[group[-1]]
            images, step = torch.tensor(group, device=device), torch.arange(longest, device=device)
            start, end = self.cu_seqlens[images, None], self.cu_seqlens[images + 1, None]
            slots = start + step
            buckets.append(Bucket(images, torch.minimum(slots, end - 1), None if same else slots < end))
        return buckets

    @cached_property
    def from_buckets(self) -> Int[Tensor, " tokens"]:
        """The index of each slot in the concatenated rows of all buckets; padding has none."""
        place = torch.empty(sum(self.lengths), dtype=torch.long, device=self.token.device)
        begin = 0
        for bucket in self.buckets:
            rows = begin + torch.arange(bucket.slots.numel(), device=place.device).view_as(bucket.slots)
            real = slice(None) if bucket.real is None else bucket.real
            place[bucket.slots[real].flatten()] = rows[real].flatten()
            begin += bucket.slots.numel()
        return place


@cache_by_size
def id_table(grid: ScaleGrid, num_prefix: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cell and area of every token id."""
    cells = torch.arange(grid.num_cells, device=device)
    fine = cells.view(grid.cells).repeat_interleave(grid.k, 0).repeat_interleave(grid.k, 1).flatten()
    cell = torch.cat([torch.full((num_prefix,), -1, device=device), cells, fine])
    area = [torch.zeros_like(cell[:num_prefix]), torch.full_like(cells, grid.k**2), torch.ones_like(fine)]
    return cell, torch.cat(area)


@dataclass(frozen=True)
class TokenBatch:
    """Token features of a batch, one row per slot; the layout gives the image and the token id of each slot."""

    x: Float[Tensor, "slots d"]
    layout: Layout
    kept: tuple[Float[Tensor, " b"], ...] = ()  # share of each image's tokens that a policy in training kept, by stage

    def __post_init__(self) -> None:
        if is_traced():
            return
        check_kind("layout", self.layout, Layout, "a Layout, such as the one of output.tokens")
        if not isinstance(self.x, Tensor) or self.x.ndim != 2 or self.x.shape[0] != self.layout.token.shape[0]:
            slots = self.layout.token.shape[0]
            raise ValueError(f"x is {shown(self.x)}, but must be ({slots}, d): one row for each slot of the layout")

    def with_x(self, x: Tensor) -> "TokenBatch":
        """Return these tokens with other features."""
        return unchecked(TokenBatch, x=x, layout=self.layout, kept=self.kept)

    @property
    def prefix(self) -> Float[Tensor, "b p d"]:
        start = self.layout.cu_seqlens[:-1].long()
        return self.x[start[:, None] + torch.arange(self.layout.num_prefix, device=start.device)]

    @property
    def count(self) -> Int[Tensor, " b"]:
        return self.layout.count


@dataclass(frozen=True)
class Heads:
    """Queries and keys of a block's attention, after their norms and rotary embedding: the input of reducers."""

    q: Float[Tensor, "slots heads head_dim"]
    k: Float[Tensor, "slots heads head_dim"]
