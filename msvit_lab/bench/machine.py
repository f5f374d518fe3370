"""What a call needs on this machine: memory, and the time it would take at the machine's measured rates.

    before = bytes_held(device)
    call = ROWS["packed compiled"](subject); call(images)
    measure_memory(call, images, before)               # {"peak_mb": ..., "held_mb": ..., "call_mb": ...}
    rates = measure_rates(torch.device("cuda"))        # multiply-adds and bytes per second
    lower_bounds(model, work, images, rates)           # {"matrix_ms": ..., "traffic_ms": ..., "traffic_mb": ...}

All of it is for a GPU: on a CPU there is no such account of memory, and caches make one rate of little use.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from msvit.model import MSViT
from msvit_lab.bench.summary import Work
from msvit_lab.timing import Call, clock, repeat, synchronise

SIDE = 8192
COPIED = 2**30  # bytes: read once and written once, 2 GiB of traffic
REPEATS = 10


def bytes_held(device: torch.device) -> int:
    """Bytes in use. A CUDA graph's pool counts whole: its tensors live there though the allocator calls them free."""
    if device.type != "cuda":
        return 0
    synchronise(device)
    total = 0
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] == (device.index or 0):
            private = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
            total += segment["total_size"] if private else segment["allocated_size"]
    return total


def measure_memory(call: Call, images: Tensor, before: int) -> dict[str, float] | None:
    """MB beyond the host's weights and the images.

    `held_mb` is kept between calls: copies of weights, tables, optimizer state, the pools of CUDA graphs; `call_mb` is
    needed above it at the peak of a call.
    """
    device = images.device
    if device.type != "cuda":
        return None
    held = round((bytes_held(device) - before) / 2**20, 1)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    call(images)
    synchronise(device)
    own = round((torch.cuda.max_memory_allocated(device) - start) / 2**20, 1)
    return {"peak_mb": round(held + own, 1), "held_mb": held, "call_mb": own}


@dataclass(frozen=True)
class Rates:
    tflops: float  # bfloat16 matrix product of 8192 x 8192, two operations per multiply-add
    gb_per_second: float  # a copy, bytes read plus bytes written


def measure_rates(device: torch.device) -> Rates | None:
    """The machine's own limits."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros(COPIED, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def seconds(call: Call, given: Tensor) -> float:
        return min(clock(lambda: repeat(call, [given], REPEATS), device) for _ in range(4)) / REPEATS

    product, copy = seconds(lambda x: torch.mm(x, b), a), seconds(target.copy_, source)
    return Rates(tflops=2 * SIDE**3 / product / 1e12, gb_per_second=2 * COPIED / copy / 1e9)


def traffic(model: MSViT, tokens: int, images: Tensor) -> int:
    """Bytes of one forward, a simple estimate for `tokens` tokens in all, prefix tokens included.

    In values, each of the weights' size: every weight of host and gate once; every pixel twice (gate, tokenizer); in
    each block a token costs, for every linear layer, what goes in and what comes out, for every norm 2 d, for attention
    4 d (queries, keys, values, result); the last norm 2 d. Activations and additions are taken to be fused, the head
    is left out.
    """
    host: Any = model.host
    values = sum(p.numel() for p in model.parameters()) + 2 * images.numel()
    width = 2 * host.embed_dim
    for block in host.blocks:
        for part in block.modules():
            if isinstance(part, nn.Linear):
                width += part.in_features + part.out_features
            elif type(part).__name__.endswith("Norm"):
                width += 2 * host.embed_dim
        width += 4 * block.attn.proj.in_features
    size: int = host.patch_embed.proj.weight.element_size()
    return size * (values + width * tokens)


def lower_bounds(model: MSViT, work: Work, images: Tensor, rates: Rates | None) -> dict[str, float] | None:
    """Lower bounds in milliseconds per batch: nothing but its multiply-adds, and nothing but its traffic.

    None for hierarchical hosts: the estimate of traffic is for blocks that all see the same tokens.
    """
    if rates is None or model.backbone.merge_at is not None:
        return None
    batch, tokens, macs = len(images), work.tokens.double().mean().item(), work.macs.double().mean().item()
    moved = traffic(model, round(batch * (tokens + work.num_prefix)), images)
    return {
        "matrix_ms": round(1e3 * 2 * batch * macs / (rates.tflops * 1e12), 4),
        "traffic_ms": round(1e3 * moved / (rates.gb_per_second * 1e9), 4),
        "traffic_mb": round(moved / 1e6, 1),
    }
