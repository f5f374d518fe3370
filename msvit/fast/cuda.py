"""On a GPU: everything after the gate is compiled once for all token counts, and replayed as a CUDA graph.

A forward has two stages, and between them the one number a packed batch needs: how many cells are fine.

    gate    images -> decisions                    compiled and captured if of a class in `plan.CAPTURED_GATES`
    encoder images, decisions, slots -> output     captured once for each number of slots, in training with backward

What a slot is and what the encoder does is up to the host (`encoders.py`). In training both stages have a
backward, which is captured too (`training_plan.py`).

In 16 bits the usual ViT has an encoder of its own, which needs no compiler and no wait (`fused_plan.py`). With
`dtype="fp8"` most of its linear layers run in FP8 (`fp8_encoder.py`); what cannot run so raises an error.

The number of slots is rounded up to the next bucket, so that few graphs suffice for all batches of one size. Batches
so small that more slots cost nothing get one graph with capacity for all cells fine, without a device sync for the
count; with the gate AllFine the count is known anyway. A reducer is part of the encoder, in inference only; then the
encoder's regions are compiled, each once for all blocks, and not the encoder (`regions.py`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from msvit.execution.attention import choose_backend
from msvit.fast.base import CompiledMSViT, replace_layers
from msvit.fast.encoders import PlainEncoder
from msvit.fast.fast_layers import FastGELU, FastLinear, as_class, is_gelu
from msvit.fast.find_kernels import kernels
from msvit.fast.fp8_encoder import Fp8Encoder, check_model
from msvit.fast.fused_blocks import FusedBlocksEncoder
from msvit.fast.fused_encoder import FusedEncoder
from msvit.fast.fused_plan import FusedPlan
from msvit.fast.gates import compute_logits
from msvit.fast.plan import Plan, Planned, autocast_dtype
from msvit.fast.training_blocks import has_plain_norms
from msvit.fast.training_plan import TrainingPlan
from msvit.gates.base import Gate
from msvit.gates.logits import LogitGate
from msvit.output import MSViTOutput
from msvit.swin.encoder import SwinEncoder
from msvit.types import GateOutput, TokenBatch

MAX_PLANS = 8  # batch sizes whose graphs are kept
UNSAVED = ("compiled_encoder", "fused", "decide", "_plans", "_layers", "tensors")


class CudaMSViT(CompiledMSViT):
    """A model compiled for inference and training on a GPU."""

    compiled_encoder: PlainEncoder | SwinEncoder
    fused: FusedEncoder | None
    tensors: list[Tensor]  # all weights and buffers
    decide: Callable[[Gate, Tensor, Tensor | None], Tensor]
    linear_dtype: str | None = None  # "fp8"; None: that of the weights

    def __init__(
        self, model: nn.Module, inductor: bool | str = True, graphs: bool = True, dtype: str | None = None
    ) -> None:
        super().__init__(model)
        replace_layers(self.backbone, is_gelu, partial(as_class, kind=FastGELU))
        replace_layers(self.backbone, lambda module: type(module) is nn.Linear, partial(as_class, kind=FastLinear))
        self.inductor, self.graphs, self.linear_dtype = inductor, graphs, dtype
        self._prepare()

    @property
    def settings(self) -> dict[str, Any]:
        return {"inductor": self.inductor, "graphs": self.graphs, "dtype": self.linear_dtype}

    def _prepare(self) -> None:
        if self.linear_dtype == "fp8":
            check_model(self)
        settings = (self.backbone, self.coarse, self.reducer, self.mode)
        encoder: Any = (SwinEncoder if self.backbone.is_hierarchical else PlainEncoder)(*settings)
        by_blocks = self.inductor == "blocks" or (self.inductor and self.reducer is not None)
        self.regional = bool(by_blocks and encoder.has_regions)
        if self.inductor and not self.regional:
            encoder.compile()
        fuses = self.graphs and self.mode == "packed" and kernels is not None and FusedEncoder.can_fuse(self.backbone)
        self.fused = None
        if fuses and self.reducer is None:
            kind = Fp8Encoder if self.linear_dtype == "fp8" else FusedEncoder
            self.fused = kind(encoder)
        elif fuses and FusedBlocksEncoder.can_fuse(self.backbone):
            encoder = FusedBlocksEncoder(*settings)
        object.__setattr__(self, "compiled_encoder", encoder)  # not a submodule: its weights are the backbone's
        self.decide = torch.compile(decisions_of) if self.inductor and not self.regional else decisions_of
        self._plans: dict[Any, Plan] = {}
        self._layers: list[nn.Module] = []
        self.refresh()

    def refresh(self) -> None:
        """Compute anew, in the next calls, all that was made from weights. Captured graphs read weights in place."""
        super().refresh()
        # Listed once: walking the modules in every call takes longer than a batch of one image.
        self.tensors = [*self.parameters(), *self.buffers()]
        layers, before = list(self.backbone.modules()), self._layers
        if len(layers) != len(before) or any(new is not old for new, old in zip(layers, before, strict=True)):
            self._plans.clear()  # a graph would go on with the layer that was replaced
            self._layers = layers
            plain = self.reducer is None and not self.regional and has_plain_norms(self.backbone.host)
            self.compiled_encoder.adds_norms = plain
        for plan in self._plans.values():
            plan.weights, plan.versions = self.tensors, None

    def drop_plans(self) -> None:
        """Drop all captured graphs: the next calls capture them anew."""
        self._plans.clear()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        return {name: value for name, value in state.items() if name not in UNSAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()

    def forward(
        self, image: Tensor, mask: Tensor | None = None, max_tokens: int | None = None, per_image: int | None = None
    ) -> MSViTOutput:
        """Run gate, encoder and head by captured graphs, or uncompiled where these do not support the call."""
        out = self._planned(image, mask, max_tokens, per_image, head=True)
        if out is None:
            return super().forward(image, mask, max_tokens, per_image)
        return MSViTOutput(out.logits, out.gate, out.tokens)

    def encode(
        self, image: Tensor, mask: Tensor | None = None, max_tokens: int | None = None, per_image: int | None = None
    ) -> tuple[GateOutput, TokenBatch]:
        """Run gate and encoder by captured graphs, or uncompiled where these do not support the call."""
        out = self._planned(image, mask, max_tokens, per_image, head=False)
        return super().encode(image, mask, max_tokens, per_image) if out is None else (out.gate, out.tokens)

    def _planned(
        self, image: Tensor, mask: Tensor | None, max_tokens: int | None, per_image: int | None, head: bool
    ) -> Planned | None:
        """Run this by a `Plan`; None where none can: no graph returns gradients of images. In FP8 that raises."""
        needs_grad = torch.is_grad_enabled() and (
            any(t.requires_grad for t in self.tensors) or (mask is not None and mask.requires_grad)
        )
        reason = self.unsupported_reason(image.dtype, needs_grad or image.requires_grad)
        if self.linear_dtype == "fp8" and reason is not None:
            raise ValueError(reason)
        uncompiled = reason is not None or image.requires_grad or max_tokens is not None or per_image is not None
        if uncompiled or not image.is_cuda:
            return None
        with on_device(image):
            return self._run_plan(image, mask, needs_grad, head)

    def _run_plan(self, image: Tensor, mask: Tensor | None, needs_grad: bool, head: bool = True) -> Planned:
        if needs_grad:
            out = self._plan(image, needs_grad, head)(image, mask)
        else:
            with torch.inference_mode(False), torch.no_grad():
                plan = self._plan(image, needs_grad, head)
                out = plan(image, mask)
                if not plan.is_fresh():  # checked while the device works
                    out = self._plan(image, needs_grad, head)(image, mask)
        if mask is None and not self._checked_batch and self._budget is not None:
            self.warn_of_images(image, out.gate.mask)
        return out

    def unsupported_reason(self, dtype: torch.dtype | None = None, needs_grad: bool = False) -> str | None:
        """Return why images of this dtype (default: the weights' one; under autocast its) run uncompiled, or None."""
        half = autocast_dtype()
        if self.linear_dtype == "fp8" and (needs_grad or half is not None or dtype not in (None, torch.bfloat16)):
            return (
                f'this model was compiled with dtype="fp8", for images in bfloat16 without gradients and autocast, and '
                f"here are images in {dtype}, gradients {'on' if needs_grad else 'off'}, autocast to {half}; use "
                f"images.bfloat16() in torch.inference_mode(), or a model compiled without dtype"
            )
        if self.reducer is not None and (needs_grad or self.reducer.training):
            return f"the reducer {type(self.reducer).__name__} is compiled for inference only"
        if needs_grad and not self.compiled_encoder.trains:
            return f"a {type(self.backbone.host).__name__} is compiled for inference only"
        return self.compiled_encoder.unsupported_reason(half or dtype or self.tensors[0].dtype)

    def _plan(self, image: Tensor, needs_grad: bool, head: bool = True) -> "Plan":
        half = autocast_dtype()
        modes = (needs_grad, self.backbone.training, self.gate.training, id(self.gate), self.gate.constants)
        key = (image.shape, image.dtype, image.device, half, modes, id(self.reducer), head)
        if self.compiled_encoder.reducer is not self.reducer:
            self._prepare()
        plan = self._plans.get(key)
        if plan is None or plan.moved():
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self.refresh()  # there may be another gate
            args = (image, self.grid(image), needs_grad, half, head)
            if self.fused is not None and not needs_grad and half is None and self._can_fuse(image):
                plan = FusedPlan(self, self.fused, *args)
            elif self.linear_dtype == "fp8":
                raise ValueError(
                    'this model was compiled with dtype="fp8", but parts of it are in training mode or were replaced '
                    "by others that FP8 does not support; call eval(), or compile without dtype"
                )
            else:
                plan = (TrainingPlan if needs_grad else Plan)(self, self.compiled_encoder, *args)
            self._plans[key] = plan
        return plan

    def _can_fuse(self, image: Tensor) -> bool:
        """Return whether the fused encoder takes such images: the weights' dtype, 16 bits, all parts in eval mode."""
        same = image.dtype is self.backbone.host.patch_embed.proj.weight.dtype
        half = image.dtype in (torch.bfloat16, torch.float16)
        if self.fused is None or not same or not half or any(part.training for part in self.backbone.modules()):
            return False
        ours = all(choose_backend(image.dtype, dim, cuda=True) == "triton" for dim in self.compiled_encoder.head_dims)
        return ours and self.fused.can_fuse(self.backbone)  # again: a layer may have been replaced


def decisions_of(gate: Gate, image: Tensor, address: Tensor | None) -> Tensor:
    """Return (4, b, hc, wc): logits, probabilities, samples, decisions. A function: a method would hold its model."""
    if address is None:
        out = gate(image)
    else:
        assert isinstance(gate, LogitGate), "other gates take no address"
        out = gate.decide(compute_logits(gate, image, address))
    return torch.stack([t.float() for t in (out.logits, out.fine_prob, out.sample, out.mask)])


def on_device(image: Tensor) -> AbstractContextManager[Any]:
    """Return a context with the image's device as current; empty if it is already, as entering would take 10 µs."""
    current = image.device.index == torch.cuda.current_device()
    return nullcontext() if current else torch.cuda.device(image.device)
