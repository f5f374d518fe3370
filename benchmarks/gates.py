"""Gates in dense models, without labels: the one that comes with msvit, the same fitted to a set, and one trained anew.

    python benchmarks/gates.py --vit-s FILE --pets PETS.tar --cub CUB.tar --voc VOC.tar --out gates.json
    python benchmarks/gates.py ... --stages hosts,learned --vit-b FILE --imagenet VAL.tar --gates NEW   # trains gates
    python benchmarks/gates.py ... --stages saved --gates NEW/masks --photos PETS/val VOC/val   # as the shipped one is

The tars have square photographs of 240 px, train/CLASS/NAME and val/CLASS/NAME, of VOC train/images/NAME and
train/labels/NAME. On each set a dense ViT-S is fine-tuned, with a class token and, on Pets, without; on VOC it is the
encoder of a Segmenter. Then nothing but gates is trained, and every gate is measured at the same multiply-adds: its
budget is set on the validation images, which needs no labels.

A new gate learns what a coarse cell changes in the outputs of several models, each on the photographs of Pets and VOC
(`gate_targets.py`), from which a gate that is passed on may learn.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from shared import Clock, markdown, pick_device, read_tar, record, run_script, script_parser, source_line
from torch import Tensor
from torchvision.transforms.functional import center_crop

import msvit
from msvit.budget.divergence import kl_divergence
from msvit.budget.gate_fitting import random_crops, train_gate, warmup_cosine
from msvit.budget.gate_targets import Measures, standardized
from msvit.gates import DiscGate, Gate
from msvit.gates.curve import Curve
from msvit_lab.bench.images import Pictures, short
from msvit_lab.json_values import write_json

SIDE, BATCH, CHUNK = 224, 100, 256
STEPS = 3000  # of a new gate
BUDGETS = (0.72, 0.6, 0.49)
FITTED = 1000  # photographs
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EPOCHS = {"pets": 10, "pets without a class token": 10, "cub": 15, "voc": 15}
CURVES = {160: 1000, 224: 1000, 384: 1000, 512: 700, 640: 100}  # px, and images of each folder


@dataclass
class Subject:
    """A dense model, photographs of its set, and validation images with their labels."""

    name: str
    model: Any
    train: Tensor  # (n, 3, 240, 240) in uint8
    val: Tensor  # (n, 3, 224, 224), as the model takes them
    label: Tensor  # (n,), or (n, 224, 224)
    dense: Tensor | None = None  # its logits

    @torch.inference_mode()
    def logits(self, model: Any) -> Tensor:
        parts = [model(image).logits.float() for image in self.val.split(BATCH)]
        return torch.cat([part.to(torch.bfloat16) if part.ndim == 4 else part for part in parts])

    @torch.inference_mode()
    def measure(self, gate: Gate | None, budget: float | None) -> dict[str, float]:
        model = self.model
        if gate is not None:
            model = msvit.calibrate(model.with_options(gate=gate.to(self.val)), self.val, budget).eval()
        found, num = self.logits(model), len(self.val)
        self.dense = found if self.dense is None else self.dense
        pairs = zip(self.dense.split(BATCH), found.split(BATCH), strict=True)
        kl = sum(kl_divergence(one.float(), other.float()).sum().item() for one, other in pairs) / num
        macs = [torch.cat([msvit.macs(each, image) for image in self.val.split(BATCH)]) for each in (self.model, model)]
        share = (macs[1].double().mean() / macs[0].double().mean()).item()
        return {"score": score(found.argmax(1), self.label, found.shape[1]), "kl": kl, "macs": share}

    def photos(self, num: int) -> Tensor:
        """Some photographs of the set, in a fixed order, as the model takes them."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))[:num]
        return normalised(center_crop(self.train[order], [SIDE, SIDE]), self.val)


def score(found: Tensor, label: Tensor, num_classes: int) -> float:
    """Top-1 or, of maps, the mean intersection over union."""
    if label.ndim == 1:
        return (found == label).double().mean().item()
    valid = label < num_classes
    pairs = num_classes * label[valid] + found[valid]
    counts = torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes).double()
    hits = counts.diagonal()
    return (hits / (counts.sum(0) + counts.sum(1) - hits).clamp(min=1)).mean().item()


def main() -> None:
    parser = script_parser(__doc__)
    for name in ("--vit-s", "--vit-b", "--pets", "--cub", "--voc", "--imagenet", "--gates"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--photos", type=Path, nargs="*", default=[], help="folders whose images set the curves")
    parser.add_argument("--stages", default="hosts,given,fitted")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--quick", action="store_true", help="few images and steps, to see that it runs")
    args = parser.parse_args()
    study = Study(args)
    for stage in args.stages.split(","):
        getattr(study, stage)()


class Study:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.clock = args, pick_device(), Clock(60.0)
        self.num, self.steps = (16, 2) if args.quick else (10**9, STEPS)  # images of a set, and steps of a new gate
        self.budgets = [float(word) for word in args.budgets.split(",")]
        self.subjects: list[Subject] = []
        self.rows: list[dict[str, Any]] = []

    def add(self, subject: Subject, name: str, gate: Gate | None, budget: float | None, **more: Any) -> None:
        row = {"set": subject.name, "method": name, "budget": budget, **subject.measure(gate, budget), **more}
        self.rows.append(row)
        write_json(self.args.out, {**record(self.device, self.args.commit), "rows": self.rows})
        about = f"{100 * row['score']:.2f} at {100 * row['macs']:.1f} %, divergence {row['kl']:.4f} {more or ''}"
        self.clock.note(f"{subject.name}, {name}, {budget}: {about}")

    # Stages

    def hosts(self) -> None:
        """Fine-tune a dense model on each set, and measure it."""
        for name, path in (("pets", self.args.pets), ("cub", self.args.cub), ("voc", self.args.voc)):
            if path is None:
                continue
            data = read_set(path, self.num)
            self.clock.note(f"{name}: {len(data['train'][0])} photographs, {len(data['val'][0])} validation images")
            for without in (False, True) if name == "pets" else (False,):
                full = f"{name} without a class token" if without else name
                model = self.finetune(full, *data["train"], without)
                image, label = data["val"]
                val = normalised(center_crop(image, [SIDE, SIDE]), model.host.patch_embed.proj.weight)
                label = (center_crop(label, [SIDE, SIDE]) if label.ndim == 3 else label).to(self.device)
                self.subjects.append(Subject(full, model, data["train"][0], val, label))
        if self.args.imagenet is not None:
            self.subjects.append(self.imagenet())
        for subject in self.subjects:
            self.add(subject, "dense", None, None)

    def given(self) -> None:
        for subject in self.subjects:
            for budget in self.budgets:
                self.add(subject, "disc", DiscGate(coarse=32, share=0.5), budget)
                self.add(subject, "shipped gate", msvit.load_gate("default"), budget)

    def fitted(self) -> None:
        """The shipped gate fitted to each set."""
        for budget in self.budgets:
            for subject in self.subjects:
                model = subject.model.with_options(gate=msvit.load_gate("default").to(subject.val))
                begin = time.perf_counter()
                gate = msvit.fit_gate(model, subject.photos(FITTED), budget, steps=2 if self.args.quick else None).gate
                about = {"seconds": time.perf_counter() - begin, "fit": str(gate.fit_record)}
                self.add(subject, "fitted gate", gate, budget, **about)

    def learned(self) -> None:
        """New gates, from what coarse cells change in all models, on photographs of Pets and VOC."""
        photos = torch.cat([subject.train for subject in self.subjects if subject.name in ("pets", "voc")])
        teachers = [subject for subject in self.subjects if subject.name in ("pets", "cub", "voc", "imagenet")]
        draw = torch.Generator().manual_seed(0)
        views, wanted = [], {"masks": [], "attention": []}
        for chunk in photos.split(CHUNK):
            image = center_crop(chunk, [SIDE, SIDE]).to(self.device).float() / 255
            for view in (image, random_crops(image, draw)):
                views.append(mapped(view, MEAN, STD).half())
                for name in wanted:
                    wanted[name].append([])
                for subject in teachers:
                    names = {"masks", *(["attention"] if subject.name in ("pets", "cub") else [])}
                    found = self.measures(subject, names, draw)(self.as_taken(subject, view))
                    for name in names:
                        wanted[name][-1].append(found[name])
        targets = {
            name: sum(standardized(torch.cat([each[index] for each in parts])) for index in range(len(parts[0])))
            for name, parts in wanted.items()
        }
        num = {name: len(parts[0]) for name, parts in wanted.items()}
        kinds = {"masks": targets["masks"] / num["masks"], "attention": targets["attention"] / num["attention"]}
        kinds["both"] = (kinds["masks"] + kinds["attention"]) / 2
        self.clock.note(f"targets of {sum(map(len, views))} views by {num} models")
        for name, target in kinds.items():
            target = (target - target.mean()) / target.std()
            start = msvit.load_gate("default").to(self.device)
            gate = train_gate(start, torch.cat(views), target, F.mse_loss, self.steps, draw, lambda share: None)
            msvit.save_gate(gate.cpu().eval(), self.args.gates / name)
            self.clock.note(f"a gate of {name}")
            for subject in self.subjects:
                for budget in self.budgets:
                    self.add(subject, f"new gate, {name}", gate.to(self.device), budget)

    def saved(self) -> None:
        """Add curves for several input sizes and a threshold to a new gate, in its folder."""
        gate: Any = msvit.load_gate(self.args.gates).to(self.device).eval()
        pictures, curves = [Pictures(folder) for folder in self.args.photos], {}
        for side, num in CURVES.items():
            images = torch.cat([each.squares(side, min(num, self.num), least=1) for each in pictures])
            with torch.no_grad():
                parts = [mapped(part.to(self.device) / 255, MEAN, STD) for part in images.split(BATCH)]
                scores = torch.cat([gate.scores(part) for part in parts]).cpu()
            curves[side] = Curve.of(scores)
            if side == SIDE:
                gate.threshold = scores.flatten().double().quantile(0.7).item()  # 30 % of the cells are fine
            self.clock.note(f"{len(images)} images of {side} px, of {' and '.join(map(short, self.args.photos))}")
        msvit.save_gate(gate.cpu().with_settings(curves=tuple(curves.values()), noise=0.0), self.args.gates)

    # Models

    def finetune(self, name: str, images: Tensor, label: Tensor, without_class_token: bool) -> Any:
        """A dense ViT-S, trained on all weights, with crops and mirrored images."""
        host, maps = self.vit_s(without_class_token), label.ndim == 3
        num_classes = int(label[label < 255].max()) + 1
        if maps:
            model = msvit.convert_segmenter(host, num_classes=num_classes, decoder="linear", gate="all-fine")
        else:
            host.reset_classifier(num_classes)
            model = msvit.convert(host, gate="all-fine")
        model = model.to(self.device).train()
        images, label = images.to(self.device), label.to(self.device)
        size, draw = 8 if self.args.quick else 32 if maps else 128, torch.Generator().manual_seed(0)
        steps = 2 if self.args.quick else EPOCHS[name] * (len(images) // size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5 if not maps else 1e-4, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, steps, 0.1))
        for _ in range(steps):
            pick = torch.randint(len(images), (size,), generator=draw).to(self.device)
            top, left = torch.randint(images.shape[3] - SIDE + 1, (2,), generator=draw).tolist()
            window = (..., slice(top, top + SIDE), slice(left, left + SIDE))
            image, target = normalised(images[pick][window], torch.empty(0, device=self.device)), label[pick]
            if maps:
                target = target[window]
            else:
                image = random_crops(image, draw, 0.35)
            if torch.rand((), generator=draw) < 0.5:
                image, target = image.flip(3), target.flip(2) if maps else target
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = model(image).logits
            smoothing = 0.0 if maps else 0.1
            loss = F.cross_entropy(logits.float(), target, ignore_index=255, label_smoothing=smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        self.clock.note(f"{name}: {steps} steps, loss {loss.item():.3f}")
        model = model.requires_grad_(False).eval()
        return model.bfloat16() if self.device.type == "cuda" else model

    def vit_s(self, without_class_token: bool) -> Any:
        given = {"patch_size": 16, "img_size": SIDE, "num_classes": 0}
        name, file = "vit_small_patch14_dinov2", {"file": str(self.args.vit_s)}
        host = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=file, **given)
        if not without_class_token:
            return host
        other = timm.create_model(name, class_token=False, global_pool="avg", fc_norm=False, **given)
        weights = {key: value for key, value in host.state_dict().items() if key in other.state_dict()}
        weights["pos_embed"] = weights["pos_embed"][:, 1:]
        other.load_state_dict(weights)
        return other

    def imagenet(self) -> Subject:
        host = timm.create_model("vit_base_patch16_224", checkpoint_path=self.args.vit_b).eval().to(self.device)
        host = host.bfloat16() if self.device.type == "cuda" else host
        names, images = read_tar(self.args.imagenet, num=self.num)
        label = torch.tensor([int(name.split("/")[-2]) for name in names], device=self.device)
        weight = host.patch_embed.proj.weight
        val = mapped(images.to(self.device).float() / 255, (0.5,) * 3, (0.5,) * 3).to(weight.dtype)
        return Subject("imagenet", msvit.convert(host, gate="all-fine").eval(), images, val, label)

    def as_taken(self, subject: Subject, image: Tensor) -> Tensor:
        """Pixels in [0, 1] as the subject's model takes them."""
        mean, std = ((0.5,) * 3, (0.5,) * 3) if subject.name == "imagenet" else (MEAN, STD)
        return mapped(image, mean, std).to(subject.val.dtype)

    def measures(self, subject: Subject, names: set[str], draw: torch.Generator) -> Callable[[Tensor], Any]:
        kept = self.__dict__.setdefault("kept", {})
        if subject.name not in kept:
            model = subject.model.with_options(gate=msvit.load_gate("default").to(subject.val))
            kept[subject.name] = Measures(model, names, 0.5, draw)
        return kept[subject.name]


def mapped(image: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    return (image - image.new_tensor(mean).view(3, 1, 1)) / image.new_tensor(std).view(3, 1, 1)


def normalised(image: Tensor, like: Tensor) -> Tensor:
    """Pixels from 0 to 255, normalised, on the device and in the precision of a tensor."""
    return mapped(image.to(like.device).float() / 255, MEAN, STD).to(like.dtype)


def read_set(path: Path, num: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Photographs and labels of train and val: classes by the names of their folders, or maps."""
    found = {}
    for part in ("train", "val"):
        names, images = read_tar(path, rf"{part}/(?!labels/)", num)
        if any("/images/" in name for name in names):
            label = read_tar(path, f"{part}/labels/", num, mode="P")[1][:, 0]
        else:
            classes = sorted({name.split("/")[-2] for name in names})
            label = torch.tensor([classes.index(name.split("/")[-2]) for name in names])
        found[part] = images, label.long()
    return found


def table(results: dict[str, Any]) -> str:
    """A line per set and method."""
    rows = results["rows"]
    budgets = sorted({row["budget"] for row in rows if row["budget"]}, reverse=True)
    lines = []
    for name, method in dict.fromkeys((row["set"], row["method"]) for row in rows):
        own = {row["budget"]: row for row in rows if (row["set"], row["method"]) == (name, method)}
        cells = [f"{100 * own[b]['score']:.2f}" if b in own else "" for b in (None, *budgets)]
        lines.append([name, method, *cells])
    return markdown(["", "", "dense", *(f"{100 * b:.0f} %" for b in budgets)], lines, source_line(results))


if __name__ == "__main__":
    run_script(main)
