"""A gate fitted to a model and to its images, without labels. No weight of the host changes.

    model = msvit.convert(vit, gate="default")
    model = msvit.fit_gate(model, images, budget=0.6)    # about a thousand images like those it will see
    model.gate.fit_record                                # what was tried and kept

The gate that comes with msvit was trained for pets and everyday scenes. Here it is trained further on what the dense
model does, once for each of several targets (`gate_targets.py`). Which of them suits a model is not known beforehand:
of all these gates and the given one, the one nearest to the dense model on images held back is kept, at the budget.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.budget.divergence import dense_model, divergence
from msvit.budget.gate_targets import LOSSES, Cells, Images, Loss, Measures, standardized, targets_for
from msvit.budget.images import batches, gated_encoder
from msvit.budget.progress import Note, note_progress
from msvit.budget.thresholds import Cost, calibrate, check_budget, score_images
from msvit.checks import check_eval, check_flag, check_int, shown, warn
from msvit.fast.gates import compute_logits
from msvit.gates.logits import LogitGate
from msvit.model import inner_msvit
from msvit.segmenter import Segmenter
from msvit.shapes import Float

STEPS = {"cuda": 1000, "cpu": 100}  # of each target; docs/usage.md has what fewer and more give on a CPU
BATCH = 128  # images of a step; on a CPU a quarter of them
CHUNKS = {"cuda": 64, "cpu": 8}  # images whose targets are computed at once; of a Segmenter half of them
LR, WEIGHT_DECAY = 1e-3, 0.05
SMALLEST_CROP = 0.35  # share of the image's area
HELD_BACK = 4  # one image of so many
MARGIN = 2.5  # standard errors by which a gate must be better than the given one: several are tried
MIN_IMAGES = 16  # images of which some are held back


@dataclass(frozen=True)
class FitRecord:
    """The gates that were tried, and the one kept: mean divergences from the dense model on the images held back."""

    kept: str  # "given", or the target that the gate was trained on
    divergences: dict[str, float]  # of each gate that was tried
    errors: dict[str, float]  # standard errors of their differences to the given one
    num_fitted: int  # images that gates were trained on
    num_held: int  # images that they were compared on

    def __str__(self) -> str:
        kept, given = (f"{self.divergences[name]:.4g}" for name in (self.kept, "given"))
        if self.kept == "given":
            return f"the given gate was kept: none was clearly below its divergence of {kept} on {self.num_held} images"
        return f"fitted to {self.kept}: divergence {kept}, the given gate {given}, on {self.num_held} images held back"


def fit_gate(
    model: Any, images: Tensor | Iterable[Any], budget: float, unit: str = "macs", steps: int | None = None,
    seed: int = 0, targets: Sequence[str] | None = None, progress: bool = True,
) -> Any:  # fmt: skip
    """Return a model of the same weights with a gate trained on these images, without labels, at the budget.

        model = msvit.fit_gate(model, images, budget=0.6)       # (n, 3, h, w), prepared as for the model
        model = msvit.fit_gate(model, loader, budget=0.6)       # batches, or (batch, label) and the like
        print(model.gate.fit_record)                            # which gate was kept, and why

    The model's gate, which must be one with weights, is trained further for `steps` steps (1000 on a GPU, 100 on a CPU)
    on each of the `targets`: by default on all that apply to the model, see `gate_targets.py`. A quarter of the
    images is held back; on these the gates are compared at the budget, and the one given is kept unless another is
    nearer to the dense model by 2.5 standard errors. On a CPU the same `seed` gives the same gate. The images
    are held in memory, three times. Budget and unit are those of `calibrate`, which is called last. The model given
    stays as it is. `progress`: show progress and the time left on stderr.
    """
    if (inner := inner_msvit(model)) is not None:
        return model.around(fit_gate(inner, images, budget, unit, steps, seed, targets, progress))
    check_budget(budget, unit)
    check_int("seed", seed, at_least=0, at_most=2**63 - 1)
    check_flag("progress", progress)
    gate = gated_encoder(model).gate
    if not isinstance(gate, LogitGate):
        raise ValueError(
            f'a {type(gate).__name__} has no weights to fit; take the gate that comes with msvit: gate="default"'
        )
    check_eval({*model.modules()} - {*gate.modules()})
    names = check_targets(model, targets)
    device = next(gate.parameters()).device
    steps = STEPS.get(device.type, STEPS["cpu"]) if steps is None else check_int("steps", steps, at_least=1)
    draw, note = torch.Generator().manual_seed(seed), partial(note_progress, progress)
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):  # whatever the caller has set
        held = list(batches(model, images))
        given = calibrate(model, held, budget, unit)  # if images or budget are wrong, it raises ValueError
        every = torch.cat([batch.detach().float() for batch in held])
        del held
        fitted_to, held_back = split(every, draw)
        scored = score_images(model, every)
        fine = scored.fine(given.gate.threshold, "threshold")
        tokens = Cost(model, scored.grid, "tokens")(fine).mean().item()
        asked = (tokens, "tokens") if unit == "ms" else (budget, unit)  # time is not measured for each gate
        measures = Measures(model, names, fine.double().mean().item(), draw)
        views, wanted = views_and_targets(model, fitted_to, measures, draw, note("fit_gate, targets"))
        gates = {"given": copy.deepcopy(gate)}
        for name in names:
            stage = note(f"fit_gate, gate {len(gates)} of {len(names)}, {name}")
            gates[name] = train_gate(gate, views, wanted[name], LOSSES[name], steps, draw, stage)
        del views
        divergences = compare(model, gates, held_back, *asked, note("fit_gate, comparison"))
    record = choose(divergences, len(fitted_to))
    kept = gate if record.kept == "given" else gates[record.kept].train(gate.training)
    return calibrate(model.with_options(gate=kept.with_settings(fit_record=record)), every, budget, unit)


def check_targets(model: Any, targets: Sequence[str] | None) -> tuple[str, ...]:
    """Return the targets to try. Raise ValueError unless each applies to the model."""
    known = targets_for(model)
    if targets is None:
        return known
    names = [targets] if isinstance(targets, str) else targets
    if not isinstance(names, list | tuple) or not names or not all(name in known for name in names):
        raise ValueError(f"targets is {shown(targets)}, but {model.host_name} has {', '.join(known)}; pass some")
    return tuple(names)


def split(images: Images, draw: torch.Generator) -> tuple[Images, Images]:
    """Return images to train gates on, and images to compare them on."""
    num = len(images)
    if num < 2:
        raise ValueError(
            "there is 1 image, but gates are compared on images that they were not trained on; give a few hundred"
        )
    if num < MIN_IMAGES:
        warn(
            f"there are {num} images, too few to hold some back, so that gates are compared on those they were trained "
            f"on; give {MIN_IMAGES} at least, better a few hundred"
        )
        return images, images
    order = torch.randperm(num, generator=draw).to(images.device)
    return images[order[num // HELD_BACK :]], images[order[: num // HELD_BACK]]


@torch.no_grad()
def views_and_targets(
    model: Any, images: Images, measures: Measures, draw: torch.Generator, note: Note
) -> tuple[Images, dict[str, Cells]]:
    """Return all images and a random crop of each, as the gate gets them, and their targets by name."""
    views: list[Tensor] = []
    wanted: list[dict[str, Cells]] = []
    device = measures.weight.device
    num = CHUNKS.get(device.type, CHUNKS["cpu"])
    chunks = images.split(num // 2 if isinstance(model, Segmenter) else num)
    for index, chunk in enumerate(chunks):
        chunk = chunk.to(device)
        for view in (chunk, random_crops(chunk, draw)):
            wanted.append(measures(view))  # before it is padded: where padding begins there is no edge of classes
            view = model.pad(view) if isinstance(model, Segmenter) else view
            half = view.half()  # holds numbers up to 65504
            views.append(half if half.isfinite().all() else view)
        note((index + 1) / len(chunks))
    targets = {name: torch.cat([each[name] for each in wanted]) for name in wanted[0]}
    return torch.cat(views), {n: standardized(v) if LOSSES[n] is F.mse_loss else v for n, v in targets.items()}


@torch.no_grad()
def compare(
    model: Any, gates: dict[str, LogitGate], images: Images, budget: float, unit: str, note: Note
) -> dict[str, Float[Tensor, " n"]]:
    """Return each image's divergence from the dense model with each gate, at the same mean cost of these images."""
    dense = dense_model(model)
    models = {
        name: calibrate(dense.with_options(gate=gate.eval(), reducer=model.reducer), images, budget, unit)
        for name, gate in gates.items()
    }
    weight, chunks = next(dense.parameters()), images.split(32)
    divergences: dict[str, list[Tensor]] = {name: [] for name in models}
    for index, chunk in enumerate(chunks):
        chunk = chunk.to(weight.device, weight.dtype)
        output = dense(chunk)
        for name, mixed in models.items():
            divergences[name].append(divergence(model, output, mixed(chunk)).double().cpu())
        note((index + 1) / len(chunks))
    return {name: torch.cat(values) for name, values in divergences.items()}


def choose(divergences: dict[str, Float[Tensor, " n"]], num_fitted: int) -> FitRecord:
    """Choose the gate with the lowest mean divergence, of those that clearly beat the given one."""
    given = divergences["given"]
    means = {name: values.mean().item() for name, values in divergences.items()}
    errors = {name: ((given - values).std() / len(given) ** 0.5).item() for name, values in divergences.items()}
    better = [name for name in divergences if means["given"] - means[name] > MARGIN * errors[name]]
    return FitRecord(min(better, key=means.__getitem__, default="given"), means, errors, num_fitted, len(given))


def random_crops(image: Images, draw: torch.Generator, smallest: float = SMALLEST_CROP) -> Images:
    """Crop a part of each image, between `smallest` and all of its area, enlarged to the size of the image."""
    num, device = len(image), draw.device
    area, place = (torch.rand(*shape, generator=draw, device=device) for shape in ((num,), (2, num)))
    side = (smallest + (1 - smallest) * area).sqrt()
    shift = (1 - side) * (2 * place - 1)
    zero = torch.zeros_like(side)
    box = torch.stack([torch.stack([side, zero, shift[0]], 1), torch.stack([zero, side, shift[1]], 1)], 1)
    grid = F.affine_grid(box.to(image.device), list(image.shape), align_corners=False)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def train_gate(
    gate: LogitGate, views: Images, wanted: Cells, loss: Loss, steps: int, draw: torch.Generator, note: Note
) -> LogitGate:
    """Return a copy of the gate, trained in float32 on images and their targets, half of them mirrored."""
    fitted = copy.deepcopy(gate).float().train().requires_grad_(True)
    optimizer = torch.optim.AdamW(fitted.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
    num = min(BATCH if views.is_cuda else BATCH // 4, len(views))
    with torch.enable_grad():
        for step in range(steps):
            pick = torch.randint(len(views), (num,), generator=draw).to(views.device)
            image, target = views[pick].float(), wanted[pick]
            if torch.rand((), generator=draw) < 0.5:
                image, target = image.flip(3), target.flip(2)
            value = loss(compute_logits(fitted, image), target)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            note((step + 1) / steps)
    for weight, given in zip(fitted.parameters(), gate.parameters(), strict=True):
        weight.requires_grad_(given.requires_grad)
    return fitted.to(next(gate.parameters()).dtype)


def warmup_cosine(step: int, steps: int, rising: float = 0.2) -> float:
    """Return the learning rate as a share of the highest: a linear rise over some steps, then half a cosine."""
    rise = min(1.0, (step + 1) / max(1.0, rising * steps))
    return rise * (1 + math.cos(math.pi * step / steps)) / 2
