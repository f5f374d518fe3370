"""ImageNet without labels: ways to spend fewer multiply-adds on a trained ViT, by accuracy and by time.

    python benchmarks/imagenet.py --weights FILE --val VAL.tar --images PHOTOS.tar --out imagenet.json
    python benchmarks/imagenet.py ... --distill MORE.tar MORE.tar           # and a distilled model
    python benchmarks/imagenet.py ... --schedules imagenet.json --stages dense,published,merged,timed --batches 1

FILE has weights of timm's vit_base_patch16_224; VAL.tar images of 224 px in folders named by the index of their class;
PHOTOS.tar about a thousand photographs without labels, by which budgets and schedules are set; MORE.tar some thousands
that `msvit.distill` learns from. All ways are compared at the multiply-adds of ToMe with r = 8, 13 and 16: `over_tome`
is the difference in top-1, with its standard error over images. `over_tome_in_time` is that to ToMe, between these r,
where it takes the same time in batches of the first size. `--schedules` takes r of each block from a file of results,
to time the same models on another machine.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from shared import markdown, pick_device, record, run_script, script_parser, source_line
from torch import Tensor
from torchvision.transforms.functional import center_crop, pil_to_tensor

import msvit
from msvit.budget.divergence import kl_divergence
from msvit.budget.thresholds import Cost
from msvit.reduction import EViT, ToMe
from msvit.types import ScaleGrid
from msvit_lab.data.files import read_bytes, scan
from msvit_lab.data.opening import decode
from msvit_lab.json_values import write_json
from msvit_lab.timing import burst_size, spread, time_all

SIDE, PUBLISHED = 224, (8, 13, 16)  # px of the images, r of ToMe
SMALLER = (192, 176, 160)  # px: dense models of about the same multiply-adds
BATCH = 250


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--val", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--distill", type=Path, nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=2000, help="of distill")
    parser.add_argument("--stages", default="dense,published,merged,shipped,fitted_gate,combined,distilled,timed")
    parser.add_argument("--trials", type=int, help="of fit_reducer")
    parser.add_argument("--schedules", type=Path, help="a file of results, whose schedules are not searched again")
    parser.add_argument("--batches", default="256,1", help="sizes to time")
    study = ImageNetStudy(parser.parse_args())
    for stage in study.args.stages.split(","):
        getattr(study, stage)()
        write_json(study.args.out, study.results())
    print(table(study.results()))


class ImageNetStudy:
    """The rows of a table, measured stage by stage: methods of these names, in the order of --stages."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin, self.rows = args, time.perf_counter(), list[dict[str, Any]]()
        self.device = device = pick_device()
        self.vit = timm.create_model("vit_base_patch16_224", checkpoint_path=args.weights).eval().to(device)
        self.vit = self.vit.bfloat16() if device.type == "cuda" else self.vit
        names, images = read_tar(args.val)
        self.label = torch.tensor([int(name.split("/")[-2]) for name in names], device=device)
        self.val, self.photos = self.prepare(images), self.prepare(read_tar(args.images)[1])
        self.wanted = self.run(self.vit)
        self.plain = msvit.convert(self.vit, gate="all-fine").eval()
        grid = ScaleGrid(SIDE, SIDE, fine=16, coarse=32)
        cost, fine = Cost(self.plain, grid, "macs"), torch.ones(1, 7, 7, dtype=torch.bool)
        self.budgets = {r: cost(fine, ToMe(r=r)).item() for r in PUBLISHED}
        rates = [round(0.01 * percent, 2) for percent in range(99, 29, -1)]
        self.rates = [
            next(rate for rate in rates if cost(fine, self.evit(rate).reducer).item() <= budget)
            for budget in self.budgets.values()
        ]
        self.right: dict[str, Tensor] = {}
        self.models: dict[str, Any] = {}
        self.fitted: dict[int, Any] = {}
        self.note(f"{len(self.val)} images, {len(self.photos)} photographs")

    def note(self, words: str) -> None:
        print(f"{time.perf_counter() - self.begin:6.1f} s  {words}", flush=True)

    def prepare(self, images: Tensor) -> Tensor:
        images = center_crop(images, [SIDE, SIDE]).to(self.device)
        return ((images.float() / 255 - 0.5) / 0.5).to(self.vit.patch_embed.proj.weight.dtype)

    @torch.inference_mode()
    def run(self, model: Any, side: int = SIDE) -> Tensor:
        """Logits of the validation images, in float32."""
        found = []
        for image in self.val.split(BATCH):
            if side != SIDE:
                size = (side, side)
                image = F.interpolate(image.float(), size, mode="bicubic", antialias=True).to(image.dtype)
            out = model(image)
            found.append((out if isinstance(out, Tensor) else out.logits).float())
        return torch.cat(found)

    def add(self, name: str, model: Any, macs: float | None = None, side: int = SIDE, **more: Any) -> None:
        """`macs`: its share of the dense model's multiply-adds, by default measured."""
        macs = self.share(model, side) if macs is None else macs
        logits = self.run(model, side)
        right = self.right[name] = (logits.argmax(1) == self.label).double()
        top1 = right.mean().item()
        same = (logits.argmax(1) == self.wanted.argmax(1)).double().mean().item()
        kl = kl_divergence(self.wanted, logits).mean().item()
        row = {"name": name, "macs": macs, "top1": top1, "same": same, "kl": kl, "side": side, **more}
        for r, budget in self.budgets.items():
            if abs(macs - budget) < 0.02 and (tome := self.right.get(tome_name(r))) is not None:
                row["over_tome"] = [(right - tome).mean().item(), (right - tome).std().item() / len(right) ** 0.5]
        self.rows.append(row)
        self.models[name] = model
        self.note(f"{name}: {100 * macs:.1f} % of the multiply-adds, top-1 {100 * top1:.2f} %, divergence {kl:.4f}")

    def share(self, model: Any, side: int = SIDE) -> float:
        """Multiply-adds of the validation images, gate and matching included, as a share of the dense model's."""
        dense = float(msvit.macs(self.plain, self.val[:1]))
        image = self.val if side == SIDE else F.interpolate(self.val[:1].float(), (side, side)).to(self.val.dtype)
        found = [msvit.macs(model, part).double() for part in image.split(BATCH)]
        return torch.cat(found).mean().item() / dense

    def evit(self, rate: float) -> Any:
        return self.plain.with_options(reducer=EViT(rate=rate)).eval()

    # Stages

    def dense(self) -> None:
        self.add("dense, 224 px", self.plain, 1.0)
        for side in SMALLER:
            file = {"file": str(self.args.weights)}
            vit = timm.create_model("vit_base_patch16_224", pretrained=True, pretrained_cfg_overlay=file, img_size=side)
            vit = vit.eval().to(self.val)
            model = msvit.convert(vit, coarse=16, gate=msvit.AllFine(16)).eval()
            self.add(f"dense, {side} px", model, side=side)

    def published(self) -> None:
        for r, budget in self.budgets.items():
            self.add(tome_name(r), self.plain.with_options(reducer=ToMe(r=r)), budget)
        for rate in self.rates:
            self.add(f"EViT, rate {rate}", self.evit(rate))

    def merged(self) -> None:
        for budget in self.budgets.values():
            model = msvit.convert(self.vit, method="auto", budget=budget).eval()
            self.add(f"auto, no images, {100 * budget:.0f} %", model, r=model.reducer.r)
        for r, budget in self.budgets.items():
            begin = time.perf_counter()
            name = f"auto, images, {100 * budget:.0f} %"
            model = self.fitted[r] = self.fit_reducer(name, self.plain, budget, self.args.trials)
            about = {"r": model.reducer.r, "search": str(model.reducer.search), "seconds": time.perf_counter() - begin}
            self.add(name, model, **about)

    def fit_reducer(self, name: str, model: Any, budget: float, trials: int | None) -> Any:
        """A model that merges, by a search or by the schedule of the row of that name in --schedules."""
        if self.args.schedules is None:
            return msvit.fit_reducer(model, self.photos, budget, trials=trials)
        rows = json.loads(self.args.schedules.read_text())["rows"]
        return model.with_options(reducer=ToMe(r=next(row["r"] for row in rows if row["name"] == name)))

    def gated(self) -> Any:
        return msvit.convert(self.vit, gate=msvit.load_gate("default").to(self.val)).eval()

    def shipped(self) -> None:
        for budget in self.budgets.values():
            self.add(f"shipped gate, {100 * budget:.0f} %", msvit.calibrate(self.gated(), self.photos, budget))

    def fitted_gate(self) -> None:
        for budget in self.budgets.values():
            begin = time.perf_counter()
            model = msvit.fit_gate(self.gated(), self.photos, budget)
            about = {"fit": str(model.gate.fit_record), "seconds": time.perf_counter() - begin}
            self.add(f"fitted gate, {100 * budget:.0f} %", model, **about)

    def combined(self) -> None:
        """The shipped gate for a tenth of the multiply-adds, and merging for the rest."""
        given = msvit.calibrate(self.gated(), self.photos, 0.9)
        for budget in self.budgets.values():
            name = f"shipped gate at 90 % and fit_reducer, {100 * budget:.0f} %"
            model = self.fit_reducer(name, given, budget, 60)
            self.add(name, model, r=model.reducer.r)

    def distilled(self) -> None:
        """One model for all budgets, with the schedules that were fitted before."""
        if not self.args.distill:
            return
        photos = [self.photos, *(self.prepare(read_tar(path)[1]) for path in self.args.distill)]
        begin, reducers = time.perf_counter(), [model.reducer for model in self.fitted.values()]
        model = msvit.distill(
            self.fitted[PUBLISHED[-1]], photos, steps=self.args.steps, reducers=reducers, progress=True
        )
        about = {"steps": self.args.steps, "seconds": time.perf_counter() - begin, "images": sum(map(len, photos))}
        self.note(f"distilled: {model.distillation}")
        self.add("distilled, all tokens", model.with_options(reducer=None), 1.0, **about)
        for r, reducer in zip(self.fitted, reducers, strict=True):
            self.add(f"distilled, {100 * self.budgets[r]:.0f} %", model.with_options(reducer=reducer), **about)

    def timed(self) -> None:
        """Images per second, compiled, all rows in turn; distilled models take as long as those they come from."""
        for batch in map(int, self.args.batches.split(",")):
            sets = [self.val[start : start + batch] for start in range(0, 4 * batch, batch)]
            rows = [row for row in self.rows if not row["name"].startswith("distilled")]
            fast = {row["name"]: msvit.compile(self.models[row["name"]], inductor=False) for row in rows}
            calls = {row["name"]: timed_call(fast[row["name"]], row["side"]) for row in rows}
            how = {"device": self.device, "rounds": 12, "burst": min(8, burst_size(self.device, batch)), "seconds": 20}
            with torch.inference_mode():
                times = time_all(calls, sets, passes=2, **how)
            for row in rows:
                row[f"images_per_second_{batch}"] = 1e3 * batch / spread(times[row["name"]]).median
            self.note(f"timed batches of {batch}")
        self.compare_in_time(f"images_per_second_{self.args.batches.split(',')[0]}")

    def compare_in_time(self, speed: str) -> None:
        """By how much each row is above ToMe where both take the same time, between the r that were timed."""
        rows = {row["name"]: row for row in self.rows}
        named = [rows[name] for name in ("dense, 224 px", *map(tome_name, PUBLISHED))]
        curve = sorted((1 / row[speed], row["top1"]) for row in named)
        for row in self.rows:
            if speed in row and curve[0][0] <= 1 / row[speed] <= curve[-1][0]:
                row["over_tome_in_time"] = row["top1"] - float(np.interp(1 / row[speed], *zip(*curve, strict=True)))

    def results(self) -> dict[str, Any]:
        return {**record(self.device, self.args.commit), "rows": self.rows, "num_images": len(self.val)}


def read_tar(path: Path) -> tuple[list[str], Tensor]:
    """Names, in order, and pixels (n, 3, h, w) in uint8 of a tar's images, all of one size."""
    places = sorted(scan(path), key=lambda place: place.name)
    with ThreadPoolExecutor() as pool:
        pixels = pool.map(lambda place: pil_to_tensor(decode(read_bytes(place), place.name)), places)
        return [place.name for place in places], torch.stack(list(pixels))


def tome_name(r: int) -> str:
    return f"ToMe, r = {r}"


def timed_call(model: Any, side: int) -> Any:
    """A call on images of another size is timed without the resizing, which is done once."""
    resized = cache(lambda image: F.interpolate(image.float(), (side, side)).to(image.dtype))
    return model if side == SIDE else lambda image: model(resized(image))


def table(results: dict[str, Any]) -> str:
    sizes = sorted({int(key.rpartition("_")[2]) for row in results["rows"] for key in row if "per_second" in key})[::-1]
    heads = ["", "multiply-adds", "top-1", "same class as dense", *(f"images/s, batch {size}" for size in sizes)]
    heads += ["over ToMe at equal multiply-adds", "at equal time"]
    rows = []
    for row in results["rows"]:
        speeds = [row.get(f"images_per_second_{size}") for size in sizes]
        shown = ["" if speed is None else f"{speed:,.0f}" for speed in speeds]
        shares = [f"{100 * row[key]:.{digits}f} %" for key, digits in (("macs", 0), ("top1", 2), ("same", 1))]
        over, in_time = row.get("over_tome"), row.get("over_tome_in_time")
        shown.append("" if over is None else f"{100 * over[0]:+.2f} +- {100 * over[1]:.2f}")
        shown.append("" if in_time is None else f"{100 * in_time:+.2f}")
        rows.append([row["name"], *shares, *shown])
    return markdown(heads, rows, source_line(results))


if __name__ == "__main__":
    run_script(main)
