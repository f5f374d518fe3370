"""Whether budgets are met on images that no threshold was set on, for hosts of several families with random weights.

    python benchmarks/budget_check.py --sets pets=PETS/train,PETS/val --out benchmarks/results/gates/budgets.json
    python benchmarks/budget_check.py --sets pets=PETS/train,PETS/val --num 64 --ms --out times.json

`stored`: `convert(host, gate="default", budget=b)`, by the curves of the gate. `calibrated`: `calibrate` on images of
the first folder. Both are held against images of the second, where only the gate runs: scores do not depend on hosts.
With --ms budgets are shares of a dense ViT-S's time, given to `calibrate` in milliseconds; its model and the host are
then timed in turn: `ms` is over the host's time before, as the budget is, `ms in turn` over that between its calls.
With OMP_NUM_THREADS=1 the time of the process counts, which other processes disturb less.
"""

import os
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import timm
import torch
from gate_study import names_and_folders, numbers
from gate_training import photo_source
from shared import markdown, pick_device, record, run_script, script_parser, source_line, write
from torch import Tensor

import msvit
from msvit.budget import Cost, score_images, time_values
from msvit_lab.calibration import Prepared

HOSTS = {
    "ViT-S/16": "vit_small_patch16_224", "DINOv2 S/14": "vit_small_patch14_reg4_dinov2",
    "DINOv3 S/16": "vit_small_patch16_dinov3", "SigLIP B/16": "vit_base_patch16_siglip_224",
    "Swin-T": "swin_tiny_patch4_window7_224",
}  # fmt: skip
SIZES = {"DINOv2 S/14": {"img_size": 224}}  # where it is not the host's own
BATCH, ROUNDS = 4, 3  # where time is measured
Rows = list[dict[str, Any]]


def photographs(model: Any, folder: str, num: int) -> Tensor:
    """Squares as the host wants them, of `num` images drawn once; label maps are left out."""
    size = model.host.patch_embed.img_size[0]
    prepared = Prepared(model, Path(folder), size, num)
    prepared.source = photo_source(Path(folder), num)
    return torch.cat([batch.image for batch in prepared.batches(size)])


def check_macs(model: Any, images: Tensor, unseen: Tensor, budgets: tuple[float, ...]) -> Rows:
    scored, rows = score_images(model, unseen), []
    cost = Cost(model, scored.grid, "macs")
    least, most = cost.by_count()[[0, -1]].tolist()
    for budget in (budget for budget in budgets if least <= budget <= most):
        stored = msvit.convert(model.host, gate="default", budget=budget)
        for way, found in {"stored": stored, "calibrated": msvit.calibrate(model, images, budget)}.items():
            macs = cost(scored.fine(found.gate.threshold, "threshold"))
            rows.append({"budget": budget, "way": way, "mean": macs.mean().item(), "std": macs.std().item()})
    return rows


@torch.inference_mode()
def check_ms(model: Any, images: Tensor, unseen: Tensor, budgets: tuple[float, ...]) -> Rows:
    rows, parts = [], unseen.split(BATCH)
    clock = process_time if images.device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    for budget in budgets:
        before = time_values(lambda _: model.host(images[:BATCH]), (0,), 7, clock)[0] * 1e3 / BATCH
        models = msvit.calibrate(model, images.split(BATCH), budget * before, "ms", clock), model.host
        times = [time_values(lambda i: models[int(i)](part), (0, 1), ROUNDS, clock) for part in parts]  # noqa: B023
        ms, dense = (1e3 * sum(seconds) / len(unseen) for seconds in zip(*times, strict=True))
        about = {"budget": budget, "ms": ms, "dense": dense, "before": before, "load": os.getloadavg()[0]}
        rows += [about | {"way": way, "mean": ms / over} for way, over in (("ms", before), ("ms in turn", dense))]
    return rows


def table(results: dict[str, Any]) -> str:
    """A line for each host and budget: by how many percent the mean of unseen images misses it, on each set."""
    rows = results["rows"]
    columns = list(dict.fromkeys((r["way"], r["set"]) for r in sorted(rows, key=lambda r: r["way"], reverse=True)))
    found = {(r["host"], r["budget"], r["way"], r["set"]): f"{100 * (r['mean'] / r['budget'] - 1):+.1f}" for r in rows}
    lines = [
        [host, f"{budget:g}", *(found.get((host, budget, *column), "") for column in columns)]
        for host, budget in dict.fromkeys(key[:2] for key in found)
    ]
    return markdown(["host", "budget", *map(", ".join, columns)], lines, f"In percent.\n{source_line(results)}")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--sets", nargs="+", required=True, help="NAME=FOLDER,FOLDER ...: to calibrate on, and unseen")
    parser.add_argument("--budgets", type=numbers, default=(0.5, 0.6, 0.72))
    parser.add_argument("--calibrate", type=int, default=300, help="images to calibrate on")
    parser.add_argument("--num", type=int, default=500, help="unseen images")
    parser.add_argument("--ms", action="store_true", help="budgets of time, for the first host")
    args, device = parser.parse_args(), pick_device()

    def measure() -> dict[str, Any]:
        rows: Rows = []
        for name in list(HOSTS)[: 1 if args.ms else None]:
            host = timm.create_model(HOSTS[name], **SIZES.get(name, {})).to(device).eval()
            model = msvit.convert(host, gate="default")
            for own, folders in names_and_folders(args.sets).items():
                known, unseen = folders.split(",")
                images = photographs(model, known, args.calibrate), photographs(model, unseen, args.num)
                found = (check_ms if args.ms else check_macs)(model, *images, args.budgets)
                rows += [{"host": name, "set": own, "num": len(images[1])} | row for row in found]
        return record(device, args.commit) | {"rows": rows}

    write(args.out, table, measure)


if __name__ == "__main__":
    run_script(main)
