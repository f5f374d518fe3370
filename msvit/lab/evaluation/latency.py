"""Time per image, measured side by side: the dense host and the packed model, in turn, in one run.

On a CPU the packed model is timed as `msvit.compile` makes it, which takes no time to prepare.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from msvit.compiling.cpu import CpuMSViT
from msvit.lab.evaluation.shared import packed
from msvit.lab.timing import clock, in_turn, speed_up, spread
from msvit.model import MSViT


@dataclass(frozen=True)
class Latency:
    what: str  # "dense host" or the mode, gate included
    device: str
    dtype: str
    batch: int
    ms_per_image: float  # median
    quartiles: tuple[float, float]
    images_per_second: float
    speed_up: float | None = None  # over the dense host beside it: median of the ratios, round by round


@torch.inference_mode()
def measure_latency(
    model: MSViT, images: Tensor, batch: int, dtype: torch.dtype = torch.float32, rounds: int = 20
) -> list[Latency]:
    """Times whole forwards on different images each round; `images` holds at least `batch` of them.

    Warm-up goes over the images that are timed: some libraries prepare for each new shape.
    """
    if rounds < 2:
        raise ValueError(f"rounds is {rounds}, but quartiles need at least 2; 20 is usual")
    if len(images) < batch:
        raise ValueError(f"there are {len(images)} images, but a batch of {batch} was asked for; give more images")
    device, warmup = images.device, max(3, min(rounds, -(-len(images) // batch)))
    host: Any = model.host
    sides = tuple(host.patch_embed.img_size or ())
    with packed(model) as model, torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
        ours = CpuMSViT(model) if type(model) is MSViT and not images.is_cuda else model
        calls: dict[str, Callable[[Tensor], Any]] = {"packed": ours}
        if getattr(host, "dynamic_img_size", False) or sides == tuple(images.shape[2:]):
            calls["dense host"] = host
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(-warmup, rounds):
            which = (torch.arange(batch) + turn % rounds * batch) % len(images)
            these = images[which.to(device)]
            for name in in_turn(calls, turn):
                seconds = clock(partial(calls[name], these), device)
                if turn >= 0:
                    times[name].append(1e3 * seconds / batch)
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = [row(name, values, named, str(dtype).removeprefix("torch."), batch) for name, values in times.items()]
    if "dense host" not in times:
        return rows
    faster = round(speed_up(times["dense host"], times["packed"]).median, 4)
    return [replace(each, speed_up=faster) if each.what == "packed" else each for each in rows]


def row(what: str, values: list[float], device: str, dtype: str, batch: int) -> Latency:
    median, low, high = spread(values)
    return Latency(
        what=what, device=device, dtype=dtype, batch=batch, ms_per_image=round(median, 4),
        quartiles=(round(low, 4), round(high, 4)), images_per_second=round(1e3 / median, 1),
    )  # fmt: skip
