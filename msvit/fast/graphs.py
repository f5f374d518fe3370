"""Calls recorded as CUDA graphs: hundreds of launches become one.

    run = Captured(call, pool)                          # call() -> a record; run() replays it and returns a copy
    run = CapturedStep(call, (mask,), weights, pool)    # call(weights, mask) with a backward, replayed too
    output = run(mask)

A record is a tuple, named or not, whose fields are tensors or None. What a call reads, such as weights, it reads from
the memory it was captured with: fill that first.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Record = tuple[Tensor | None, ...]
Weights = dict[str, nn.Parameter]


class Captured:
    """A call without gradients, captured as a CUDA graph."""

    def __init__(self, call: Callable[[], Record], pool: "Pool") -> None:
        warm_up(call)
        self.graph = torch.cuda.CUDAGraph()
        with capture(self.graph, pool):
            self.out = call()
        self.make = getattr(type(self.out), "_make", tuple)

    def __call__(self) -> Any:
        self.graph.replay()
        return self.make([None if t is None else t.clone() for t in self.out])


class CapturedStep:
    """A captured call that takes weights and inputs, and its backward, which returns gradients of both.

    `inputs` are the buffers that the captured call reads; fill them before each call. The call gets the weights
    themselves or, by name, their `half_weights`. Backward replays on the memory that forward filled, so it must come
    before the next forward of the same pool. `reads`: what else the call reads. A step keeps all of it, as its backward
    may be replayed after the plan that made it is gone.
    """

    def __init__(
        self, call: Callable[..., Record], inputs: Sequence[Tensor], weights: Weights, pool: "Pool",
        half_weights: Mapping[str, Tensor] = MappingProxyType({}), reads: Sequence[Tensor | None] = (),
    ) -> None:  # fmt: skip
        self.weights, self.pool = list(weights.values()), pool
        self.reads = (*inputs, *half_weights.values(), *reads)
        read = {**weights, **half_weights}

        def run() -> tuple[list[Tensor], Record]:
            """Leaves of autograd, and what the call returns for them.

            Leaves are aliases, which share the memory: a capture may not touch graphs of autograd that are still alive,
            neither those that the weights belong to nor one of a warm-up, whose nodes are bound to another stream.
            """
            given = [t.detach().requires_grad_() for t in inputs]
            aliases = {name: nn.Parameter(weight.detach()) for name, weight in read.items()}
            return [*given, *aliases.values()], call(aliases, *given)

        def whole() -> tuple[Tensor | None, ...]:
            leaves, out = run()
            differentiable = [t for t in out if t is not None and t.requires_grad]
            zeros = [torch.zeros_like(t) for t in differentiable]
            return torch.autograd.grad(differentiable, leaves, zeros, allow_unused=True)

        warm_up(whole)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with capture(self.forward, pool):
            leaves, out = run()
            differentiable = [t for t in out if t is not None and t.requires_grad]
            wanted = [torch.empty_like(t) for t in differentiable]
        with capture(self.backward, pool):
            grads = torch.autograd.grad(differentiable, leaves, wanted, allow_unused=True)
        self.make = getattr(type(out), "_make", tuple)
        self.differentiable = [t is not None and t.requires_grad for t in out]
        self.out = [None if t is None else alias(t.detach()) for t in out]
        self.wanted = [alias(t) for t in wanted]
        self.grads = [None if grad is None else alias(grad) for grad in grads]

    def __call__(self, *inputs: Tensor) -> Any:
        self.forward.replay()  # first: the device may be waiting, and autograd has a node to make for each weight
        self.pool.generation += 1
        return self.make(_Replayed.apply(self, *inputs, *self.weights))


class Pool:
    """The memory that several graphs share, and a count of the forwards that filled it."""

    def __init__(self) -> None:
        self.generation = 0
        gc.collect()  # once for all its graphs: frees the graphs of models that were dropped in a reference cycle
        self.replace()

    def replace(self) -> None:
        """Use other memory for the graphs captured from now on. The old is freed with the graphs that use it."""
        self.handle = torch.cuda.graph_pool_handle()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Pool) -> Iterator[None]:
    """Record the launches inside into the graph. An exception leaves CUDA as it was before.

    The garbage collector is off meanwhile: destroying another graph is forbidden. Other threads may allocate memory.
    """
    collects, stream, error = gc.isenabled(), torch.cuda.current_stream(), None
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool.handle, capture_error_mode="thread_local"):
            try:
                yield
            except BaseException as raised:
                error = raised  # first the capture ends
        if error is not None:
            graph.reset()
            raise error
    except BaseException as last:
        if last is error:
            raise
        torch.cuda.set_stream(stream)
        _clear_failed_capture(pool)
        raise (error or last) from None  # the first error says more than the end of the capture
    finally:
        del error  # it refers to this frame
        if collects:
            gc.enable()


def _clear_failed_capture(pool: Pool) -> None:
    """Undo what PyTorch leaves behind where a capture cannot be ended: its memory pool, its random numbers."""
    with suppress(RuntimeError):  # raised where it had not begun
        device = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(device, pool.handle)
        torch._C._cuda_releasePool(device, pool.handle)
    pool.replace()
    number = torch.zeros((), device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        number.add_(1)  # a capture that succeeds: the generator then no longer counts draws for the failed one


class _Replayed(torch.autograd.Function):
    """What a step returned, and its backward."""

    @staticmethod
    def forward(ctx: Any, step: CapturedStep, *leaves: Tensor) -> Record:
        ctx.step, ctx.generation, ctx.dtypes = step, step.pool.generation, [t.dtype for t in leaves]
        ctx.set_materialize_grads(False)
        out = tuple([None if t is None else t.clone() for t in step.out])
        constant = [t for t, has_grad in zip(out, step.differentiable, strict=True) if t is not None and not has_grad]
        ctx.mark_non_differentiable(*constant)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        step, ctx.step = ctx.step, None  # outputs of a step that is over keep no memory of graphs
        if step is None or ctx.generation != step.pool.generation:
            raise RuntimeError(
                "this compiled model was run again before backward, or backward was called twice, and its "
                "activations are gone; call backward once after each forward, on the sum of all losses, or use "
                "msvit.compile(model, graphs=False)"
            )
        given = [grad for grad, has_grad in zip(grads, step.differentiable, strict=True) if has_grad]
        for wanted, grad in zip(step.wanted, given, strict=True):
            wanted.zero_() if grad is None else wanted.copy_(grad)
        step.backward.replay()
        step.pool.generation += 1  # the activations' memory was used again on the way back
        return None, *copies(step.grads, ctx.dtypes)


def copies(tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
    """Copy those that are not None, each to its dtype."""
    made = [None if t is None else torch.empty_like(t, dtype=d) for t, d in zip(tensors, dtypes, strict=True)]
    pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}  # by dtypes: one launch copies many tensors of one pair
    for new, old in zip(made, tensors, strict=True):
        if new is not None and old is not None:
            news, olds = pairs.setdefault((new.dtype, old.dtype), ([], []))
            news.append(new)
            olds.append(old)
    for news, olds in pairs.values():
        torch._foreach_copy_(news, olds)
    return made


class HalfWeights:
    """Copies of weights in another dtype, converted all at once."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self.sources = [weight.detach() for weight in weights.values()]
        self.copies = {name: torch.empty_like(weight.detach(), dtype=dtype) for name, weight in weights.items()}

    def refresh(self) -> None:
        """Convert the weights as they are now."""
        if self.sources:
            torch._foreach_copy_(list(self.copies.values()), self.sources)


class _Memory:
    """Bytes on a GPU, for `torch.as_tensor`."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory without a reference to it: other graphs of the pool may write there, too.

    A graph's results are then valid from its replay to the next replay of another graph. The memory itself exists as
    long as a graph of its pool.
    """
    if not tensor.is_cuda or tensor.numel() == 0:
        return tensor
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.as_tensor(_Memory(tensor.data_ptr(), size * tensor.element_size()), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class CountOnHost:
    """A number on its way from the device to the host, which can launch more work meanwhile."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        cuda = device.type == "cuda"
        self.number = torch.zeros((), dtype=dtype, pin_memory=cuda)
        self.arrived = torch.cuda.Event() if cuda else None

    def send(self, number: Tensor) -> None:
        """Begin to copy the number to the host."""
        self.number.copy_(number, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()

    def wait(self) -> int:
        """Return the number once it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return int(self.number)


@cache
def side_stream(device: int) -> Any:
    """Return the one stream of all warm-ups: cuBLAS keeps 32 MB for each stream it is called on."""
    return torch.cuda.Stream(device)


def warm_up(call: Callable[[], Any]) -> None:
    """Run a call twice on another stream, as capture demands: it compiles, and libraries make their handles."""
    stream = side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
