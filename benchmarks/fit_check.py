"""What msvit.fit_gate gains, without labels: a dense model with the shipped gate, and with this gate fitted.

    python benchmarks/fit_check.py RUN --nums 300,1000 --out fitted.json
    python benchmarks/fit_check.py vit_base_patch16_224 --weights FILE --data FOLDER --nums 1000 --out fitted.json

RUN is a run of `msvit train --gate none`, a classifier or a Segmenter. The gate is fitted to some of its training
images, or to windows of them, at each budget, and accuracy is measured on its validation images. Of a timm model the
data are a folder with images, or a val.tar of them, in folders named by the index of their class: the gate is fitted to
the first of them in random order, and measured on the others.
"""

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gate_photos import on_device
from gate_release import Method, Scenes, measure
from gate_study import BUDGETS, Clock, Photos, numbers, sides, words
from gate_tables import SHIPPED
from shared import pick_device, record, run_script, script_parser
from torch import Tensor

from msvit.conversion import convert
from msvit.gate_fitting import fit_gate
from msvit.gates import Gate
from msvit.saving.folder import load_gate
from msvit.segmenter import Segmenter
from msvit_lab.build import make_loader
from msvit_lab.calibration import Prepared, make_host
from msvit_lab.hosts import read_run
from msvit_lab.json_values import write_json
from msvit_lab.runs import read_config
from msvit_lab.tasks import TASKS


class Classifier:
    """Images of a run, and the accuracy that a gate has in its dense model."""

    def __init__(self, run: Path, args: argparse.Namespace, device: torch.device) -> None:
        self.photos = Photos.read(run.name, str(run), args.data, args.num, args.batch, device)
        self.source = Path(args.data or read_config(run)["config"].data.source) / "train"
        gate = load_gate("default").for_cells(self.photos.model.coarse).to(device)
        self.model, self.device = self.photos.model.with_options(gate=gate).eval(), device

    def images(self, num: int) -> Tensor:
        prepared = Prepared(self.model, self.source, None, num)
        return torch.cat([batch.image for batch in prepared.batches(prepared.size, device=self.device)])

    def rows(self, gate: Gate, budgets: tuple[float, ...]) -> list[dict[str, Any]]:
        found = self.photos.measure("gate", self.photos.score(gate), budgets, gate)
        return [{"budget": row.budget, "macs": row.macs, "top1": row.top1, "kl": row.kl} for row in found]

    def dense(self) -> float:
        return (self.photos.logits.argmax(1) == self.photos.label).double().mean().item()


class Pretrained(Classifier):
    """A timm model with weights of a file, and images with a label."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        name, num = str(args.run), max(args.nums)
        dense = convert(make_host(name, args.weights, pretrained=False), gate="all-fine").to(device).eval()
        dense.classes = map(str, range(dense.num_classes))
        prepared = Prepared(dense, Path(args.data), None, num + args.num, labels=True)
        image, label = on_device(prepared, prepared.size, device)
        self.first = image[:num]
        self.photos = Photos(name, name, dense, prepared, image[num:], label[num:], label, args.batch)
        self.photos.logits = self.photos.predict(dense)
        gate = load_gate("default").for_cells(dense.coarse).to(device)
        self.model, self.device = dense.with_options(gate=gate).eval(), device

    def images(self, num: int) -> Tensor:
        return self.first[:num]


class Scenery:
    """Windows of a Segmenter's run, and the mIoU that a gate has in its dense model."""

    def __init__(self, run: Path, args: argparse.Namespace, device: torch.device) -> None:
        self.about, self.device = read_config(run), device
        self.plain = read_run(run)[0].to(device).eval()
        self.side = self.about["config"].data.img_size
        self.scenes = Scenes.read(self.about, args.data, self.side, device)
        config = self.about["config"]
        source = TASKS[config.task].open(config, "train", self.about["classes"])
        self.train = Scenes(make_loader(source, config, train=False, device=device), self.scenes.how)
        gate = load_gate("default").for_cells(self.plain.coarse)
        encoder = convert(self.plain.host, gate=gate, coarse=self.plain.coarse)
        self.model = Segmenter(encoder, self.plain.decoder).to(device).eval()

    def images(self, num: int) -> Tensor:
        windows = torch.cat([window.cpu() for window in self.train.windows()])
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:num]
        return windows[order].to(self.device)

    def rows(self, gate: Gate, budgets: tuple[float, ...]) -> list[dict[str, Any]]:
        methods = [Method("gate", self.side, gate, budget) for budget in budgets]
        return [{"budget": each.budget, **measure(self.plain, each, self.scenes)} for each in methods]

    def dense(self) -> float:
        found: float = measure(self.plain, Method("dense", self.side), self.scenes)["miou"]
        return found


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("run", type=Path, help="or the name of a timm model")
    parser.add_argument("--weights", type=Path, help="of a timm model")
    parser.add_argument("--data", help="the set, if not where it was in training")
    parser.add_argument("--nums", type=sides, default=(300, 1000), help="images to fit to")
    parser.add_argument("--steps", type=int, help="of each target")
    parser.add_argument("--targets", type=words, help="those to try; by default all that apply")
    parser.add_argument("--budgets", type=numbers, default=BUDGETS)
    parser.add_argument("--num", type=int, default=10**9, help="validation images of a classifier")
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    device, clock = pick_device(), Clock(60.0)
    subject: Any
    if args.run.is_dir():
        subject = (Scenery if isinstance(read_run(args.run)[0], Segmenter) else Classifier)(args.run, args, device)
    else:
        subject = Pretrained(args, device)
    results: dict[str, Any] = record(device, args.commit) | {"dense": subject.dense(), "rows": []}

    def add(name: str, gate: Gate, budgets: tuple[float, ...], **also: Any) -> None:
        rows = [{"method": name, **also, **row} for row in subject.rows(gate, budgets)]
        results["rows"] += rows
        write_json(args.out, results)
        clock.note(f"{name} {also}: {rows}")

    clock.note(f"dense: {results['dense']:.4f}")
    add(SHIPPED, subject.model.gate, args.budgets)
    for num in args.nums:
        images = subject.images(num)
        for budget in args.budgets:
            begin = time.perf_counter()
            gate = fit_gate(subject.model, images, budget, steps=args.steps, targets=args.targets).gate
            seconds = time.perf_counter() - begin
            add(f"fitted, {len(images)} images", gate, (budget,), seconds=seconds, fit=asdict(gate.fit_record))


if __name__ == "__main__":
    run_script(main)
