"""Floors: how long a workload would take if the machine did nothing but its multiply-adds, or nothing but its traffic.

    rates = measure_rates(torch.device("cuda"))        # multiply-adds and bytes a second, measured
    floors("packed", model, work, images, rates)       # {"matrix_ms": ..., "traffic_ms": ..., "traffic_mb": ...}
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from msvit.lab.bench.rows import ALL_TOKENS
from msvit.lab.bench.summary import Work
from msvit.lab.timing import clock
from msvit.model import MSViT

SIDE = 8192
COPIED = 2**30  # bytes: read once and written once, 2 GiB of traffic
REPEATS = 10


@dataclass(frozen=True)
class Rates:
    tflops: float  # bfloat16 matrix product of 8192 x 8192, two operations a multiply-add
    gb_per_second: float  # a copy, bytes read plus bytes written


def measure_rates(device: torch.device) -> Rates | None:
    """The machine's own limits; None on a CPU, where caches make one number of little use."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros(COPIED, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def multiply() -> None:
        for _ in range(REPEATS):
            torch.mm(a, b)

    def copy() -> None:
        for _ in range(REPEATS):
            target.copy_(source)

    seconds = [min(clock(work, device) for _ in range(4)) / REPEATS for work in (multiply, copy)]
    return Rates(tflops=2 * SIDE**3 / seconds[0] / 1e12, gb_per_second=2 * COPIED / seconds[1] / 1e9)


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


def floors(name: str, model: MSViT, work: Work, images: Tensor, rates: Rates | None) -> dict[str, float] | None:
    """Milliseconds for a batch, at the tokens this row runs; padded rows run others than they need, and have none.

    Nor have hierarchical hosts: the estimate of traffic is for blocks that all see the same tokens.
    """
    if rates is None or name in ("masked", "trimmed") or model.backbone.merge_at is not None:
        return None
    batch, whole = images.shape[0], name in ALL_TOKENS
    tokens = work.dense_tokens if whole else work.tokens.double().mean().item()
    macs = work.dense_macs if whole else work.macs.double().mean().item()
    moved = traffic(model, round(batch * (tokens + work.num_prefix)), images)
    return {
        "matrix_ms": round(1e3 * 2 * batch * macs / (rates.tflops * 1e12), 4),
        "traffic_ms": round(1e3 * moved / (rates.gb_per_second * 1e9), 4),
        "traffic_mb": round(moved / 1e6, 1),
    }
