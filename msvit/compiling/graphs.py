"""Calls recorded as CUDA graphs: hundreds of launches become one.

    run = Captured(call, pool)              # call() -> tensors; run() replays it and returns copies of them
    run = CapturedStep(call, mask, weights, pool)   # the same with a backward, replayed too
    logits, x = run(mask)

What a call reads, images and weights, it reads from the memory it was captured with: fill that first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Call = Callable[[], tuple[Tensor, ...]]
Weights = dict[str, nn.Parameter]


class Captured:
    """A call without gradients."""

    def __init__(self, call: Call, pool: Any) -> None:
        warm_up(call)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.out = call()

    def __call__(self) -> tuple[Tensor, ...]:
        self.graph.replay()
        return tuple([t.clone() for t in self.out])


class CapturedStep:
    """A call that takes its weights, and its backward. Gradients go to `weights` and to the mask it is given.

    It is captured with aliases of the weights, which share their memory: the weights themselves may belong to graphs of
    autograd that are still alive, and a capture may not touch those. Backward replays on the memory that forward
    filled, so it must come before the next forward of the same pool.
    """

    def __init__(
        self, call: Callable[[Weights], tuple[Tensor, ...]], mask: Tensor, weights: Weights, pool: "Pool"
    ) -> None:
        self.weights, self.pool = list(weights.values()), pool
        aliases = {name: nn.Parameter(weight.detach()) for name, weight in weights.items()}
        inputs = [mask, *aliases.values()]

        def whole() -> tuple[Tensor, ...]:
            moving = [t for t in call(aliases) if t.requires_grad]
            return torch.autograd.grad(moving, inputs, [torch.zeros_like(t) for t in moving], allow_unused=True)

        warm_up(whole)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward, pool=pool.handle):
            out = call(aliases)
        moving = [t for t in out if t.requires_grad]
        self.wanted = [torch.zeros_like(t) for t in moving]
        pool.grads = pool.grads or [torch.empty_like(t) for t in inputs]
        with torch.cuda.graph(self.backward, pool=pool.handle):
            grads = torch.autograd.grad(moving, inputs, self.wanted, allow_unused=True)
            self.grads = [None if grad is None else kept for kept, grad in zip(pool.grads, grads, strict=True)]
            torch._foreach_copy_([k for k in self.grads if k is not None], [g for g in grads if g is not None])
        self.out = tuple(t.detach() for t in out)
        self.moves = [t.requires_grad for t in out]

    def __call__(self, mask: Tensor) -> tuple[Tensor, ...]:
        return _Replay.apply(self, mask, *self.weights)


class Pool:
    """Memory that several graphs share, and which forward filled it last."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.turn = 0
        self.grads: list[Tensor] = []  # of every input; all graphs write to these, or each would hold its own


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: CapturedStep, mask: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        step.forward.replay()
        step.pool.turn += 1
        ctx.step, ctx.turn = step, step.pool.turn
        ctx.set_materialize_grads(False)
        out = tuple(t.clone() for t in step.out)
        ctx.mark_non_differentiable(*[t for t, moves in zip(out, step.moves, strict=True) if not moves])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        step = ctx.step
        if ctx.turn != step.pool.turn:
            raise RuntimeError(
                "this compiled model was run again before backward, or backward was called twice, and its "
                "activations are gone; call backward once after each forward, or use msvit.compile(model, graphs=False)"
            )
        moving = [grad for grad, moves in zip(grads, step.moves, strict=True) if moves]
        for wanted, grad in zip(step.wanted, moving, strict=True):
            wanted.zero_() if grad is None else wanted.copy_(grad)
        step.backward.replay()
        step.pool.turn += 1  # the activations' memory was used again on the way back
        fresh = [None if grad is None else torch.empty_like(grad) for grad in step.grads]
        torch._foreach_copy_([f for f in fresh if f is not None], [g for g in step.grads if g is not None])
        return None, *fresh


def warm_up(call: Call) -> None:
    """Compiles, and lets every library make its handles, on a stream of its own as capture demands."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
