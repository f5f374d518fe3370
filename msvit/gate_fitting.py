"""A gate fitted to a model and to its images, without labels. No weight of the host changes.

    model = msvit.convert(vit, gate="default")
    model = msvit.fit_gate(model, images, budget=0.6)    # about a thousand images like those it will see

The gate that comes with msvit was trained for pets and everyday scenes. Here it is trained further, on what the dense
model itself does: for a classifier on where its class token attends, for a Segmenter on the cells in which the classes
it predicts have an edge. Targets are computed once, for the images and for crops of them.
"""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.budget import batches, calibrate, check_budget, gated_encoder
from msvit.checks import check_int
from msvit.gates import AllFine
from msvit.gates.logits import LogitGate
from msvit.losses.targets import attention_loss
from msvit.model import MSViT, inner_msvit
from msvit.reduction.attention_recorder import AttentionRecorder
from msvit.reduction.evit import needs_class_token
from msvit.segmenter import Segmenter
from msvit.shapes import Float

STEPS = 1000
BATCH = 128  # images of a step
LR, WEIGHT_DECAY = 1e-3, 0.05
SMALLEST_CROP = 0.35  # share of the image's area

Images = Float[Tensor, "n c h w"]
Cells = Float[Tensor, "n hc wc"]


def fit_gate(
    model: Any, images: Tensor | Iterable[Any], budget: float, unit: str = "macs", steps: int = STEPS, seed: int = 0
) -> Any:
    """A model of the same weights with a gate that was trained on these images, without labels, and their budget.

        model = msvit.fit_gate(model, images, budget=0.6)       # (n, 3, h, w), prepared as for the model
        model = msvit.fit_gate(model, loader, budget=0.6)       # batches, or (batch, label) and the like

    The model's gate, which must be one with weights, is trained further for `steps` steps; on a CPU the same `seed`
    gives the same gate. The images are held in memory, twice. Budget and unit are those of `calibrate`, which is called
    last. The model given stays as it is. For hosts with a class token, and for Segmenters.
    """
    if (inner := inner_msvit(model)) is not None:
        return model.around(fit_gate(inner, images, budget, unit, steps, seed))
    check_budget(budget, unit)
    check_int("steps", steps, at_least=1)
    check_int("seed", seed, at_least=0, at_most=2**63 - 1)
    gate = gated_encoder(model).gate
    if not isinstance(gate, LogitGate):
        raise ValueError(
            f'a {type(gate).__name__} has no weights to fit; take the gate that comes with msvit: gate="default"'
        )
    if any(part.training for part in {*model.modules()} - {*gate.modules()}):
        raise ValueError("a model with parts in training mode does not predict as it is used; call model.eval() first")
    held = list(batches(images))
    calibrate(model, held, budget, unit)  # if images or budget are wrong, it raises ValueError before the training
    device = next(gate.parameters()).device
    draw = torch.Generator().manual_seed(seed)
    target = edges(model) if isinstance(model, Segmenter) else attention(model)
    loss = F.binary_cross_entropy_with_logits if isinstance(model, Segmenter) else attention_loss
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):  # whatever the caller has set
        views, wanted = views_and_targets(model, held, target, draw, device)
        fitted = train_gate(gate, views, wanted, loss, steps, draw)
    return calibrate(model.with_options(gate=fitted), held, budget, unit)


@torch.no_grad()
def views_and_targets(
    model: Any, held: list[Images], target: Callable[[Images], Cells], draw: torch.Generator, device: torch.device
) -> tuple[Images, Cells]:
    """All images and a random crop of each, as the gate gets them, and their targets."""
    views, wanted = [], []
    for batch in held:
        batch = batch.to(device, torch.float32)
        for view in (batch, random_crops(batch, draw)):
            wanted.append(target(view))  # before it is padded: where padding begins there is no edge of classes
            view = model.pad(view) if isinstance(model, Segmenter) else view
            half = view.half()  # holds numbers up to 65504
            views.append(half if half.isfinite().all() else view)
    return torch.cat(views), torch.cat(wanted)


def attention(model: Any) -> Callable[[Images], Cells]:
    """From images to the share of the class token's attention that each cell gets in the dense model."""
    needs_class_token("fit_gate", model.host, "keep the gate that comes with msvit, and call msvit.calibrate")
    recorder = AttentionRecorder()
    # Not compiled, whatever the model is: a graph that is replayed would record nothing.
    dense = MSViT.with_options(model, gate=AllFine(coarse=model.coarse), mode="packed", reducer=recorder).eval()

    @torch.no_grad()
    def target(image: Images) -> Cells:
        dense(image.to(next(dense.parameters()).dtype))
        return recorder.seen().float()

    return target


def edges(model: Segmenter) -> Callable[[Images], Cells]:
    """From images to the cells in which the dense model predicts more than one class."""
    dense = model.with_options(gate=AllFine(coarse=model.coarse), mode="packed", reducer=None).eval()

    @torch.no_grad()
    def target(image: Images) -> Cells:
        classes = dense(image.to(next(dense.parameters()).dtype)).logits.argmax(1).float()
        highest, lowest = (sign * F.max_pool2d(sign * classes, model.coarse, ceil_mode=True) for sign in (1, -1))
        return (highest > lowest).float()  # as `edge_cells`, but no class is ignored, and there may be any number

    return target


def random_crops(image: Images, draw: torch.Generator) -> Images:
    """A part of each image, of between SMALLEST_CROP and all of its area, enlarged to the size of the image."""
    num = len(image)
    area, place = torch.rand(num, generator=draw), torch.rand(2, num, generator=draw)
    side = (SMALLEST_CROP + (1 - SMALLEST_CROP) * area).sqrt()
    shift = (1 - side) * (2 * place - 1)
    zero = torch.zeros(num)
    box = torch.stack([torch.stack([side, zero, shift[0]], 1), torch.stack([zero, side, shift[1]], 1)], 1)
    grid = F.affine_grid(box.to(image.device), list(image.shape), align_corners=False)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def train_gate(
    gate: LogitGate, views: Images, wanted: Cells, loss: Callable[[Tensor, Tensor], Tensor], steps: int,
    draw: torch.Generator,
) -> LogitGate:  # fmt: skip
    """A copy of the gate, trained in float32 on images and their targets, half of them mirrored."""
    fitted = copy.deepcopy(gate).float().train().requires_grad_(True)
    optimizer = torch.optim.AdamW(fitted.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rise_and_fall(step, steps))
    with torch.enable_grad():
        for _ in range(steps):
            pick = torch.randint(len(views), (min(BATCH, len(views)),), generator=draw).to(views.device)
            image, target = views[pick].float(), wanted[pick]
            if torch.rand((), generator=draw) < 0.5:
                image, target = image.flip(3), target.flip(2)
            found = loss(fitted.compute_logits(image), target)
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            schedule.step()
    for own, given in zip(fitted.parameters(), gate.parameters(), strict=True):
        own.requires_grad_(given.requires_grad)
    return fitted.to(next(gate.parameters()).dtype).train(gate.training)


def rise_and_fall(step: int, steps: int) -> float:
    """The learning rate as a share of the highest: a linear rise over a fifth of the steps, then half a cosine."""
    rise = min(1.0, (step + 1) / max(1.0, steps / 5))
    return rise * (1 + math.cos(math.pi * step / steps)) / 2
