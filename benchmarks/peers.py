"""Are EViT, DynamicViT and ToMe in msvit as fast as they are when written plainly, for dense batches only?

    python benchmarks/peers.py --batch 256 --out benchmarks/results/peers/h200.json

The published methods on all tokens, where every image keeps the same number, so that batches stay (b, n, d) and no
layout is needed: fused attention, the halves of a block and what is between them compiled, all of it replayed as a CUDA
graph. Timed in turn with the same methods as `msvit bench --reducer` runs them, at the same rates and with the same
weights.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import timm
import torch
import torch.nn.functional as F
from shared import markdown, pick_device, record, run_script, script_parser, source_line, write
from torch import Tensor

import msvit
from msvit.compiling.graphs import Captured
from msvit.reduction.base import share_of
from msvit.reduction.dynamicvit import kept_of
from msvit_lab.bench.workload import SETS
from msvit_lab.timing import Call, burst_size, speed_up, spread, time_all

P = ParamSpec("P")
T = TypeVar("T")

MODEL = "deit_small_patch16_224"
MAKERS: dict[str, Callable[[], msvit.Reducer]] = {
    "evit-0.7": lambda: msvit.EViT(rate=0.7),
    "dynamicvit-0.7": lambda: msvit.DynamicViT(rate=0.7),
    "tome-r13": lambda: msvit.ToMe(r=13),
}


def part(run: Callable[P, T]) -> Callable[P, T]:
    """On a GPU compiled once for all blocks, whatever the number of tokens."""
    fast = torch.compile(run, dynamic=True)

    @wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        tensors = [value for value in args if isinstance(value, Tensor)]
        if not tensors[0].is_cuda:
            return run(*args, **kwargs)
        for tensor in tensors:
            torch._dynamo.mark_static(tensor, 0)  # the batch
        return fast(*args, **kwargs)

    return call


def evit(host: Any, reducer: Any, image: Tensor) -> Tensor:
    x = embed(host, image)
    for index, block in enumerate(host.blocks):
        x, q, k = attention_half(block, x)
        left = share_of(x.shape[1] - 1, reducer.rate)
        if index in reducer.config["at"] and left < x.shape[1] - 1:
            x = focus(x, q[:, :, :1], k, left)
        x = mlp_half(block, x)
    return head(host, x)


@part
def focus(x: Tensor, q: Tensor, k: Tensor, left: int) -> Tensor:
    """What the class token looks at, and one token of all the rest."""
    score = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).softmax(-1).mean(1)[:, 0, 1:]  # (b, n - 1)
    top = score.topk(left, dim=1).indices
    fused = score.scatter(1, top, 0.0)[:, None] @ x[:, 1:]
    return torch.cat([x[:, :1], pick(x[:, 1:], top), fused], dim=1)


def dynamicvit(host: Any, reducer: Any, image: Tensor) -> Tensor:
    x = embed(host, image)
    first, at = x.shape[1] - 1, reducer.config["at"]
    for index, block in enumerate(host.blocks):
        if index in at:
            stage = at.index(index)
            x = thin_out(reducer.predictors[stage], x, kept_of(first, reducer.shares[stage]))
        x = mlp_half(block, attention_half(block, x)[0])
    return head(host, x)


@part
def thin_out(predictor: Any, x: Tensor, left: int) -> Tensor:
    own, shared = predictor.stem(x[:, 1:]).chunk(2, dim=-1)
    shared = shared.mean(1, keepdim=True).expand_as(own)
    keep, drop = predictor.head(torch.cat([own, shared], dim=-1)).unbind(-1)
    return torch.cat([x[:, :1], pick(x[:, 1:], (keep - drop).topk(left, dim=1).indices)], dim=1)


def tome(host: Any, reducer: Any, image: Tensor) -> Tensor:
    x = embed(host, image)
    size = torch.ones_like(x[..., 0])  # whole numbers up to 256 are exact in bfloat16
    for block in host.blocks:
        x, _, k = attention_half(block, x, size)
        if r := min(reducer.config["r"], (x.shape[1] - 1) // 2):
            x, size = merge(x, size, k, r)
        x = mlp_half(block, x)
    return head(host, x)


@part
def merge(x: Tensor, size: Tensor, keys: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Tokens at even places into those at odd ones, the r most alike pairs; the class token stays first."""
    metric = F.normalize(keys.mean(1), dim=-1)
    likeness = metric[:, ::2] @ metric[:, 1::2].transpose(1, 2)
    likeness[:, 0] = -math.inf
    best, partner = likeness.max(2)
    order = best.argsort(1, descending=True)
    source, stays = order[:, :r], order[:, r:].sort(1).values
    target = partner.gather(1, source)
    whole = size[:, 1::2].scatter_add(1, target, size[:, ::2].gather(1, source))
    weighted = x * size[..., None]
    into = target[..., None].expand(-1, -1, x.shape[2])
    sums = weighted[:, 1::2].scatter_add(1, into, pick(weighted[:, ::2], source))
    sizes = torch.cat([size[:, ::2].gather(1, stays), whole], dim=1)
    return torch.cat([pick(x[:, ::2], stays), sums / whole[..., None]], dim=1), sizes


def embed(host: Any, image: Tensor) -> Tensor:
    return host.norm_pre(host._pos_embed(host.patch_embed(image)))


@part
def attention_half(block: Any, x: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Also queries and keys, (b, heads, n, head_dim). `size`: how often each key counts."""
    attn, n = block.attn, x.shape[1]
    q, k, v = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    bias = None if size is None else size.log()[:, None, None].expand(-1, attn.num_heads, n, -1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
    return x + block.ls1(attn.proj(y)), q, k


@part
def mlp_half(block: Any, x: Tensor) -> Tensor:
    return x + block.ls2(block.mlp(block.norm2(x)))


def head(host: Any, x: Tensor) -> Tensor:
    return host.forward_head(host.norm(x))


def pick(x: Tensor, which: Tensor) -> Tensor:
    return x.gather(1, which[..., None].expand(-1, -1, x.shape[2]))


PLAIN: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {"evit": evit, "dynamicvit": dynamicvit, "tome": tome}


def pair(name: str, host: Any, reducer: msvit.Reducer, coarse: int) -> tuple[Call, msvit.MSViT]:
    """A method written plainly, and as a reducer of msvit that sees every token."""
    model = msvit.convert(host, coarse=coarse, gate=msvit.AllFine(coarse=coarse), reducer=reducer).eval()
    return lambda image: PLAIN[name.partition("-")[0]](host, reducer, image), model


def collect(batch: int, rounds: int, seconds: float, commit: str | None) -> dict[str, Any]:
    """Milliseconds of each, and how much faster it is than the dense host."""
    device = pick_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    host = timm.create_model(MODEL).to(device, dtype).eval()
    sets = [torch.randn(batch, 3, 224, 224, device=device, dtype=dtype) for _ in range(SETS)]
    how: dict[str, Any] = {"device": device, "rounds": rounds, "burst": burst_size(device, batch), "seconds": seconds}
    with torch.inference_mode():
        calls: dict[str, Call] = {"dense": captured(torch.compile(host) if device.type == "cuda" else host, sets[0])}
        for name, make in MAKERS.items():
            plain, model = pair(name, host, make(), coarse=32)
            calls |= {f"{name}, plain": captured(plain, sets[0]), f"{name}, msvit": msvit.compile(model)}
            print(f"{name} is compiled", flush=True)
        used = time_all(calls, sets, passes=2, **how)
    rows = [
        {"name": name, "ms": spread(own).rounded(), "speed_up": speed_up(used["dense"], own).rounded()}
        for name, own in used.items()
    ]
    return {**record(device, commit), "model": MODEL, "batch": batch, "rows": rows}


def captured(call: Call, image: Tensor) -> Call:
    """On a GPU as a CUDA graph, which reads a copy of the images."""
    if not image.is_cuda:
        return call
    own = image.clone()
    with torch.inference_mode(False), torch.no_grad():
        graph = Captured(lambda: (call(own),), None)

    def run(images: Tensor) -> Tensor:
        own.copy_(images)
        return graph()[0]

    return run


def table(results: dict[str, Any]) -> str:
    rows = [
        [row["name"], f"{row['ms']['median']:.2f}", f"{row['speed_up']['median']:.2f}x"] for row in results["rows"]
    ]
    return markdown(["", "ms a batch", "speed-up"], rows, source_line(results))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    write(given.out, table, lambda: collect(given.batch, given.rounds, given.seconds, given.commit))


if __name__ == "__main__":
    run_script(main)
