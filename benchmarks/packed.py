"""Do fewer tokens take less time? The dense host and the packed model, in turn, in one run.

    python benchmarks/packed.py --batch 1 --share 0.3                                             # CPU
    python benchmarks/packed.py --device cuda --dtype bfloat16 --batch 256 --share 0.33 --spread 0.15 --compile

Random images, masks that differ from image to image: `share` of the cells fine on average, `spread` the standard
deviation between images. The learned gate runs and is timed, although the masks are then ours. Prints a table, then one
JSON line. "became speed" is the speed-up over the first baseline named, divided by the ratio of multiply-adds.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import timm
import torch
from torch import Tensor

import msvit


def clock(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, all of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def draw_mask(batch: int, side: int, share: float, spread: float) -> Tensor:
    wanted = (share + spread * torch.randn(batch)).clamp(0, 1) * side * side
    rank = torch.rand(batch, side * side).argsort(1).argsort(1)
    return (rank < wanted.round()[:, None]).view(batch, side, side)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    host = timm.create_model(args.model, pretrained=False, img_size=args.size).eval().to(device, dtype)
    model = msvit.convert(host).eval()
    side = args.size // model.coarse
    sets = [
        (
            torch.randn(args.batch, 3, args.size, args.size).to(device, dtype),
            draw_mask(args.batch, side, args.share, args.spread).to(device),
        )
        for _ in range(4)
    ]

    def packed(model: msvit.MSViT) -> Callable[[int], object]:
        def run(turn: int) -> object:
            image, mask = sets[turn % 4]
            model.gate(image)
            return model(image, mask=mask)

        return run

    calls: dict[str, Callable[[int], object]] = {"dense": lambda turn: host(sets[turn % 4][0]), "packed": packed(model)}
    if args.compile:
        fast_host = torch.compile(host)
        fast_model = msvit.convert(host, gate=model.gate).eval()
        fast_model.backbone.compile(dynamic=True)
        calls = {"dense, compiled": lambda turn: fast_host(sets[turn % 4][0]), **calls}
        calls["packed, compiled"] = packed(fast_model)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for turn in range(8):  # warm up, and compile
            for call in calls.values():
                call(turn)
        for turn in range(args.rounds):
            for name in list(calls) if turn % 2 else list(reversed(calls)):
                times[name].append(clock(lambda name=name, turn=turn: calls[name](turn), device))
        gate = args.batch * model.gate.num_macs(side * side)
        ratios = [
            float(msvit.macs(model, image, torch.ones_like(mask)).sum() / (msvit.macs(model, image, mask).sum() + gate))
            for image, mask in sets
        ]

    ratio, baseline = statistics.mean(ratios), next(iter(calls))
    rows = []
    print(f"{args.model}, {args.size} px, batch {args.batch}: {ratio:.2f}x fewer multiply-adds, gate included")
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        pairs = zip(times[baseline], values, strict=True)  # neighbours in time, so that drift cancels
        speedup = statistics.median(dense / own for dense, own in pairs)
        rows.append({"what": name, "ms": round(median, 3), "speedup": round(speedup, 3)})
        share = f"   {speedup / ratio:.2f} of it became speed" if name.startswith("packed") else ""
        print(f"{name:18} {median:9.3f} ms (quartiles {low:.3f} to {high:.3f})   {speedup:.2f}x of {baseline}{share}")
    print(json.dumps({
        "benchmark": "packed", **vars(args), "mac_ratio": round(ratio, 3), "baseline": baseline, "rows": rows,
        "threads": torch.get_num_threads(), "torch": torch.__version__, "timm": timm.__version__,
        "msvit": msvit.__version__,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
