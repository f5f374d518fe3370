"""Memory of a row on a GPU, beyond the host's weights and the images.

    before = held(device)
    call = ROWS["packed accelerated"](subject); call(images)
    measure_memory(call, images, before)         # Memory(held_mb=..., call_mb=...)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from msvit.lab.timing import Call, synchronise


@dataclass(frozen=True)
class Memory:
    held_mb: float  # kept between calls: copies of weights, tables, optimizer state, the pools of CUDA graphs
    call_mb: float  # at the peak of a call, above what is kept

    @property
    def peak_mb(self) -> float:
        return self.held_mb + self.call_mb


def held(device: torch.device) -> int:
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


def measure_memory(call: Call, images: Tensor, before: int) -> Memory | None:
    """None on a CPU, where there is no such account."""
    device = images.device
    if device.type != "cuda":
        return None
    synchronise(device)
    now = held(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    call(images)
    synchronise(device)
    peak = torch.cuda.max_memory_allocated(device) - start
    return Memory(held_mb=round((now - before) / 2**20, 1), call_mb=round(peak / 2**20, 1))
