"""Plans: how batches of one size are run, with buffers and captured graphs of their own (`cuda.py` has the idea)."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from msvit.backbones.base import version
from msvit.fast.find_kernels import has_hooks
from msvit.fast.gates import has_kernels
from msvit.fast.graphs import Captured, Pool, Weights
from msvit.fast.regions import compiled_regions
from msvit.gates import AllFine, ContextGate, LearnedGate
from msvit.types import ALIGNED_BYTES, GateOutput, ScaleGrid, TokenBatch

SMALL = 1024  # slots: batches that never need more run with capacity for all cells fine
NUM_BUCKETS = {"packed": 128, "trimmed": 16, "masked": 1}  # by mode: so many graphs at most for a batch size. Trimmed
# batches have few: the longest image differs from batch to batch by more than the sum of all does.
ALIGN = 64  # slots come in multiples of this
CAPTURED_GATES = (LearnedGate, ContextGate)  # other gates may wait for the device, which no graph can hold


def bucket_step(max_slots: int, num_buckets: int) -> int | None:
    """Return the step between numbers of slots; None where all batches have capacity for all cells fine."""
    return None if max_slots <= SMALL else -(-max_slots // (num_buckets * ALIGN)) * ALIGN


def bucket(needed: int, max_slots: int, step: int | None) -> int:
    """Return the slots for `needed` tokens: the next multiple of the step, at most `max_slots` (all cells fine)."""
    return max_slots if step is None else min(max_slots, max(1, -(-needed // step)) * step)


def autocast_dtype() -> torch.dtype | None:
    """Return the dtype of autocast on CUDA, or None where it is off."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


class Plan:
    """Buffers and captured graphs with which batches of one size are run."""

    def __init__(
        self, model: Any, encoder: Any, image: Tensor, grid: ScaleGrid, needs_grad: bool, half: torch.dtype | None,
        head: bool,
    ) -> None:  # fmt: skip
        self.model = weakref.proxy(model)  # which has the plan: in a cycle, graphs would outlive a dropped model
        self.grid, self.batch, self.needs_grad, self.half = grid, image.shape[0], needs_grad, half
        self.encoder, self.head, self.mode = encoder, head, model.mode
        self.gate = model.gate  # kept: plans are found by its id, which no other gate may get meanwhile
        self.max_slots = encoder.slots(self.batch, self.batch * grid.num_cells, grid)
        self.step = bucket_step(self.max_slots, self.num_buckets)
        self.small = self.step is None
        self.all_fine = type(model.gate) is AllFine
        self.captures_gate = type(self.gate) in CAPTURED_GATES and not (needs_grad and has_hooks(self.gate))
        self.tables = tree_map(lambda t: None if t is None or needs_grad else t.clone(), encoder.tables(grid))
        self.sources = [] if needs_grad else encoder.table_sources()
        self.weights = model.tensors
        self.modules = [part for part in model.modules() if part is not model] if needs_grad else []
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
        """The largest number of graphs for a batch size."""
        return NUM_BUCKETS[self.mode]

    def bucket(self, needed: int) -> int:
        """Return the slots for a batch of `needed` tokens."""
        return bucket(needed, self.max_slots, self.step)

    def _takes_address(self, image: Tensor) -> bool:
        """Whether all that reads such images in a graph are kernels. A gate for other channels raises its own error."""
        gate = self.gate
        if self.captures_gate and (has_hooks(gate) or gate.in_chans != image.shape[1] or not has_kernels(gate, image)):
            return False
        return self.encoder.takes_address(image)

    def place(self, image: Tensor) -> Tensor:
        """Put the image where graphs read it: in the buffer or, by its address, where it is, copied if unaligned."""
        if self.image is not None:
            return self.image.copy_(image)
        if self.address is not None:
            if image.stride() != self.strides or image.data_ptr() % ALIGNED_BYTES:
                image = image.new_empty_strided(image.shape, self.strides).copy_(image)
            self.address.fill_(image.data_ptr())
        return image

    def _binding(self) -> list[Any]:
        """Return the addresses of weights that a capture is bound to."""
        return [t.data_ptr() for t in self.weights]

    def _versions(self) -> list[int]:
        """Return counts of writes to the weights that tables are made of. All others are read in place."""
        return list(map(version, self.sources))

    def moved(self) -> bool:
        """Return whether a capture may read freed memory. All but the first weight are checked by `is_fresh`."""
        return self.weights[0].data_ptr() != self.binding[0]

    def is_fresh(self) -> bool:
        """Return whether the last result used the current weights; else update tables or drop plans if they moved."""
        if self.binding != self._binding():
            self.model.drop_plans()
            return False
        versions = self._versions()
        if versions == self.versions:
            return True
        tables, current = tree_leaves(self.tables), tree_leaves(self.encoder.tables(self.grid))
        for table, new in zip(tables, current, strict=True):
            if table is not None and new is not None:
                table.copy_(new)
        self.versions = versions
        return False

    def __call__(self, image: Tensor, mask: Tensor | None) -> "Planned":
        image = self.place(image)
        if mask is None and self.captures_gate:
            if self.small:
                out = self._captured("all", lambda: self._decide_and_run(image))()
                return self._output(GateOutput(*out.decisions.unbind(0)), out)
            gate = GateOutput(*self._captured("gate", lambda: (self._decide(image),))()[0].unbind(0))
        else:
            gate = self.model.gate(image) if mask is None else self.model.from_mask(mask, image)
        full = self.all_fine and mask is None and self.mode == "packed"
        if self.small or full or self.mode == "masked":
            slots = self.max_slots
        else:  # the only wait of a forward
            num_fine = int(self._num_fine(gate.mask > 0.5))
            slots = self.bucket(self.encoder.slots(self.batch, num_fine, self.grid))
        if self.pool is None:
            return self._output(gate, self._run(image, gate.mask.float(), gate.sample, slots, full))
        self.mask.copy_(gate.mask)  # before a capture too: its tokens must fit these slots
        if self.mode == "trimmed":
            self.sample.copy_(gate.sample)
        run = self._captured((slots, full), lambda: self._run(image, self.mask, self.sample, slots, full))
        return self._output(gate, run())

    def _num_fine(self, fine: Tensor) -> Tensor:
        """Fine cells that slots are needed for; where images are padded, as many in each as in that with the most."""
        return fine.sum() if self.mode == "packed" else fine.sum((1, 2)).max() * self.batch

    def _captured(self, name: Any, call: Callable[[], Any]) -> Any:
        """Return the graph of a call, or without graphs the call itself. To capture it is to run it."""
        if self.pool is None:
            return call
        if name not in self.captured:
            with self._autocast():
                self.captured[name] = Captured(call, self.pool)
        return self.captured[name]

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return autocast as outside, but without its cache of weights: a graph would not see them change."""
        return torch.autocast("cuda", dtype=self.half, enabled=self.half is not None, cache_enabled=False)

    def _decide(self, image: Tensor) -> Tensor:
        with compiled_regions(self.model.regional):  # not inside what is compiled: it would break there
            return self.model.decide(self.gate, image, self.address)

    def _decide_and_run(self, image: Tensor) -> Any:
        decisions = self._decide(image)
        out = self._run(image, decisions[3], decisions[2], self.max_slots, False)
        return out._replace(decisions=decisions)

    def _run(
        self, image: Tensor, mask: Tensor, sample: Tensor, slots: int, full: bool, weights: Weights | None = None
    ) -> Any:
        """Run all after the gate on so many slots. `sample`: soft decisions; `weights`: instead of the encoder's."""
        min_slots = self.max_slots if full else 0 if self.step is None else slots - self.step + 1
        indices = self.encoder.pack_indices(mask.detach(), sample, self.grid, slots, min_slots)
        for varies in () if self.model.regional else (image, mask, *indices):
            torch._dynamo.maybe_mark_dynamic(varies, 0)
            if self.encoder.has_static_sizes:
                torch._dynamo.mark_static(varies, list(range(1, varies.ndim)))
        with compiled_regions(self.model.regional):
            inputs = (image, mask, indices, self.tables, full, self.head, self.address)
            return torch.func.functional_call(self.encoder, {**(weights or {})}, inputs)

    def _output(self, gate: GateOutput, out: Any) -> "Planned":
        return Planned(gate, self.encoder.tokens(self.grid, self.batch, out), out.logits)


class Planned(NamedTuple):
    """Output of a plan: an MSViTOutput whose parts are not checked again."""

    gate: GateOutput
    tokens: TokenBatch
    logits: Any  # None without the head
