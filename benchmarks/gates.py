"""Gates in dense models, without labels: a disc, the gate that comes with msvit, and the same fitted to a set.

    python benchmarks/gates.py --vit-s FILE --pets PETS.tar --cub CUB.tar --voc VOC.tar --out gates.json

The tars have square photographs of 240 px, train/CLASS/NAME and val/CLASS/NAME, of VOC train/images/NAME and
train/labels/NAME. On each set a dense ViT-S is fine-tuned, with a class token and, on Pets, without; on VOC it is the
encoder of a Segmenter. Then nothing but gates is trained, and every gate is measured at the same multiply-adds: its
budget is set on the validation images, which needs no labels.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from shared import SIDE, Study, markdown, read_tar, run_script, script_parser, source_line, squares
from torch import Tensor
from torchmetrics.functional.classification import multiclass_jaccard_index
from torchvision.transforms.functional import center_crop

import msvit
from msvit.budget.divergence import kl_divergence
from msvit.budget.gate_fitting import random_crops, warmup_cosine
from msvit.gates import DiscGate, Gate
from msvit_lab.json_values import write_json

BATCH = 100
BUDGETS = (0.72, 0.6, 0.49)
FITTED = 1000  # photographs
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EPOCHS = {"pets": 10, "pets without a class token": 10, "cub": 15, "voc": 15}


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
        return squares(self.train[order], MEAN, STD, self.val)


def score(found: Tensor, label: Tensor, num_classes: int) -> float:
    """Top-1 or, of maps, the mean intersection over union."""
    if label.ndim == 1:
        return (found == label).double().mean().item()
    return multiclass_jaccard_index(found, label, num_classes, ignore_index=255).item()


def main() -> None:
    parser = script_parser(__doc__)
    for name in ("--vit-s", "--pets", "--cub", "--voc"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--stages", default="hosts,given,fitted")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--quick", action="store_true", help="few images and steps, to see that it runs")
    GateStudy(parser.parse_args()).run_stages(table)


class GateStudy(Study):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.num = 16 if args.quick else 10**9  # images of a set
        self.budgets = [float(word) for word in args.budgets.split(",")]
        self.subjects: list[Subject] = []

    def add(self, subject: Subject, name: str, gate: Gate | None, budget: float | None, **more: Any) -> None:
        row = {"set": subject.name, "method": name, "budget": budget, **subject.measure(gate, budget), **more}
        self.rows.append(row)
        write_json(self.args.out, self.results())
        about = f"{100 * row['score']:.2f} at {100 * row['macs']:.1f} %, divergence {row['kl']:.4f} {more or ''}"
        self.note(f"{subject.name}, {name}, {budget}: {about}")

    # Stages

    def hosts(self) -> None:
        """Fine-tune a dense model on each set, and measure it."""
        for name, path in (("pets", self.args.pets), ("cub", self.args.cub), ("voc", self.args.voc)):
            if path is None:
                continue
            data = read_set(path, self.num)
            self.note(f"{name}: {len(data['train'][0])} photographs, {len(data['val'][0])} validation images")
            for without in (False, True) if name == "pets" else (False,):
                full = f"{name} without a class token" if without else name
                model = self.finetune(full, *data["train"], without)
                image, label = data["val"]
                val = squares(image, MEAN, STD, model.host.patch_embed.proj.weight)
                label = (center_crop(label, [SIDE, SIDE]) if label.ndim == 3 else label).to(self.device)
                self.subjects.append(Subject(full, model, data["train"][0], val, label))
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
            image, target = squares(images[pick][window], MEAN, STD, torch.empty(0, device=self.device)), label[pick]
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
        self.note(f"{name}: {steps} steps, loss {loss.item():.3f}")
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


def read_set(path: Path, num: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Photographs and labels of train and val: classes by the names of their folders, or maps."""
    found = {}
    for part in ("train", "val"):
        names, images = read_tar(path, rf"{part}/(?!labels/)", num)
        if any("/images/" in name for name in names):
            label = read_tar(path, f"{part}/labels/", num, maps=True)[1]
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
