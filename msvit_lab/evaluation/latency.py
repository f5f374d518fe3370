"""Time per image: the dense host and the packed model, in turn, in one run.

On a CPU the packed model is timed as `msvit.compile` makes it, which takes no time to prepare.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msvit.fast.cpu import CpuMSViT
from msvit.model import MSViT
from msvit_lab.evaluation.shared import packed
from msvit_lab.timing import Call, speed_up, spread, time_all


@dataclass(frozen=True)
class Latency:
    what: str  # "dense host" or the mode, gate included
    device: str
    dtype: str
    batch: int
    ms_per_image: float  # median
    quartiles: tuple[float, float]
    images_per_second: float
    speed_up: float | None = None  # over the dense host: median of the ratios, round by round


@torch.inference_mode()
def measure_latency(
    model: MSViT, images: Tensor, batch: int, dtype: torch.dtype = torch.float32, rounds: int = 20
) -> list[Latency]:
    """Times whole forwards on different images each round; `images` holds at least `batch` of them."""
    device, num_sets = images.device, min(rounds, -(-len(images) // batch))
    sets = [images[(torch.arange(batch) + turn * batch) % len(images)] for turn in range(num_sets)]
    host: Any = model.host
    sides = tuple(host.patch_embed.img_size or ())
    model = packed(model)
    with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
        ours = CpuMSViT(model) if type(model) is MSViT and not images.is_cuda else model
        calls: dict[str, Call] = {"packed": ours}
        if getattr(host, "dynamic_img_size", False) or sides == tuple(images.shape[2:]):
            calls["dense host"] = host
        times = time_all(calls, sets, device=device, rounds=rounds)
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = []
    for name, own in times.items():
        median, low, high = (ms / batch for ms in spread(own))
        compared = name == "packed" and "dense host" in times
        rows.append(Latency(
            what=name, device=named, dtype=str(dtype).removeprefix("torch."), batch=batch,
            ms_per_image=round(median, 4), quartiles=(round(low, 4), round(high, 4)),
            images_per_second=round(1e3 / median, 1),
            speed_up=round(speed_up(times["dense host"], own).median, 4) if compared else None,
        ))  # fmt: skip
    return rows
