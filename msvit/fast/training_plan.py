"""Batches of one size in training: gate and encoder are captured with their backward.

    image -> logits     captured                     with gradients to the gate's weights
    logits -> mask      a few launches, with noise   drawn as the uncompiled model draws it
    mask -> output      captured once per bucket     with gradients to the mask and to the encoder's weights
"""

from typing import Any

import torch
from torch import Tensor, nn

from msvit.backbones.blocks import ATTENTIONS, MLPS
from msvit.fast.fast_layers import is_linear
from msvit.fast.gates import compute_logits
from msvit.fast.graphs import Captured, CapturedStep, CountOnHost, HalfWeights, Pool, Weights
from msvit.fast.plan import Plan, Planned
from msvit.fast.regions import compiled_regions
from msvit.gates import LogitGate
from msvit.types import GateOutput

EXTRA_DIVISOR = 32  # the memory of a pool has capacity for 1 / EXTRA_DIVISOR of all slots more than were needed


class TrainingPlan(Plan):
    """A `Plan` with gradients. Each captured graph of the encoder has one for its backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bound = self.weights  # kept, so that no other weight gets the id of one of these
        self.steps: dict[tuple[int, bool], CapturedStep] = {}
        self.gate_step: Captured | CapturedStep | None = None
        self.count = CountOnHost(self.mask.device)
        self.halves: HalfWeights | None = None
        if self.pool is not None and self.half is not None:
            self.halves = HalfWeights(linear_weights(self.encoder), self.half)
        self.scorer: Scorer | None = None
        if self.pool is not None and self.captures_gate:
            self.scorer = Scorer(self.gate)
            self.gate_pool = Pool()  # of its own: the encoder runs between the gate's forward and its backward
            if self.model.inductor and not self.model.regional:
                self.scorer.compile(dynamic=False)  # a plan has images of one size

    def _binding(self) -> list[Any]:
        """Which weights there are, where they lie, and which weights and modules train."""
        trained = [(id(t), t.requires_grad) for t in self.weights]
        return [super()._binding(), trained, [module.training for module in self.modules]]

    def moved(self) -> bool:
        """Return whether weights were moved or replaced, or modules or weights train that did not, or the reverse."""
        return self.binding != self._binding()

    def __call__(self, image: Tensor, mask: Tensor | None) -> Planned:
        image = self.place(image)
        if mask is None:
            gate = self._choose(image)
        else:
            gate = self.model.from_mask(mask, image)
            if self.scorer is not None:
                self.gate_pool.generation += 1  # what its last forward read may be gone
        full = self.all_fine and mask is None and self.mode == "packed"
        counted = not (self.small or full or self.mode == "masked")
        if counted:
            self.count.send(self._num_fine(gate.mask.detach() > 0.5))
        hard = gate.mask.float()
        if self.pool is not None:  # before a capture too: its tokens must fit these slots
            if self.halves is not None:
                self.halves.refresh()
            self.mask.copy_(hard.detach())
            if self.mode == "trimmed":
                self.sample.copy_(gate.sample.detach())
        slots = self.max_slots
        if counted:  # the only wait of a forward
            needed = self.encoder.slots(self.batch, self.count.wait(), self.grid)
            slots = self.bucket(needed)
        if self.pool is None:
            return self._output(gate, self._run(image, hard, gate.sample.detach(), slots, full))
        return self._output(gate, self._step(image, slots, full)(hard))

    def _choose(self, image: Tensor) -> GateOutput:
        """Run the gate."""
        if self.scorer is None:
            return self.model.gate(image)
        if self.gate_step is None:
            self.gate_step = self._capture_gate(image)
        (logits,) = self.gate_step()
        return self.scorer.gate.decide(logits)

    def _capture_gate(self, image: Tensor) -> Captured | CapturedStep:
        assert self.scorer is not None
        scorer, regional, address = self.scorer, self.model.regional, self.address
        weights = trained_weights(scorer)

        def score(weights: Weights) -> tuple[Tensor]:
            with compiled_regions(regional):
                return (torch.func.functional_call(scorer, {**weights}, (image, address)),)

        with self._autocast():
            if not weights:
                with torch.no_grad():
                    return Captured(lambda: score({}), self.gate_pool)
            return CapturedStep(score, (), weights, self.gate_pool, reads=(self.image, address, *self.weights))

    def _step(self, image: Tensor, slots: int, full: bool) -> CapturedStep:
        """Return the captured encoder for so many slots.

        All share the memory of the largest, which is captured first. Where more are needed, all are captured anew.
        """
        if (slots, full) not in self.steps:
            assert self.pool is not None
            if slots > max((largest for largest, _ in self.steps), default=0):
                self.steps.clear()
                self.pool.replace()
                capacity = slots if full else self.bucket(slots + self.max_slots // EXTRA_DIVISOR)
                self.steps[capacity, full] = self._capture(image, capacity, full)
            if (slots, full) not in self.steps:
                self.steps[slots, full] = self._capture(image, slots, full)
        return self.steps[slots, full]

    def _capture(self, image: Tensor, slots: int, full: bool) -> CapturedStep:
        assert self.pool is not None

        def run(weights: Weights, mask: Tensor) -> Any:
            return self._run(image, mask, self.sample, slots, full, weights)

        halves = {} if self.halves is None else self.halves.copies
        with self._autocast():
            weights, reads = trained_weights(self.encoder), (self.image, self.address, self.sample, *self.weights)
            return CapturedStep(run, (self.mask,), weights, self.pool, halves, reads)


class Scorer(nn.Module):
    """The part of a gate that has weights: image (b, c, h, w) -> logits (b, hc, wc)."""

    def __init__(self, gate: LogitGate) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, image: Tensor, address: Tensor | None) -> Tensor:
        """Return the logits, of the images at `address` if one is given."""
        return compute_logits(self.gate, image, address)


def trained_weights(module: nn.Module) -> Weights:
    """Return the parameters that need gradients, by name."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def linear_weights(encoder: nn.Module) -> Weights:
    """Return the trained float32 weights that autocast converts: linear layers in known attentions and MLPs."""
    linear = {
        f"{name}.{child}"
        for name, part in encoder.named_modules() if type(part) in (*ATTENTIONS, *MLPS)
        for child, layer in part.named_children() if is_linear(layer)
    }  # fmt: skip
    weights = trained_weights(encoder)
    return {n: w for n, w in weights.items() if n.rpartition(".")[0] in linear and w.dtype is torch.float32}
