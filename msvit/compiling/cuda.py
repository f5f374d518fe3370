"""On a GPU: everything after the gate is compiled once for all token counts, and replayed as a CUDA graph.

A forward has two stages, and between them the one number a packed batch needs: how many cells are fine.

    gate    images -> decisions                    compiled and captured if among CAPTURED_GATES, else eager
    trunk   images, decisions, slots -> output     captured once for each number of slots, in training with backward

What a slot is and what the trunk does is up to the host (`graphed_forward.py`).

The number of slots is rounded up to the next bucket, so that few graphs suffice for all batches of one size. Batches
so small that more slots cost nothing get one graph with room for all cells fine, without a device sync for the count;
with the gate AllFine the count is known anyway. A reducer is part of the trunk, in inference only; the trunk's
regions are then compiled, each once for all blocks, and not the trunk (`compile_regions.py`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.backbones.base import version
from msvit.compile_regions import compiled_regions
from msvit.compiling.base import CompiledMSViT, replace_layers
from msvit.compiling.graphed_forward import PlainTrunk, trunk_of
from msvit.compiling.graphs import Captured, CapturedStep, Pool
from msvit.execution.fused import kernels
from msvit.gates import AllFine, ContextGate, LearnedGate
from msvit.types import GateOutput, MSViTOutput, ScaleGrid, TokenBatch

SMALL = 1024  # slots: batches that never need more run with room for all cells fine
NUM_BUCKETS = {"packed": 128, "trimmed": 16, "masked": 1}  # by mode: about so many graphs at most for a batch size
ALIGN = 64  # slots come in multiples of this
CAPTURED_GATES = (LearnedGate, ContextGate)  # other gates may wait for the device, which no graph can hold
MAX_PLANS = 8  # batch sizes whose graphs are kept


def bucket(needed: int, most: int, mode: str = "packed") -> int:
    """Slots for a batch of `needed` tokens, `most` if all cells were fine: the next of the mode's buckets.

    Trimmed batches have few: the longest image differs from batch to batch by more than the sum of all does.
    """
    step = bucket_step(most, mode)
    return most if step is None else max(1, -(-needed // step)) * step


def bucket_step(most: int, mode: str = "packed") -> int | None:
    """From one bucket to the next; None where one has room for all."""
    return None if most <= SMALL else -(-most // (NUM_BUCKETS[mode] * ALIGN)) * ALIGN


class CudaMSViT(CompiledMSViT):
    """For inference and training on a GPU."""

    trunk: PlainTrunk
    decide: Callable[[Tensor], Tensor]

    def __init__(self, model: nn.Module, inductor: bool | str = True, graphs: bool = True) -> None:
        super().__init__(model)
        replace_layers(self.backbone, is_gelu, FastGELU.of)
        self.inductor, self.graphs = inductor, graphs
        self._prepare()

    @property
    def settings(self) -> dict[str, Any]:
        return {"inductor": self.inductor, "graphs": self.graphs}

    def _prepare(self) -> None:
        trunk = trunk_of(self.backbone, self.coarse, self.reducer, self.mode, self.proportional_attention)
        by_blocks = self.inductor == "blocks" or (self.inductor and self.reducer is not None)
        self.regional = bool(by_blocks and trunk.has_regions)
        if self.inductor and not self.regional:
            trunk.compile()
        object.__setattr__(self, "trunk", trunk)  # not a part of its own: it holds no weights but the backbone's
        self.decide = torch.compile(self._decide) if self.inductor and not self.regional else self._decide
        self._plans: dict[Any, Plan] = {}
        self.refresh()

    def refresh(self) -> None:
        """Make everything anew that was made from weights, in the next calls. Captured graphs read weights in place."""
        super().refresh()
        # Listed once: walking the modules in every call takes longer than a batch of one image.
        self._weights = [*self.parameters(), *self.buffers()]
        for plan in self._plans.values():
            plan.weights, plan.versions = self._weights, None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        return {name: value for name, value in state.items() if name not in ("trunk", "decide", "_plans", "_weights")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()

    def forward(
        self, image: Tensor, mask: Tensor | None = None, max_tokens: int | None = None, per_image: int | None = None
    ) -> MSViTOutput:
        learns = self._learns(mask)
        if max_tokens is None and per_image is None and self._can_plan(image, learns):
            with torch.cuda.device(image.device):
                gate, tokens, logits = self._run_plan(image, mask, learns)
        else:
            gate, tokens = super().encode(image, mask, max_tokens, per_image)
            logits = self.backbone.head(tokens)
        return MSViTOutput(logits=logits, gate=gate, tokens=tokens)

    def encode(
        self, image: Tensor, mask: Tensor | None = None, max_tokens: int | None = None, per_image: int | None = None
    ) -> tuple[GateOutput, TokenBatch]:
        learns = self._learns(mask)
        if max_tokens is not None or per_image is not None or not self._can_plan(image, learns):
            return super().encode(image, mask, max_tokens, per_image)
        with torch.cuda.device(image.device):
            return self._run_plan(image, mask, learns, head=False)[:2]

    def _run_plan(self, image: Tensor, mask: Tensor | None, learns: bool, head: bool = True) -> "Planned":
        grid = self.grid(image)
        if learns:
            return self._plan(image, grid, learns, head)(image, mask)
        with torch.inference_mode(False), torch.no_grad():
            plan = self._plan(image, grid, learns, head)
            out = plan(image, mask)
            if not plan.is_fresh():  # checked while the device works
                out = self._plan(image, grid, learns, head)(image, mask)
            return out

    def _learns(self, mask: Tensor | None) -> bool:
        """Whether this call needs gradients."""
        if not torch.is_grad_enabled():
            return False
        return any(t.requires_grad for t in self._weights) or (mask is not None and mask.requires_grad)

    def _can_plan(self, image: Tensor, learns: bool) -> bool:
        """Whether a `Plan` can run this: no image gradient, no reducer in training, a capturable host."""
        if not image.is_cuda or image.requires_grad:
            return False
        if self.reducer is not None and (learns or self.reducer.training):
            return False
        if learns and not self.trunk.trains:
            return False
        return self.trunk.can_run(autocast_dtype() or image.dtype, image.is_cuda)

    def _plan(self, image: Tensor, grid: ScaleGrid, learns: bool, head: bool = True) -> "Plan":
        half = autocast_dtype()
        modes = (learns, self.backbone.training, self.gate.training, id(self.gate), self.gate.constants)
        key = (image.shape, image.dtype, image.device, half, modes, id(self.reducer), head)
        if self.trunk.reducer is not self.reducer:
            self._prepare()
        plan = self._plans.get(key)
        if plan is None or plan.moved():
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self.refresh()  # there may be another gate
            plan = self._plans[key] = Plan(self, image, grid, learns, half, head)
        return plan

    def _decide(self, image: Tensor) -> Tensor:
        """(4, b, hc, wc): logits, probabilities, samples and decisions."""
        gate = self.gate(image)
        return torch.stack([t.float() for t in (gate.logits, gate.fine_prob, gate.sample, gate.mask)])


class FastGELU(nn.GELU):
    """nn.GELU by our kernel, which takes half the time of a compiled one."""

    stands_for = nn.GELU  # the class that is written when a model is saved

    @staticmethod
    def of(gelu: nn.GELU) -> "FastGELU":
        fast = FastGELU.__new__(FastGELU)
        fast.__dict__.update(gelu.__dict__)
        return fast

    def forward(self, input: Tensor) -> Tensor:
        fused = kernels is not None and input.is_cuda and input.dtype is not torch.float64
        return kernels.gelu(input) if fused else F.gelu(input)


def is_gelu(module: nn.Module) -> bool:
    return type(module) is nn.GELU and module.approximate == "none"


def autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


class Plan:
    """How batches of one size are run: buffers, and what was captured so far."""

    def __init__(
        self, model: CudaMSViT, image: Tensor, grid: ScaleGrid, learns: bool, half: torch.dtype | None, head: bool
    ) -> None:
        self.model, self.grid, self.batch, self.learns, self.half = model, grid, image.shape[0], learns, half
        self.head, self.mode = head, model.mode
        self.most = model.trunk.slots(self.batch, self.batch * grid.num_cells, grid)
        self.step = bucket_step(self.most, self.mode)
        self.small = self.step is None
        self.all_fine = type(model.gate) is AllFine
        self.captures_gate = type(model.gate) in CAPTURED_GATES and not learns
        tables = model.trunk.tables(grid)
        self.tables = [None if t is None or learns else t.clone() for t in tables]
        self.sources = [] if learns else model.trunk.table_sources()
        self.weights = model._weights
        self.modules = list(model.modules()) if learns else []
        self.image = torch.empty_like(image, memory_format=torch.contiguous_format) if model.graphs else None
        self.mask = torch.zeros(self.batch, *grid.cells, device=image.device, requires_grad=learns)
        self.sample = torch.zeros_like(self.mask, requires_grad=False)  # of mode trimmed only
        self.captured: dict[Any, Captured] = {}
        self.steps: dict[tuple[int, bool], CapturedStep] = {}
        self.pool = Pool() if model.graphs else None
        self.binding = self._binding()
        self.versions: list[int] | None = self._versions()  # None: tables must be made anew

    def _binding(self) -> list[Any]:
        """What a capture is bound to: where each weight lies; in training, which weights and modules train, too."""
        pointers = [t.data_ptr() for t in self.weights]
        if not self.learns:
            return pointers
        return [pointers, [t.requires_grad for t in self.weights], [module.training for module in self.modules]]

    def _versions(self) -> list[int]:
        """Writes to the weights that tables are made of. All other weights are read where they lie."""
        return list(map(version, self.sources))

    def moved(self) -> bool:
        """Whether a capture may read freed memory. In inference all but the first weight are checked by `is_fresh`."""
        if self.learns:
            return self.binding != self._binding()
        return self.weights[0].data_ptr() != self.binding[0]

    def is_fresh(self) -> bool:
        """Whether the last result used the current weights. Else update tables or, if weights moved, drop all plans."""
        if self.binding != self._binding():
            self.model._plans.clear()
            return False
        versions = self._versions()
        if versions == self.versions:
            return True
        for table, new in zip(self.tables, self.model.trunk.tables(self.grid), strict=True):
            if table is not None and new is not None:
                table.copy_(new)
        self.versions = versions
        return False

    def __call__(self, image: Tensor, mask: Tensor | None) -> "Planned":
        if self.image is not None:
            image = self.image.copy_(image)
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
            fine = gate.mask.detach() > 0.5
            num_fine = int(fine.sum() if self.mode == "packed" else fine.sum((1, 2)).max() * self.batch)
            slots = bucket(self.model.trunk.slots(self.batch, num_fine, self.grid), self.most, self.mode)
        return self._output(gate, self._trunk(image, gate, slots, full))

    def _trunk(self, image: Tensor, gate: GateOutput, slots: int, full: bool) -> tuple[Tensor, ...]:
        mask = gate.mask.float()
        if self.pool is None:
            return self._run(image, mask, gate.sample.detach(), slots, full)
        self.mask.detach().copy_(mask.detach())  # before a capture too: its tokens must fit these slots
        if self.mode == "trimmed":
            self.sample.copy_(gate.sample.detach())
        if not self.learns:
            return self._replay((slots, full), lambda: self._run(image, self.mask, self.sample, slots, full))
        if (slots, full) not in self.steps:
            weights = {name: p for name, p in self.model.trunk.named_parameters() if p.requires_grad}
            with self._autocast():
                run = partial(self._run, image, self.mask, self.sample, slots, full)
                self.steps[slots, full] = CapturedStep(run, self.mask, weights, self.pool)
        return self.steps[slots, full](mask)

    def _replay(self, name: Any, call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if self.pool is None:
            return call()
        if name not in self.captured:
            with self._autocast():
                self.captured[name] = Captured(call, self.pool.handle)
        return self.captured[name]()

    def _autocast(self) -> AbstractContextManager[Any]:
        """As outside, but without the cache of converted weights: a graph would not see them change."""
        return torch.autocast("cuda", dtype=self.half, enabled=self.half is not None, cache_enabled=False)

    def _decide(self, image: Tensor) -> Tensor:
        with compiled_regions(self.model.regional):  # not inside what is compiled: it would break there
            return self.model.decide(image)

    def _all(self, image: Tensor) -> tuple[Tensor, ...]:
        decisions = self._decide(image)
        return decisions, *self._run(image, decisions[3], decisions[2], self.most, full=False)

    def _run(
        self, image: Tensor, mask: Tensor, sample: Tensor, slots: int, full: bool,
        weights: dict[str, nn.Parameter] | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        trunk = self.model.trunk
        least = self.most if full else 0 if self.step is None else slots - self.step + 1
        arrays = trunk.pack_indices(mask.detach(), sample, self.grid, slots, least)
        for varies in () if self.model.regional else (image, mask, *arrays):
            torch._dynamo.maybe_mark_dynamic(varies, 0)
        with compiled_regions(self.model.regional):
            inputs = (image, mask, arrays, self.tables, full, self.head)
            return torch.func.functional_call(trunk, {**(weights or {})}, inputs)

    def _output(self, gate: GateOutput, parts: tuple[Tensor, ...]) -> "Planned":
        logits, parts = (parts[0], parts[1:]) if self.head else (None, parts)
        return Planned(gate, self.model.trunk.tokens(self.grid, self.batch, parts), logits)


class Planned(NamedTuple):
    """What a plan returns."""

    gate: GateOutput
    tokens: TokenBatch
    logits: Any  # None without the head
