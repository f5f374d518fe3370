"""Plans: how batches of one size are run, with buffers and captured graphs of their own (`cuda.py` has the idea)."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msvit.backbones.base import version
from msvit.compile_regions import compiled_regions
from msvit.compiling.graphed_forward import PlainTrunk
from msvit.compiling.graphs import Captured, Pool
from msvit.execution.fused import has_hooks
from msvit.gates import AllFine, ContextGate, LearnedGate
from msvit.gates.fast import has_kernels
from msvit.types import ALIGNED_BYTES, GateOutput, ScaleGrid, TokenBatch

SMALL = 1024  # slots: batches that never need more run with room for all cells fine
NUM_BUCKETS = {"packed": 128, "trimmed": 16, "masked": 1}  # by mode: so many graphs at most for a batch size. Trimmed
# batches have few: the longest image differs from batch to batch by more than the sum of all does.
ALIGN = 64  # slots come in multiples of this
CAPTURED_GATES = (LearnedGate, ContextGate)  # other gates may wait for the device, which no graph can hold


def bucket_step(most: int, num_buckets: int) -> int | None:
    """From one number of slots to the next, up to `most`; None where all batches have room for all cells fine."""
    return None if most <= SMALL else -(-most // (num_buckets * ALIGN)) * ALIGN


def bucket(needed: int, most: int, step: int | None) -> int:
    """Slots for a batch of `needed` tokens, `most` if all cells were fine: the next multiple of the step."""
    return most if step is None else min(most, max(1, -(-needed // step)) * step)


def autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


class Plan:
    """How batches of one size are run: buffers, and what was captured so far."""

    def __init__(
        self, model: Any, trunk: PlainTrunk, image: Tensor, grid: ScaleGrid, learns: bool, half: torch.dtype | None,
        head: bool,
    ) -> None:  # fmt: skip
        self.model = weakref.proxy(model)  # which has the plan: in a cycle, graphs would outlive a dropped model
        self.grid, self.batch, self.learns, self.half = grid, image.shape[0], learns, half
        self.trunk, self.head, self.mode = trunk, head, model.mode
        self.gate = model.gate  # kept: plans are found by its id, which no other gate may get meanwhile
        self.most = trunk.slots(self.batch, self.batch * grid.num_cells, grid)
        self.step = bucket_step(self.most, self.num_buckets)
        self.small = self.step is None
        self.all_fine = type(model.gate) is AllFine
        self.captures_gate = type(self.gate) in CAPTURED_GATES and not (learns and has_hooks(self.gate))
        tables = trunk.tables(grid)
        self.tables = [None if t is None or learns else t.clone() for t in tables]
        self.sources = [] if learns else trunk.table_sources()
        self.weights = model._weights
        self.modules = [part for part in model.modules() if part is not model] if learns else []
        self.image = self.address = None  # how graphs get images: by a copy, or by their address
        if model.graphs and self._takes_address(image):
            self.address = torch.zeros((), dtype=torch.int64, device=image.device)
        elif model.graphs:
            self.image = torch.empty_like(image, memory_format=torch.contiguous_format)
        self.strides = torch.empty_like(image, device="meta").stride()  # dense, in the order of the image's own
        self.mask = torch.zeros(self.batch, *grid.cells, device=image.device)
        self.sample = torch.zeros_like(self.mask)  # of mode trimmed only
        self.captured: dict[Any, Captured] = {}
        self.pool = Pool() if model.graphs else None
        self.binding = self._binding()
        self.versions: list[int] | None = self._versions()  # None: tables must be made anew

    @property
    def num_buckets(self) -> int:
        return NUM_BUCKETS[self.mode]

    def bucket(self, needed: int) -> int:
        return bucket(needed, self.most, self.step)

    def _takes_address(self, image: Tensor) -> bool:
        """Whether all that reads such images in a graph are kernels. A gate for other channels raises its own error."""
        gate = self.gate
        if self.captures_gate and (has_hooks(gate) or gate.in_chans != image.shape[1] or not has_kernels(gate, image)):
            return False
        return self.trunk.takes_address(image)

    def place(self, image: Tensor) -> Tensor:
        """The image as graphs read it: in the buffer, or where it lies; unaligned or in another order it is copied."""
        if self.image is not None:
            return self.image.copy_(image)
        if self.address is not None:
            if image.stride() != self.strides or image.data_ptr() % ALIGNED_BYTES:
                image = image.new_empty_strided(image.shape, self.strides).copy_(image)
            self.address.fill_(image.data_ptr())
        return image

    def _binding(self) -> list[Any]:
        """What a capture is bound to: where each weight lies."""
        return [t.data_ptr() for t in self.weights]

    def _versions(self) -> list[int]:
        """Writes to the weights that tables are made of. All other weights are read where they lie."""
        return list(map(version, self.sources))

    def moved(self) -> bool:
        """Whether a capture may read freed memory. All but the first weight are checked by `is_fresh`."""
        return self.weights[0].data_ptr() != self.binding[0]

    def is_fresh(self) -> bool:
        """Whether the last result used the current weights. Else update tables or, if weights moved, drop all plans."""
        if self.binding != self._binding():
            self.model._plans.clear()
            return False
        versions = self._versions()
        if versions == self.versions:
            return True
        for table, new in zip(self.tables, self.trunk.tables(self.grid), strict=True):
            if table is not None and new is not None:
                table.copy_(new)
        self.versions = versions
        return False

    def __call__(self, image: Tensor, mask: Tensor | None) -> "Planned":
        image = self.place(image)
        if mask is None and self.captures_gate:
            if self.small:
                decisions, *out = self._replay("all", lambda: self._all(image))
                return self._output(GateOutput(*decisions.unbind(0)), tuple(out))
            gate = GateOutput(*self._replay("gate", lambda: (self._decide(image),))[0].unbind(0))
        else:
            gate = self.model.gate(image) if mask is None else self.model.from_mask(mask, image)
        full = self.all_fine and mask is None and self.mode == "packed"
        if self.small or full or self.mode == "masked":
            slots = self.most
        else:  # the only wait of a forward
            num_fine = int(self._num_fine(gate.mask > 0.5))
            slots = self.bucket(self.trunk.slots(self.batch, num_fine, self.grid))
        return self._output(gate, self._trunk(image, gate, slots, full))

    def _num_fine(self, fine: Tensor) -> Tensor:
        """Fine cells that slots are needed for; where images are padded, as many in each as in that with the most."""
        return fine.sum() if self.mode == "packed" else fine.sum((1, 2)).max() * self.batch

    def _trunk(self, image: Tensor, gate: GateOutput, slots: int, full: bool) -> tuple[Tensor, ...]:
        mask = gate.mask.float()
        if self.pool is None:
            return self._run(image, mask, gate.sample, slots, full)
        self.mask.copy_(mask)  # before a capture too: its tokens must fit these slots
        if self.mode == "trimmed":
            self.sample.copy_(gate.sample)
        return self._replay((slots, full), lambda: self._run(image, self.mask, self.sample, slots, full))

    def _replay(self, name: Any, call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if self.pool is None:
            return call()
        if name not in self.captured:
            with self._autocast():
                self.captured[name] = Captured(call, self.pool)
        return self.captured[name]()

    def _autocast(self) -> AbstractContextManager[Any]:
        """As outside, but without the cache of converted weights: a graph would not see them change."""
        return torch.autocast("cuda", dtype=self.half, enabled=self.half is not None, cache_enabled=False)

    def _decide(self, image: Tensor) -> Tensor:
        with compiled_regions(self.model.regional):  # not inside what is compiled: it would break there
            return self.model.decide(self.gate, image, self.address)

    def _all(self, image: Tensor) -> tuple[Tensor, ...]:
        decisions = self._decide(image)
        return decisions, *self._run(image, decisions[3], decisions[2], self.most, full=False)

    def _run(
        self, image: Tensor, mask: Tensor, sample: Tensor, slots: int, full: bool,
        weights: dict[str, nn.Parameter] | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        least = self.most if full else 0 if self.step is None else slots - self.step + 1
        arrays = self.trunk.pack_indices(mask.detach(), sample, self.grid, slots, least)
        for varies in () if self.model.regional else (image, mask, *arrays):
            torch._dynamo.maybe_mark_dynamic(varies, 0)
        with compiled_regions(self.model.regional):
            inputs = (image, mask, arrays, self.tables, full, self.head, self.address)
            return torch.func.functional_call(self.trunk, {**(weights or {})}, inputs)

    def _output(self, gate: GateOutput, parts: tuple[Tensor, ...]) -> "Planned":
        logits, parts = (parts[0], parts[1:]) if self.head else (None, parts)
        return Planned(gate, self.trunk.tokens(self.grid, self.batch, parts), logits)


class Planned(NamedTuple):
    """What a plan returns."""

    gate: GateOutput
    tokens: TokenBatch
    logits: Any  # None without the head
