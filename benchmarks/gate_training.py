"""Gates that learn to predict what cells are worth to a dense model; see gate_study.py."""

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gate_photos import Photos, free_unused, precise_scores
from gate_targets import Teacher
from jaxtyping import Float
from shared import Clock
from torch import Tensor

from msvit.gates import ContextGate, Gate, Normalization
from msvit_lab.bench.images import list_places
from msvit_lab.data import batches
from msvit_lab.data.sources import FileSource
from msvit_lab.data.transforms import shuffled

LOWEST = 0.01  # quantile of a target below which values count as this


@dataclass(frozen=True)
class Bank:
    """Random crops and the scores that targets give their cells, of one set."""

    image: Float[Tensor, "n c h w"]  # float16, normalised
    scores: dict[str, Float[Tensor, "n hc wc"]]


def photo_source(folder: Path, num: int | None = None) -> FileSource:
    """The images of a folder, or of its part `train`, without label maps and classes; `num` of them, drawn once."""
    path = folder / "train" if (folder / "train").exists() else folder
    places = list_places(path)
    order = shuffled(len(places), seed=0, epoch=0)[:num]
    return FileSource([places[i] for i in order], [0] * len(order), ["image"])


def make_bank(source: FileSource, photos: Photos, targets: list[str], args: argparse.Namespace, clock: Clock) -> Bank:
    """Crops as in training, `args.crops` of every image; targets are those of the photos' model."""
    about, device, teacher = photos.prepared.about, photos.image.device, Teacher(photos.model, args.masks, args.probes)
    loader = batches(
        source, img_size=photos.prepared.size, train=True, crops="medium", interpolation="bilinear", cache=True,
        batch_size=min(args.batch, len(source)), mean=tuple(about["mean"]), std=tuple(about["std"]), device=device,
        drop_last=False, skip_bad=True,
    )  # fmt: skip
    image, scores = [], defaultdict(list)
    for epoch in range(args.crops):
        for batch in loader.iterate(epoch):
            image.append(batch.image.half())
            for target, found in precise_scores(targets, teacher, batch.image).items():
                scores[target].append(found)
            if clock.over():
                break
    bank = Bank(torch.cat(image), {target: torch.cat(parts) for target, parts in scores.items()})
    del loader, image
    free_unused(device)
    return bank


def with_level(scores: Float[Tensor, "n hc wc"], level: float) -> Float[Tensor, "n hc wc"]:
    """Scores of which a share of each image's level stays: 1 compares images as they are, 0 makes them alike."""
    return scores - (1 - level) * scores.flatten(1).logsumexp(1)[:, None, None]


def goal(scores: Float[Tensor, "n hc wc"], level: float) -> Float[Tensor, "n hc wc"]:
    """What a gate learns: scores with a share of their image's level, in units of their deviation over the set."""
    lowest = scores.flatten().kthvalue(max(1, int(LOWEST * scores.numel()))).values
    scores = with_level(scores.clamp(min=lowest), level)
    return (scores - scores.mean()) / scores.std()


def train_gate(banks: list[Bank], target: str, level: float, args: argparse.Namespace, about: dict[str, Any]) -> Gate:
    """A ContextGate that predicts a target's scores, by their squared distance."""
    torch.manual_seed(args.seed)
    image = torch.cat([bank.image for bank in banks])
    wanted = torch.cat([goal(bank.scores[target], level) for bank in banks])
    gate = ContextGate(coarse=args.coarse, grid=tuple(wanted.shape[1:]), widths=args.widths, depth=args.depth)
    gate = gate.to(image.device).set_normalization(Normalization(about["mean"], about["std"])).train()
    torch.nn.init.zeros_(gate.head.bias)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=args.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.2)
    for _ in range(args.steps):
        pick = torch.randint(len(image), (args.gate_batch,), device=image.device)
        x, y = image[pick].float(), wanted[pick]
        if torch.rand(()) < 0.5:
            x, y = x.flip(3), y.flip(2)
        loss = F.mse_loss(gate(x).logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return gate.eval()


def correlation(one: Tensor, other: Tensor) -> float:
    return torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()
