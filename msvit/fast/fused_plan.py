"""Batches of one size through a `FusedEncoder`: the device does not wait for the host.

    gate and layout  ->  pixels, embedding and first block  ->  the other blocks and the head
                     \\->  number of tokens to the host, which then knows how many slots the rest needs

While the number is on its way the first block runs, on as many slots as the last batches needed and some more. Where
these were too few, it runs again. All graphs work in the same memory, which has capacity for the largest batch so far
and a quarter more. Images are read by their address, which is written before the graphs run. Small batches run as one
graph.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from msvit.fast.encoders import PlainOutput
from msvit.fast.fused_encoder import FusedEncoder, PackedIndices
from msvit.fast.graphs import CountOnHost, Weights
from msvit.fast.plan import Plan, Planned
from msvit.types import GateOutput

HISTORY = 8  # batches from which the slots of the next one are predicted
PREDICTION_STEP = 2  # buckets: predictions are multiples of it
EXTRA_DIVISOR = 4  # the workspace has capacity for one more token in so many


class FusedPlan(Plan):
    """A `Plan` for inference without a reducer, in one 16-bit dtype, with graphs."""

    encoder: FusedEncoder
    num_buckets = 256  # graphs without memory of their own: narrow buckets cost little

    def __init__(self, model: Any, encoder: FusedEncoder, image: Tensor, *args: Any) -> None:
        super().__init__(model, encoder, image, *args)
        device, max_len = self.mask.device, encoder.backbone.num_prefix + self.grid.num_patches
        self.indices = PackedIndices.empty(self.max_slots, self.batch, max_len, device)
        self.workspace = encoder.workspace(image, self.max_slots if self.small or self.all_fine else 0)
        self.all_fine &= not self.small  # one graph for any mask
        self.recent: deque[int] = deque(maxlen=HISTORY)
        self.count = CountOnHost(device, torch.int32)

    def __call__(self, image: Tensor, mask: Tensor | None) -> Planned:
        if self.small:
            return super().__call__(image, mask)
        image = self.place(image)
        if mask is None and self.captures_gate:
            # Copies: later graphs may use the memory.
            (decisions,) = self._captured("gate", lambda: self._decide_and_lay_out(image))()
            return self._output(GateOutput(*decisions.unbind(0)), self._run_predicted(image))
        gate = self.model.gate(image) if mask is None else self.model.from_mask(mask, image)
        self.mask.copy_(gate.mask)
        self._captured("layout", self._lay_out).graph.replay()
        full = self.all_fine and mask is None
        return self._output(gate, self._run_blocks(image, self.max_slots, 0) if full else self._run_predicted(image))

    def _run_predicted(self, image: Tensor) -> PlainOutput:
        """Run all after the layout, the first block while the number of tokens is on its way to the host."""
        self.count.send(self.indices.cu_seqlens[-1])
        predicted = self._predict()
        if predicted:
            self._run_first(image, predicted)
        slots = self.bucket(self.count.wait())
        self.recent.append(slots)
        return self._run_blocks(image, slots, predicted)

    def _run_blocks(self, image: Tensor, slots: int, done: int) -> PlainOutput:
        """Run all blocks and the head; the first, which has run for `done` slots, only if these are too few."""
        if slots > self.workspace.rows:
            self._grow(slots)
        is_new = ("rest", slots) not in self.captured
        rest = self._captured(("rest", slots), lambda: self._rest(slots))
        if slots > done or is_new:
            self._run_first(image, max(slots, done))
        return rest()

    def _grow(self, slots: int) -> None:
        """More memory, and no graphs that use the old one."""
        if self.mask.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.captured = {name: graph for name, graph in self.captured.items() if isinstance(name, str)}
        self.workspace = self.encoder.workspace(self.workspace.x, self.bucket(slots + slots // EXTRA_DIVISOR))

    def _predict(self) -> int:
        """Slots that the next batch will hardly exceed; 0 before the first one."""
        if not self.recent or self.step is None:
            return 0
        wide = PREDICTION_STEP * self.step
        return min(self.workspace.rows, -(-(max(self.recent) + self.step) // wide) * wide)

    def _run_first(self, image: Tensor, rows: int) -> None:
        self._captured(("first", rows), lambda: self._first(image, rows)).graph.replay()

    # What is captured

    def _run(
        self, image: Tensor, mask: Tensor, sample: Tensor, slots: int, full: bool, weights: Weights | None = None
    ) -> PlainOutput:
        """Run all after the gate on so many slots, as small batches do; packed, they need no soft decisions."""
        assert weights is None, "for inference"
        self.mask.copy_(mask)
        self._lay_out()
        self._first(image, slots)
        return self._rest(slots)

    def _decide_and_lay_out(self, image: Tensor) -> tuple[Tensor]:
        decisions = self._decide(image)
        self.mask.copy_(decisions[3])
        self._lay_out()
        return (decisions,)

    def _lay_out(self) -> tuple[()]:
        self.indices.fill(self.mask, self.grid, self.encoder.backbone.num_prefix)
        return ()

    def _first(self, image: Tensor, rows: int) -> tuple[()]:
        indices, tables, workspace = self.indices.clamped(rows), self.tables, self.workspace
        self.encoder.embed(image, self.address, indices, self.grid, self.mask, tables, workspace, rows)
        self.encoder.run_blocks(range(1), indices, tables, workspace, rows)
        return ()

    def _rest(self, rows: int) -> PlainOutput:
        encoder, indices, tables, workspace = self.encoder, self.indices, self.tables, self.workspace
        encoder.run_blocks(range(1, len(encoder.backbone.host.blocks)), indices, tables, workspace, rows)
        return encoder.finish(indices, self.grid, tables, workspace, rows, self.head)
