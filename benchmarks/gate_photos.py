"""Validation images of a dense model, and how well it does on them with cells chosen by scores; see gate_study.py."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gate_tables import BASELINES
from gate_targets import Teacher, target_scores
from jaxtyping import Float
from torch import Tensor

from msvit.budget import Cost, Scored
from msvit.gates import Gate
from msvit_lab.build import fit_dense
from msvit_lab.calibration import Prepared, find_model, split_of
from msvit_lab.runs import read_config

EXACT = "one_"  # targets of one cell: their differences drown in the rounding of bfloat16


@dataclass(frozen=True)
class Row:
    """A way to choose cells, or a smaller dense input, for one model and set."""

    set: str
    model: str
    method: str
    budget: str  # free, per_image or dense
    wanted: float | None
    macs: float  # share of the dense multiply-adds, gate included
    tokens: float
    tokens_std: float
    top1: float
    agree: float
    kl: float


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def precise_scores(targets: list[str], teacher: Teacher, image: Tensor) -> dict[str, Tensor]:
    """Scores of targets, in bfloat16 where that is precise enough."""
    exact = [target for target in targets if target.startswith(EXACT)]
    found = target_scores(exact, teacher, image)
    with autocast(image.device):
        return found | target_scores([target for target in targets if target not in exact], teacher, image)


@dataclass
class Photos:
    """The validation images of one dense model, on the device, and what it says of them."""

    name: str
    run: str
    model: Any
    prepared: Prepared
    image: Float[Tensor, "n c h w"]
    label: Tensor
    logits: Tensor
    batch: int

    @staticmethod
    @cache
    def read(name: str, run: str, data: str | None, num: int, batch: int, device: torch.device) -> "Photos":
        dense = find_model(run, gate="all-fine").to(device).eval()
        source = data or read_config(Path(run))["config"].data.source
        if split_of(Path(source)) != "val":
            raise ValueError(f"{source} has no folder val, so that training images would count too; name it so")
        prepared = Prepared(dense, Path(source), None, num, labels=True)
        image, label = on_device(prepared, prepared.size, device)
        found = Photos(name, run, dense, prepared, image, label, label, batch)
        found.logits = found.predict(dense)
        return found

    @torch.no_grad()
    def predict(self, model: Any, mask: Tensor | None = None, image: Tensor | None = None) -> Tensor:
        image = self.image if image is None else image
        masks = [None] * len(image) if mask is None else mask.to(image.device).float().split(self.batch)
        with autocast(image.device):
            parts = [model(x, mask=m).logits.float() for x, m in zip(image.split(self.batch), masks, strict=False)]
        return torch.cat(parts)

    def row(self, method: str, budget: str, wanted: float | None, logits: Tensor, macs: Tensor, tokens: Tensor) -> Row:
        dense = self.logits.log_softmax(1)
        kl = F.kl_div(logits.log_softmax(1), dense, log_target=True, reduction="batchmean")
        right, same = (logits.argmax(1) == other for other in (self.label, self.logits.argmax(1)))
        return Row(
            self.name, self.run, method, budget, wanted, macs.double().mean().item(), tokens.double().mean().item(),
            tokens.double().std(correction=0).item(), right.double().mean().item(), same.double().mean().item(),
            kl.item(),
        )  # fmt: skip

    def score(self, gate: Gate) -> Tensor:
        model = self.model.with_options(gate=gate.for_cells(self.model.coarse).to(self.image.device).eval())
        with torch.no_grad():
            return torch.cat([model.gate.scores(part) for part in self.image.split(self.batch)])

    def oracle(self, targets: list[str], teacher: Teacher) -> dict[str, Tensor]:
        found = [precise_scores(targets, teacher, part) for part in self.image.split(self.batch)]
        return {target: torch.cat([part[target] for part in found]) for target in targets}

    def measure(
        self, method: str, scores: Tensor, budgets: tuple[float, ...], gate: Gate | None = None, area: float = 0.0
    ) -> list[Row]:
        """Rows of cells chosen by their scores: one threshold for all images, and as many tokens in each."""
        model = self.model if gate is None else self.model.with_options(gate=gate.for_cells(self.model.coarse))
        grid = model.grid(self.image[:1])
        macs, tokens = (Cost(model, grid, unit) for unit in ("macs", "tokens"))
        runs = self.model.with_options(proportional_attention=area)
        rows = []
        for budget, values in (("free", scores), ("per_image", ranks(scores))):
            if method in BASELINES and budget == "free":
                continue
            scored = Scored(grid, values.float().cpu(), self.image[:1])
            for wanted in budgets:
                fine = scored.fine(scored.solve(model, wanted, "macs", "threshold"), "threshold")
                logits = self.predict(runs, fine)
                rows.append(self.row(method, budget, wanted, logits, macs(fine), tokens(fine) * tokens.dense))
        return rows

    def dense_rows(self, sizes: tuple[int, ...]) -> list[Row]:
        full = self.model.backbone.dense_macs(self.model.grid(self.image[:1]))
        rows = []
        for size in (self.prepared.size, *sizes):
            model = fit_dense(self.model, size)
            image = self.image if size == self.prepared.size else on_device(self.prepared, size, self.image.device)[0]
            grid = model.grid(image[:1])
            macs, tokens = torch.tensor([model.backbone.dense_macs(grid) / full]), torch.tensor([grid.num_patches])
            logits = self.predict(model, image=image)
            rows.append(self.row(f"dense, {size} px", "dense", None, logits, macs, tokens))
        return rows


DECODED: dict[Any, tuple[Tensor, Tensor]] = {}


def on_device(prepared: Prepared, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images and labels; models that want the same images share them."""
    source = prepared.source
    key = (size, str(prepared.about), tuple(source.classes), tuple(place.name for place in source.places))
    if key not in DECODED:
        found = prepared.batches(size, cache=True, device=device)
        DECODED[key] = torch.cat([b.image for b in found]), torch.cat([b.label for b in found])
        found.clear()
        free_unused(device)
    return DECODED[key]


def free_unused(device: torch.device) -> None:
    """Memory back to the device, for other processes on it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ranks(scores: Float[Tensor, "n hc wc"]) -> Float[Tensor, "n hc wc"]:
    """Scores by which a threshold makes the same number of cells fine in every image, or one more in some of them."""
    order = scores.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    part = torch.arange(len(scores), device=scores.device) * 0.6180339887 % 1  # spread evenly over images
    return -(order + part[:, None]).view_as(scores)
