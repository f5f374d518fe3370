"""Distillation of a model of mixed scale from its dense self, without labels.

    model = msvit.convert(vit, gate="default", budget=0.6)
    model = msvit.distill(model, images, budget=0.6, steps=2000)     # thousands of images like those it will see
    model = msvit.set_budget(model, 0.5)                             # the same weights serve other budgets
    model.distillation                                               # divergence from the dense model, before and after

The teacher is the given model with all cells fine, the student a copy of it, with masks of its gate whose budget is
drawn anew in each step. The loss is their divergence (`divergence.py`) and the distance of their features after the
last norm. The gate is not trained.
"""

import copy
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from msvit.budget.divergence import dense_model, divergence
from msvit.budget.gate_fitting import random_crops, warmup_cosine
from msvit.budget.images import batches, checked_batches, gated_encoder
from msvit.budget.progress import note_progress
from msvit.budget.thresholds import Cost, calibrate, check_budget
from msvit.checks import check_choice, check_eval, check_flag, check_int, check_number, shown, warn
from msvit.fast.base import CompiledMSViT
from msvit.fast.compile import compile as compile_model
from msvit.gates import AllFine
from msvit.gates.ranking import top_num
from msvit.heads.classify import area_mean
from msvit.model import inner_msvit
from msvit.output import MSViTOutput
from msvit.reduction import Reducer, ToMe
from msvit.segmenter import Segmenter
from msvit.shapes import Bool, Float
from msvit.tokens import dense_map
from msvit.types import ScaleGrid, TokenBatch

STEPS = 1000
MAX_HELD_BACK = 500  # images that are not trained on; a tenth of all if these are fewer
NUM_BUDGETS = 8  # budgets that are drawn from: on a GPU each is a captured graph
MERGED = (1.0, 0.75, 0.5)  # shares of ToMe's r that are drawn from
SMALLEST_CROP = 0.5  # share of the image's area
WARMUP = 0.05  # share of the steps
CLIP = 1.0  # norm of all gradients
LOG_EVERY = 50  # steps: only then losses are read, for which a GPU is waited for
INDUCTOR_STEPS = 2000  # torch.compile takes up to a minute, which fewer steps do not save

Images = Float[Tensor, "b c h w"]


@dataclass(frozen=True)
class Settings:
    """Settings of a distillation."""

    budgets: tuple[float, float] = (0.45, 0.8)  # multiply-adds as shares of the dense ones, as far as masks reach them
    batch_size: int | None = None  # None: 256 on a GPU, else 32; of a Segmenter 32 and 8
    lr: float = 2e-5
    temperature: float = 1.0  # of the softmax over classes
    feature_weight: float = 1.0  # of the distance of class tokens or pooled features, beside the divergence
    patch_weight: float | None = None  # of that of all patches; None: 0 for a classifier of images, else 1
    jitter: float = 0.5  # noise on the gate's scores in every second step, as a share of their standard deviation
    ema: float | None = None  # decay of a running mean of the weights, which is then what is returned
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.budgets if isinstance(self.budgets, tuple | list) and len(self.budgets) == 2 else (1, 0)
        if not 0 < low <= high:
            raise ValueError(f"budgets is {shown(self.budgets)}, but must be a range of shares, such as (0.45, 0.8)")
        for name in ("lr", "temperature"):
            check_number(name, getattr(self, name), above=0)
        for name in ("feature_weight", "jitter", "patch_weight"):
            check_number(name, getattr(self, name) or 0.0, at_least=0)
        check_number("ema", self.ema or 0.0, at_least=0, below=1, example=0.999)
        check_int("batch_size", 1 if self.batch_size is None else self.batch_size, at_least=1)
        check_int("seed", self.seed, at_least=0)


def make_settings(**given: Any) -> Settings:
    """Make `Settings`, or raise ValueError for names it does not have."""
    for name in given:
        check_choice("setting of distill", name, [field.name for field in fields(Settings)])
    return Settings(**given)


@dataclass(frozen=True)
class Distillation:
    """Divergence from the dense model at the model's budget, before and after, on images that were held back."""

    steps: int
    num_images: int  # to train on
    num_held_back: int
    before: float
    after: float


@torch.inference_mode(False)
def distill(
    model: Any, images: Tensor | Iterable[Any], budget: float | None = None, steps: int = STEPS, unit: str = "macs",
    progress: bool = True, reducers: Sequence[Reducer] = (), **settings: Any,
) -> Any:  # fmt: skip
    """Return a trained copy that predicts as the given model does with all cells fine, without labels.

        model = msvit.distill(model, images, budget=0.6)                   # (n, 3, h, w), prepared as for the model
        model = msvit.distill(model, loader, budget=0.6, steps=5000, lr=1e-5)

    Images come as for `calibrate`, and are held in memory, on a GPU in 16 bits. `budget` and `unit` are those of
    `calibrate`, which is called first; with None the gate stays as it is. While the model trains its budget is drawn
    from the range `budgets`, so that `set_budget` may choose any of these later. A model with a reducer trains with
    one drawn from `reducers`, such as those of `fit_reducer` for several budgets; by default, if it is ToMe, with its
    own and two that merge less. `settings` are the fields of `Settings` below. On a CPU the same `seed` gives the
    same weights. The model given stays as it is.

    A tenth of the images is held back. `model.distillation` has the divergence on these before and after; if it has not
    fallen there is a warning, and the weights are the given ones.
    """
    if (inner := inner_msvit(model)) is not None:
        return model.around(distill(inner, images, budget, steps, unit, progress, reducers, **settings))
    chosen = make_settings(**settings)
    check_int("steps", steps, at_least=1)
    check_flag("progress", progress)
    if not isinstance(reducers, list | tuple) or not all(isinstance(each, Reducer) for each in reducers):
        raise ValueError(f"reducers is {shown(reducers)}, but must be a list of such as msvit.ToMe(r=13)")
    held = list(batches(model, images))
    started, grid = prepare(model, held, budget, unit)
    distiller = Distiller(started, grid, steps, chosen, budget if unit == "macs" else None, reducers)
    views = Views(held, distiller.device, distiller.batch_size, chosen.seed)
    note, sums = note_progress(progress, "distill"), torch.zeros(3, device=distiller.device)
    for index in range(steps):
        sums += distiller.step(index, views.batch(index))
        if (done := index + 1) % LOG_EVERY == 0 or done == steps:
            note(done / steps, describe_losses(sums / (index % LOG_EVERY + 1), done, steps))
            sums.zero_()
    return distiller.better(views.held_back(), len(views.train))


def prepare(model: Any, images: list[Images], budget: float | None, unit: str) -> tuple[Any, ScaleGrid]:
    """Return the model at this budget, and the grid of the images. Raise ValueError unless they can be distilled."""
    encoder = gated_encoder(model)
    if isinstance(encoder, CompiledMSViT):
        raise ValueError("the model is compiled; pass model.uncompiled() to msvit.distill, and compile what it returns")
    if isinstance(encoder.gate, AllFine) and encoder.reducer is None:
        raise ValueError(
            "all cells are fine and no token is reduced: it is the dense model already; "
            'convert it with gate="default" or method="auto"'
        )
    check_eval(model.modules())
    if budget is not None:
        check_budget(budget, unit)
        model = calibrate(model, images, budget, unit)
    for batch in checked_batches(model, images):  # one after the other: all together may be too large for a GPU
        grid = encoder.grid(batch)
    if (num := sum(map(len, images))) < 2:
        raise ValueError(f"there is {num} image, but one is trained on and another held back; pass thousands")
    return model, grid


def describe_losses(losses: Float[Tensor, "3"], done: int, steps: int) -> str:
    """Return a line of progress. Raise FloatingPointError if the losses are no numbers."""
    loss, divergence, distance = losses.tolist()
    if not math.isfinite(loss):
        raise FloatingPointError(f"step {done}: the loss is {loss}; the model given is as it was; try a smaller lr")
    return f"step {done} of {steps}: loss {loss:.4f} (divergence {divergence:.4f}, features {distance:.4f})"


class Views:
    """Images on the device of the model, some of them held back, and random crops of the others."""

    def __init__(self, held: list[Images], device: torch.device, batch_size: int, seed: int) -> None:
        num, dtype = sum(map(len, held)), torch.float16 if device.type == "cuda" else torch.float32
        self.images = torch.empty(num, *held[0].shape[1:], dtype=dtype, device=device)
        for part, batch in zip(self.images.split([len(batch) for batch in held]), held, strict=True):
            part.copy_(batch.detach())
        order = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).to(device)
        self.test, self.train = order.tensor_split([min(MAX_HELD_BACK, max(1, num // 10))])
        self.seed, self.batch_size, self.draw = seed, min(batch_size, len(self.train)), torch.Generator(device)

    def batch(self, step: int) -> Images:
        """Return crops of the images of a step, half of them mirrored, in an order that is drawn for each epoch."""
        epoch, place = divmod(step, len(self.train) // self.batch_size)
        self.draw.manual_seed(seed_of(self.seed, "epoch", epoch))
        order = torch.randperm(len(self.train), generator=self.draw, device=self.train.device)
        pick = self.train[order[place * self.batch_size : (place + 1) * self.batch_size]]
        self.draw.manual_seed(seed_of(self.seed, "crops", step))
        image = self.images[pick].float()
        mirrored = torch.rand(len(image), 1, 1, 1, generator=self.draw, device=image.device) < 0.5
        return random_crops(torch.where(mirrored, image.flip(3), image), self.draw, SMALLEST_CROP)

    def held_back(self) -> list[Images]:
        """Return batches of the images that are not trained on."""
        return [self.images[pick].float() for pick in self.test.split(self.batch_size)]


def seed_of(*parts: int | str) -> int:
    """Return a seed that follows from these, so that a step draws the same numbers whenever it is run."""
    return random.Random(" ".join(map(str, parts))).getrandbits(63)


class Distiller:
    """Teacher, student and optimizer. A step depends on nothing but these and its number, so that it can be resumed."""

    def __init__(
        self, model: Any, grid: ScaleGrid, steps: int, settings: Settings, budget: float | None = None,
        reducers: Sequence[Reducer] = (),
    ) -> None:  # fmt: skip
        self.settings, self.steps, self.model, self.dense = settings, steps, model, dense_model(model)
        self.weight = model.host.patch_embed.proj.weight  # for its device and precision
        self.device, on_gpu = self.weight.device, self.weight.is_cuda
        self.has_map = isinstance(model, Segmenter) or not model.num_classes  # whether patches matter
        usual = (32 if on_gpu else 8) if isinstance(model, Segmenter) else 256 if on_gpu else 32
        self.batch_size = settings.batch_size or usual
        self.num_fine = numbers_of_fine_cells(model, grid, settings.budgets, budget)
        self.same_share = model.gate.config.get("share") is not None  # read once: a threshold lies on the device
        self.student = copy.deepcopy(model).float().requires_grad_(True)
        self.student.gate.requires_grad_(False)
        self.teacher, self.runners = self.dense, [self.student.with_options(mode="packed")]
        if (reducer := self.student.reducer) is not None:
            reducer.requires_grad_(False)
            depth = len(model.host.blocks)
            drawn = [copy.deepcopy(each).eval().requires_grad_(False) for each in reducers or lighter(reducer, depth)]
            self.runners = [self.runners[0].with_options(reducer=each) for each in drawn]
        elif reducers:
            raise ValueError(f"{len(reducers)} reducers are given, but the model has none; convert it with reducer=...")
        if on_gpu:
            self.teacher = compile_model(self.dense, inductor=False)
            if reducer is None:
                self.runners = [compile_model(self.runners[0], inductor=steps > INDUCTOR_STEPS)]
        self.weights = [weight for weight in self.student.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.Adam(self.weights, lr=settings.lr, fused=on_gpu)
        self.ema = ModelEmaV3(self.student, decay=settings.ema) if settings.ema else None
        self.draw = torch.Generator(self.device)

    def step(
        self, index: int, image: Images, rank: int = 0, reduce: Callable[[list[Tensor]], None] | None = None
    ) -> Float[Tensor, "3"]:
        """Run one step of the optimizer; return loss, divergence and distance of features, on the device.

        `rank` and `reduce` are for several processes: the latter averages gradients over them, in place.
        """
        draw = random.Random(seed_of(self.settings.seed, "budget", index))
        level = draw.randrange(NUM_BUDGETS) if index else -1  # the largest first: graphs of others take its memory
        runner = draw.choice(self.runners)
        self.draw.manual_seed(seed_of(self.settings.seed, "mask", index, rank))
        self.optimizer.param_groups[0]["lr"] = self.settings.lr * warmup_cosine(index, self.steps, WARMUP)
        with torch.enable_grad(), self._autocast():
            with torch.no_grad():
                wanted = self.teacher(image.to(self.weight.dtype))
                mask = None if self.num_fine is None else self.draw_mask(image, self.num_fine[level], index % 2 == 1)
            losses = self.losses(runner(image, mask), wanted)
            losses[0].backward()
        if reduce is not None:
            reduce([weight.grad for weight in self.weights if weight.grad is not None])
        nn.utils.clip_grad_norm_(self.weights, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.student)
        return losses.detach()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def draw_mask(self, image: Images, num_fine: float, jitter: bool) -> Bool[Tensor, "b hc wc"]:
        """Draw a mask of so many fine cells per image on average: those with the highest scores of the batch."""
        with torch.autocast(self.device.type, enabled=False):
            scores = self.student.gate.scores(self.student.pad(image) if isinstance(self.student, Segmenter) else image)
        if jitter and self.settings.jitter:
            noise = torch.randn(scores.shape, generator=self.draw, device=scores.device)
            scores = scores + self.settings.jitter * scores.std() * noise
        if self.same_share:
            return top_num(scores, round(num_fine)) > 0.5
        return top_num(scores.reshape(1, 1, -1), round(num_fine * len(image))).view(scores.shape) > 0.5

    def losses(self, output: MSViTOutput, wanted: MSViTOutput) -> Float[Tensor, "3"]:
        """Return the loss and its two parts, divergence and distance of features."""
        temperature, settings = self.settings.temperature, self.settings
        if temperature != 1 and self.model.num_classes:
            output, wanted = (replace(each, logits=each.logits.float() / temperature) for each in (output, wanted))
        answers = divergence(self.model, wanted, output).mean() * temperature**2
        features = torch.zeros_like(answers)
        if settings.feature_weight and not isinstance(self.model, Segmenter):
            features = features + settings.feature_weight * distance(pooled(output.tokens), pooled(wanted.tokens))
        patch_weight = float(self.has_map) if settings.patch_weight is None else settings.patch_weight
        if patch_weight and self.model.backbone.merge_at is None:
            features = features + patch_weight * distance(dense_map(output.tokens), dense_map(wanted.tokens))
        return torch.stack([answers + features, answers, features])

    @torch.no_grad()
    def divergence(self, model: Any, images: Iterable[Images]) -> float:
        """Return the divergence of a model's outputs from the dense model's, the mean over images."""
        with self._autocast():
            each = (image.to(self.weight.dtype) for image in images)
            divergences = torch.cat([divergence(model, self.dense(image), model(image)) for image in each])
        return divergences.double().mean().item()

    def better(self, held_back: list[Images], num_images: int) -> Any:
        """Return the trained model if it is nearer to the dense one on images held back, else a copy of the given."""
        trained = copy.deepcopy(self.student if self.ema is None else self.ema.module).to(self.weight.dtype)
        for weight, given in zip(trained.parameters(), self.model.parameters(), strict=True):
            weight.requires_grad_(given.requires_grad)
        before, after = (self.divergence(model, held_back) for model in (self.model, trained))
        if not after < before:
            warn(
                f"the divergence from the dense model was {before:.4g} and is {after:.4g} after {self.steps} steps, "
                f"so that the weights stay as they were; pass more images or steps, or another lr"
            )
            trained = copy.deepcopy(self.model)
        trained._checked_batch = False  # the first of its user comes later
        trained.distillation = Distillation(self.steps, num_images, sum(map(len, held_back)), before, after)
        return trained


def lighter(reducer: Reducer, depth: int) -> list[Reducer]:
    """Return the reducer and, of ToMe, some that merge less."""
    if not isinstance(reducer, ToMe) or reducer.r is None:
        return [reducer]
    counts = [reducer.num_merged(index) or 0 for index in range(depth)]
    return [ToMe(r=[round(share * r) for r in counts]).eval() for share in MERGED]


def numbers_of_fine_cells(
    model: Any, grid: ScaleGrid, budgets: tuple[float, float], budget: float | None
) -> list[float] | None:
    """Return fine cells per image for budgets from lowest to highest; None of gates whose decisions are fixed."""
    if all(model.gate.config.get(name) is None for name in ("threshold", "share")):
        return None
    costs = Cost(model, grid, "macs").by_count()
    low, high = budgets if budget is None else (min(budget, budgets[0]), max(budget, budgets[1]))
    return [float(num) for num in np.interp(np.linspace(low, high, NUM_BUDGETS), costs, np.arange(len(costs)))]


def distance(features: Tensor, wanted: Tensor) -> Float[Tensor, ""]:
    """Return the squared distance, as a share of the wanted features' square."""
    return (features.float() - wanted.float()).square().mean() / wanted.float().square().mean()


def pooled(tokens: TokenBatch) -> Float[Tensor, "b d"]:
    """Return class token and other prefix tokens; without these the mean over the image's area."""
    return tokens.prefix.flatten(1) if tokens.layout.num_prefix else area_mean(tokens)
