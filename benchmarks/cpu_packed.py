"""Does a packed forward on the CPU turn saved multiply-adds into saved time?

    python benchmarks/cpu_packed.py [--model vit_small_patch16_224] [--batch 1] [--share 0.3] [--rounds 30]

Times the host and the packed model in turn, in one run, on random images with `share` of the cells fine at
random places that differ from image to image and from round to round. Prints a table, then one JSON line.
"""

import argparse
import json
import platform
import statistics
import time

import timm
import torch

import msvit


def timed(call: object) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    host = timm.create_model(args.model, pretrained=False).eval()
    model = msvit.convert(host).eval()  # the learned gate runs and is timed; the masks are then ours
    side = host.patch_embed.img_size[0] // model.coarse * model.coarse
    cells = side // model.coarse
    chooser = msvit.RandomGate(model.coarse, args.share).train()
    dense, packed, speedups, ratios = [], [], [], []
    with torch.inference_mode():
        for turn in range(args.rounds + 3):
            image = torch.randn(args.batch, 3, side, side)
            mask = chooser(image).mask

            def run_packed(image: torch.Tensor = image, mask: torch.Tensor = mask) -> None:
                model.gate(image)
                model(image, mask=mask)

            def run_dense(image: torch.Tensor = image) -> None:
                host(image)

            pair = [(run_dense, dense), (run_packed, packed)]
            for call, times in pair if turn % 2 else reversed(pair):
                seconds = timed(call)
                if turn >= 3:  # the first rounds warm up
                    times.append(seconds)
            if turn >= 3:
                full = msvit.macs(model, image, torch.ones_like(mask)).sum()
                mixed = msvit.macs(model, image, mask).sum() + args.batch * model.gate.num_macs(cells * cells)
                speedups.append(dense[-1] / packed[-1])
                ratios.append(float(full / mixed))

    speedup, ratio = statistics.median(speedups), statistics.mean(ratios)
    rows = {"dense host": dense, "packed, gate included": packed}
    for name, times in rows.items():
        low, middle, high = statistics.quantiles(times, n=4)
        print(f"{name:24} median {1e3 * middle:7.1f} ms   quartiles {1e3 * low:7.1f} to {1e3 * high:7.1f} ms")
    print(f"multiply-adds {ratio:.2f}x fewer, time {speedup:.2f}x less: {speedup / ratio:.2f} of it became speed")
    print(json.dumps({
        "benchmark": "cpu_packed", **vars(args), "size": side, "threads": torch.get_num_threads(),
        "machine": platform.machine(), "torch": torch.__version__, "timm": timm.__version__, "msvit": msvit.__version__,
        "dense_ms": round(1e3 * statistics.median(dense), 2), "packed_ms": round(1e3 * statistics.median(packed), 2),
        "mac_ratio": round(ratio, 3), "speedup": round(speedup, 3), "share_of_mac_ratio": round(speedup / ratio, 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
