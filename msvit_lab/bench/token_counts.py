"""Time against the number of tokens: a plain timm ViT, its blocks alone and the whole model (the paper's figure 10).

    found = measure_tokens("vit_small_patch16_224", [49, 196, 400], batch=1, device=device, dtype=torch.float32)
    found["rows"][0]                   # {"name": "blocks", "tokens": 49, "ms": {"median": ..., ...}, ...}
    plot_tokens(found, Path("tokens.png"))

For each number of tokens there is a model of that input, as wide as high where the number allows it; patch tokens are
counted, and the model adds its class token. Inputs are random, as times do not depend on them. All rows are timed in
turn. Models run as timm has them, without torch.compile.
"""

from dataclasses import replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msvit.saving import host as saved_host
from msvit_lab.config import Config, override
from msvit_lab.hosts import make_host, without_weights
from msvit_lab.timing import Call, burst_size, spread, time_all
from msvit_lab.viz.pictures import save_figure

ROWS = {"blocks": "transformer blocks only", "whole": "with patch embedding and classifier"}
NUM_CLASSES = 1000
COLOURS = {"blocks": "#0072B2", "whole": "#E69F00"}  # the paper's: blue and orange


class BlockCall(NamedTuple):
    """A block, and what the host calls it with besides the tokens."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@torch.inference_mode()
def measure_tokens(
    model: str, counts: list[int], *, batch: int, device: torch.device, dtype: torch.dtype, rounds: int = 40,
    seconds: float | None = None, settings: dict[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Two rows per number of tokens: the blocks, and the whole model."""
    calls: dict[str, Call] = {}
    sizes: dict[str, tuple[str, int]] = {}
    for num in dict.fromkeys(counts):
        host = make_vit(model, num, settings or {}).to(device, dtype).eval()
        image = torch.randn(batch, host.patch_embed.proj.in_channels, *host.patch_embed.img_size)
        image = image.to(device, dtype)
        x, blocks = record_blocks(host, image)
        for name, call in (("blocks", partial(run_blocks, blocks, x)), ("whole", partial(run_whole, host, image))):
            calls[f"{name}, {num} tokens"] = call
            sizes[f"{name}, {num} tokens"] = name, num
    turn = [torch.zeros(())]  # every row has its own input
    how: dict[str, Any] = {"device": device, "rounds": rounds, "burst": burst_size(device, batch), "seconds": seconds}
    used = time_all(calls, turn, passes=3, **how)
    return {
        "model": model, "size": None, "batch": batch, "train": False, "device": device.type,
        "dtype": str(dtype).removeprefix("torch."), "asked": {"tokens": list(counts), "settings": settings or {}},
        "rounds": len(next(iter(used.values()))),
        "rows": [
            {
                "name": sizes[key][0], "tokens": sizes[key][1], "ms": spread(own).rounded(),
                "images_per_second": round(1e3 * batch / spread(own).median, 1),
            }
            for key, own in used.items()
        ],
    }  # fmt: skip


def make_vit(name: str, num: int, settings: dict[str, str]) -> Any:
    """A timm ViT with random weights whose input has `num` patches; raises ValueError unless it is one."""
    config = without_weights(override(Config(), settings | {"model.name": name}))
    high, wide = patch_size(config)
    rows = next(side for side in range(isqrt(num), 0, -1) if num % side == 0)
    options = config.model.options | {"img_size": (rows * high, num // rows * wide)}
    torch.manual_seed(config.seed)
    return make_host(replace(config, model=replace(config.model, options=options)), NUM_CLASSES)


def patch_size(config: Config) -> tuple[int, int]:
    """Raise ValueError unless the model is a row of blocks behind a patch embedding."""
    host: Any = saved_host.build_on_meta(partial(make_host, config, NUM_CLASSES))
    patch = getattr(getattr(host, "patch_embed", None), "patch_size", None)
    if patch is None or not isinstance(getattr(host, "blocks", None), nn.Sequential | nn.ModuleList):
        raise ValueError(
            f"{config.model.name} is no plain ViT: it has no patch embedding with one row of blocks behind it, so its "
            f"number of tokens cannot be set; give --model vit_small_patch16_224, or another ViT of timm"
        )
    return patch


def record_blocks(host: Any, image: Tensor) -> tuple[Tensor, list[BlockCall]]:
    """The tokens that enter the first block, and each block with its other arguments, such as rotary positions."""
    first: list[Tensor] = []
    found: list[BlockCall] = []

    def record(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first.append(args[0])
        found.append(BlockCall(block, args[1:], kwargs))

    hooks = [block.register_forward_pre_hook(record, with_kwargs=True) for block in host.blocks]
    try:
        host(image)
    finally:
        for hook in hooks:
            hook.remove()
    return first[0], found


def run_blocks(blocks: list[BlockCall], x: Tensor, _: Tensor) -> Tensor:
    for block, args, kwargs in blocks:
        x = block(x, *args, **kwargs)
    return x


def run_whole(host: nn.Module, image: Tensor, _: Tensor) -> Tensor:
    return host(image)


def plot_tokens(found: dict[str, Any], path: Path) -> Path:
    """Milliseconds over the number of tokens, a line for the blocks and one for the whole model, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, words in ROWS.items():
        rows = sorted((row for row in found["rows"] if row["name"] == name), key=lambda row: row["tokens"])
        times = [[row["ms"][key] for row in rows] for key in ("median", "low", "high")]
        tokens = [row["tokens"] for row in rows]
        axes.plot(tokens, times[0], "-o", color=COLOURS[name], label=words, markersize=4)
        axes.fill_between(tokens, times[1], times[2], color=COLOURS[name], alpha=0.2, linewidth=0)
    axes.set(xlabel="tokens per image", ylabel=f"ms per batch of {found['batch']}", ylim=(0, None), xlim=(0, None))
    axes.set_title(f"{found['model']}, {found['device']}, {found['dtype']}", fontsize=10)
    axes.grid(alpha=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return save_figure(figure, path)
