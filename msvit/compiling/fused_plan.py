"""Batches of one size through a `FusedTrunk`: the device does not wait for the host.

    gate and layout  ->  embedding and first block  ->  the other blocks and the head
                     \\->  number of tokens to the host, which then knows how many slots the rest needs

While the number is on its way the first block runs, on as many slots as the last batches needed and some more. Where
these were too few, it runs again. All graphs work in the same memory, so that another number of slots costs none.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msvit.compiling.fused_trunk import FusedTrunk, PackedIndices, Workspace
from msvit.compiling.graphs import Captured
from msvit.compiling.plan import Plan, Planned, bucket
from msvit.types import GateOutput

HISTORY = 8  # batches from which the slots of the next one are predicted
PREDICTION_STEP = 2  # buckets: predictions are multiples of it


class FusedPlan(Plan):
    """A `Plan` for inference without a reducer, in one 16-bit dtype, with graphs."""

    trunk: FusedTrunk
    workspace: Workspace

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        device = self.mask.device
        self.indices = PackedIndices.empty(self.most, self.batch, bool(self.trunk.proportional_attention), device)
        self.recent: deque[int] = deque(maxlen=HISTORY)
        self.count = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.count_ready = torch.cuda.Event() if device.type == "cuda" else None

    def _image_buffer(self, image: Tensor) -> Tensor:
        self.workspace = Workspace(self.trunk, image, self.most)
        return self.workspace.image

    def __call__(self, image: Tensor, mask: Tensor | None) -> Planned:
        self.workspace.image.copy_(image)
        if mask is None and self.captures_gate:
            if self.small:
                decisions, *out = self._captured("all", image, self._decide_and_run)()
                return self._output(GateOutput(*decisions.unbind(0)), tuple(out))
            (decisions,) = self._captured("gate", image, self._decide_and_lay_out)()  # later graphs may use its memory
            return self._output(GateOutput(*decisions.unbind(0)), self._run_predicted(image))
        gate = self.model.gate(image) if mask is None else self.model.from_mask(mask, image)
        self.mask.copy_(gate.mask)
        if self.small or (self.all_fine and mask is None):
            return self._output(gate, self._captured("whole", image, self._lay_out_and_run)())
        self._captured("layout", image, self._lay_out).graph.replay()
        return self._output(gate, self._run_predicted(image))

    def _captured(self, name: Any, image: Tensor, call: Callable[[], tuple[Tensor, ...]]) -> Captured:
        """The graph of a call. To capture it is to run it, after which the workspace holds the image no more."""
        if name not in self.captured:
            assert self.pool is not None
            self.captured[name] = Captured(call, self.pool.handle)
            self.workspace.image.copy_(image)
        return self.captured[name]

    def _run_predicted(self, image: Tensor) -> tuple[Tensor, ...]:
        """Everything after the layout; the first block while the number of tokens is on its way to the host."""
        self.count.copy_(self.indices.cu_seqlens[-1:], non_blocking=True)
        if self.count_ready is not None:
            self.count_ready.record()
        predicted = self._predict()
        if predicted:
            self._run_first(image, predicted)
        if self.count_ready is not None:
            self.count_ready.synchronize()
        slots = bucket(int(self.count), self.most, self.mode)
        self.recent.append(slots)
        new = ("rest", slots) not in self.captured
        rest = self._captured(("rest", slots), image, lambda: self._rest(slots))
        if slots > predicted or new:
            self.workspace.image.copy_(image)
            self._run_first(image, max(slots, predicted))
        return rest()

    def _predict(self) -> int:
        """Slots that the next batch will hardly exceed; 0 before the first one."""
        if not self.recent or self.step is None:
            return 0
        wide = PREDICTION_STEP * self.step
        return min(self.most, -(-(max(self.recent) + self.step) // wide) * wide)

    def _run_first(self, image: Tensor, rows: int) -> None:
        self._captured(("first", rows), image, lambda: self._first(rows)).graph.replay()

    # What is captured

    def _decide_and_run(self) -> tuple[Tensor, ...]:
        decisions, *_ = self._decide_and_lay_out()
        self._first(self.most)
        return decisions, *self._rest(self.most)

    def _decide_and_lay_out(self) -> tuple[Tensor, ...]:
        decisions = self._decide(self.workspace.image)
        self.mask.copy_(decisions[3])
        self._lay_out()
        return (decisions,)

    def _lay_out_and_run(self) -> tuple[Tensor, ...]:
        self._lay_out()
        self._first(self.most)
        return self._rest(self.most)

    def _lay_out(self) -> tuple[Tensor, ...]:
        trunk = self.trunk
        self.indices.fill(self.mask, self.grid, trunk.backbone.num_prefix, trunk.proportional_attention)
        return ()

    def _first(self, rows: int) -> tuple[Tensor, ...]:
        indices = self.indices.clamped(rows)  # as many as were predicted: perhaps too few
        self.trunk.embed(indices, self.mask, self.grid, self.tables, self.workspace, rows)
        self.trunk.run_block(0, indices, self.grid, self.tables, self.workspace, rows)
        return ()

    def _rest(self, rows: int) -> tuple[Tensor, ...]:
        for index in range(1, len(self.trunk.backbone.host.blocks)):
            self.trunk.run_block(index, self.indices, self.grid, self.tables, self.workspace, rows)
        return self.trunk.finish(self.indices, self.grid, self.tables, self.workspace, rows, self.head)
