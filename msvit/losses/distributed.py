"""The global batch, with gradient: what several processes hold, side by side.

    gather_with_grad(fine_prob)    # (sum of all b, hc, wc)

Without torch.distributed, or with one process, it is `fine_prob` itself.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from msvit.shapes import Float


def gather_with_grad(x: Float[Tensor, "b *rest"]) -> Float[Tensor, "total *rest"]:
    """Concatenate `x` of every process along dim 0, in rank order; batch sizes may differ, the rest may not.

    The gradient is right if (1) every process computes the same loss L from the result and (2) parameter
    gradients are then AVERAGED over the W processes, as DDP and FSDP do. So backward hands process r the
    gradient of its own rows times W: the average, 1/W * sum_r (W * dL/dx_r * dx_r/dw), is dL/dw of the whole
    batch. A parameter used after the gather (theta of GBaS) has the whole gradient on every process, and
    averaging keeps it. By (1) backward needs no communication, so it cannot fall out of step with DDP's own.

    The shapes are exchanged first. With a CPU backend in the group (torch's default, "cpu:gloo,cuda:nccl")
    this leaves the GPU alone; with "nccl" only, it costs one GPU sync.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return x
    return _Gather.apply(x, _batch_sizes(x))


def _batch_sizes(x: Tensor) -> list[int]:
    """The batch size of every process; raises, on all of them, if the other dimensions differ."""
    device = torch.device("cpu") if "cpu:" in dist.get_backend_config() else x.device
    mine = torch.tensor(x.shape, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    shapes = [tuple(shape) for shape in torch.stack(every).tolist()]
    for rank, shape in enumerate(shapes):
        if shape[1:] != shapes[0][1:]:
            raise ValueError(
                f"process 0 brings shape {shapes[0]} and process {rank} brings {shape}, "
                "but only batch sizes may differ; give all processes images of one size in each step"
            )
    return [shape[0] for shape in shapes]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> Tensor:
        ctx.start, ctx.size = sum(sizes[: dist.get_rank()]), x.shape[0]
        ctx.world = len(sizes)
        padded = x.new_zeros(max(sizes), *x.shape[1:])  # all_gather wants equal shapes
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.world * grad.narrow(0, ctx.start, ctx.size), None
