"""Schedules for ToMe, how many tokens each block merges: by rule or by images, without labels or training.

    model = msvit.convert(vit, method="auto", budget=0.6)          # by rule: fewer in the first blocks
    model = msvit.fit_reducer(model, images, budget=0.6)           # by images: about a thousand like those it will see
    model.reducer, model.reducer.search                            # ToMe(r=(0, 2, 7, ...)), and how it was found

ToMe as published merges the same number of tokens in every block. Tokens of the first blocks are worth more than those
of later ones, so that the same multiply-adds are better saved later; how much later depends on the model. The search
tries schedules that all meet the budget, and takes another than that by rule only if its outputs are clearly nearer to
those of the dense model: on few images the nearest is often one by chance.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from msvit.budget.divergence import dense_model, total_variation
from msvit.budget.images import gated_encoder, some_images
from msvit.budget.progress import note_progress
from msvit.budget.thresholds import Cost, check_budget
from msvit.checks import check_eval, check_flag, check_int, check_number
from msvit.gates import AllFine
from msvit.host_settings import native_size
from msvit.model import MSViT, inner_msvit
from msvit.output import MSViTOutput
from msvit.reduction import ToMe
from msvit.types import ScaleGrid

TRIALS = {"cuda": 250, "cpu": 24}
MAX_IMAGES = {"cuda": 1024, "cpu": 64}  # of those given
BATCH = {"cuda": 256, "cpu": 16}
MAX_MERGED = 4  # times all patches: so many merge half of all tokens in every block
# Weights of 12 blocks that were nearest to the dense model on photographs, for budgets from so much on (ViT-B).
SHAPES = {
    0.67: (0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    0.55: (0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    0.0: (2, 2, 4, 5, 5, 5, 5, 4, 3, 3, 2, 2),
}
WORSE, BETTER = 1.5, 2.0  # standard errors by which a schedule is given up, or takes the place of the best so far
WIDEST, NARROWEST = 0.8, 0.2  # standard deviation of a trial's log weights, from the first trial to the last

Weights = tuple[float, ...]  # one for each block: how many tokens it merges, relative to the others


@dataclass(frozen=True)
class Search:
    """The result of a search: how much the schedule's outputs differ from the dense model's, on the images given."""

    distance: float  # mean of `total_variation`
    constant: float  # of the same number in every block, as published
    trials: int
    num_images: int

    def __str__(self) -> str:
        return (
            f"distance {self.distance:.4g} from the dense model, {self.constant:.4g} with the same number in every "
            f"block, on {self.num_images} images"
        )


def fit_reducer(
    model: Any, images: Tensor | Iterable[Any], budget: float, trials: int | None = None, seed: int = 0,
    progress: bool = True,
) -> Any:  # fmt: skip
    """Return a model of the same weights that merges tokens, in each block as many as suit the images at this budget.

        model = msvit.fit_reducer(model, images, budget=0.6)       # 60 % of the dense multiply-adds
        print(model.reducer, model.reducer.search)

    Nothing is trained and no labels are needed: `trials` schedules (250 on a GPU, 24 on a CPU) are compared on the
    images, of which at most 1024 are used (64 on a CPU). The first is that of `convert(method="auto")`, or the same
    number in every block if that is nearer to the dense model's outputs. Another takes its place if it is nearer by 2
    standard errors, and is given up after some images if it is further by 1.5. The gate stays as it is, and its cost
    counts; with `msvit.AllFine` merging is all that saves. Images come as for `calibrate`. The model given stays as it
    is. `progress`: show it and the time left on stderr.
    """
    if (inner := inner_msvit(model)) is not None:
        return model.around(fit_reducer(inner, images, budget, trials, seed, progress))
    check_budget(budget, "macs")
    check_int("seed", seed, at_least=0, at_most=2**63 - 1)
    check_flag("progress", progress)
    encoder = gated_encoder(model)
    check_eval(model.modules())
    weight = encoder.host.patch_embed.proj.weight
    kind = weight.device.type if weight.device.type in TRIALS else "cpu"
    trials = TRIALS[kind] if trials is None else check_int("trials", trials, at_least=0)
    with_options = MSViT.with_options if encoder is model else type(model).with_options  # compile no trial
    plain = with_options(model, reducer=None)
    with torch.inference_mode():
        held = some_images(model, images, MAX_IMAGES[kind]).to(weight.device)  # unsorted: the first batch may decide
        parts, dense = held.split(BATCH[kind]), dense_model(plain)
        search = ScheduleSearch(plain, encoder.grid(held), parts, [dense(part) for part in parts], budget)
        reducer = search.run(seed, trials, progress)
    return model.with_options(reducer=reducer).with_budget(budget, "macs")


def merge_by_rule(model: Any, budget: float) -> Any:
    """Return the model with ToMe at this budget, for images of its host's size: fewer tokens in the first blocks."""
    check_budget(budget, "macs")
    encoder = gated_encoder(model)
    grid = ScaleGrid(*native_size(encoder), fine=encoder.fine, coarse=encoder.coarse)
    limit = ScheduleBudget(model, grid, torch.ones(1, *grid.cells, dtype=torch.bool), budget)
    shapes = [stretched(shape, limit.depth) for min_budget, shape in SHAPES.items() if budget >= min_budget]
    for weights in (*shapes, (1.0,) * limit.depth):
        if (schedule := limit.schedule(weights)) is not None:
            return model.with_options(reducer=ToMe(r=schedule)).with_budget(budget, "macs")
    limit.raise_out_of_reach()


class ScheduleSearch:
    """Schedules of one model, compared on batches of images by the outputs of its dense self."""

    def __init__(
        self, model: Any, grid: ScaleGrid, images: Sequence[Tensor], wanted: list[MSViTOutput], budget: float
    ) -> None:
        self.model, self.images, self.wanted = model, images, wanted
        gate = gated_encoder(model).gate
        fine = torch.ones(1, *grid.cells, dtype=torch.bool)
        if not isinstance(gate, AllFine):
            fine = torch.cat([gate(image).mask.cpu() > 0.5 for image in images])
        self.budget = ScheduleBudget(model, grid, fine, budget)

    def run(self, seed: int, trials: int, progress: bool) -> ToMe:
        """Return the best schedule of some: that by rule for the budget, others, ones drawn from the best so far."""
        draw, note = torch.Generator().manual_seed(seed), note_progress(progress, f"fit_reducer, {trials} schedules")
        weights: Weights = (1.0,) * self.budget.depth
        if (kept := self.budget.schedule(weights)) is None:
            self.budget.raise_out_of_reach()
        best = constant = self.distances(kept)
        tried = {kept}
        by_rule = sorted(SHAPES, key=lambda min_budget: min_budget > self.budget.budget)
        starts = [stretched(SHAPES[min_budget], self.budget.depth) for min_budget in by_rule]
        for index in range(trials):
            spread = WIDEST + (NARROWEST - WIDEST) * index / trials
            drawn = starts[index] if index < len(starts) else varied(weights, spread, draw)
            schedule = self.budget.schedule(drawn)
            if schedule is not None and schedule not in tried:
                tried.add(schedule)
                distances = self.distances(schedule, best)
                nearer = len(distances) == len(best) and distances.mean() < best.mean()
                if nearer and (index == 0 or are_above(best - distances, BETTER)):
                    best, weights, kept = distances, drawn, schedule
            note((index + 1) / trials, f"distance from the dense model {best.mean():.4g}")
        reducer = ToMe(r=kept).eval()
        reducer.search = Search(best.mean().item(), constant.mean().item(), len(tried), len(best))
        return reducer

    def distances(self, schedule: Sequence[int], best: Tensor | None = None) -> Tensor:
        """Return how much each image's output with a schedule differs from the dense one.

        After a batch at which they are clearly above those of another schedule, `best`, they end.
        """
        model = self.model.with_options(reducer=ToMe(r=schedule).eval())
        found = torch.empty(0, dtype=torch.float64)
        for image, wanted in zip(self.images, self.wanted, strict=True):
            found = torch.cat([found, total_variation(model, wanted, model(image)).double().cpu()])
            if best is not None and are_above(found - best[: len(found)], WORSE):
                break
        return found


def are_above(differences: Tensor, errors: float) -> bool:
    """Return whether the mean of images' differences is above 0 by so many of its standard errors."""
    return bool(differences.mean() > errors * differences.std(correction=0) / len(differences) ** 0.5)


class ScheduleBudget:
    """Schedules that cost what they may: the mean multiply-adds of images whose cells are fine as given."""

    def __init__(self, model: Any, grid: ScaleGrid, fine: Tensor, budget: float) -> None:
        check_number("budget", budget, above=0, at_most=1, example=0.6)
        self.encoder, self.grid, self.fine, self.budget = gated_encoder(model), grid, fine, budget
        self.depth, self.whole = len(self.encoder.host.blocks), Cost(model, grid, "macs")
        # A head that pools no patches does not depend on them after the last attention: merging these is exact.
        pooling = [getattr(self.encoder.host, name, None) for name in ("attn_pool", "global_pool")]
        self.last_is_free = self.encoder is model and pooling == [None, "token"]

    def cost(self, schedule: Sequence[int]) -> float:
        """Return the mean multiply-adds with a schedule, as a share of the dense ones."""
        return self.whole(self.fine, ToMe(r=schedule)).mean().item()

    def schedule(self, weights: Weights) -> tuple[int, ...] | None:
        """Return the costliest schedule with these weights within the budget; None if there is none so cheap."""
        if not any(weights[:-1] if self.last_is_free else weights):
            return None
        totals = range(MAX_MERGED * self.grid.num_patches)
        fewest = bisect_left(totals, True, key=lambda total: self.cost(self._scaled(weights, total)) <= self.budget)
        return None if fewest == len(totals) else self._scaled(weights, fewest)

    def _scaled(self, weights: Weights, total: int) -> tuple[int, ...]:
        """Whole numbers of `total` tokens in all, rounded so; no block can merge more than half of what it has."""
        blocks = weights[:-1] if self.last_is_free else weights
        exact = [total * weight / sum(blocks) for weight in blocks]
        order = sorted(range(len(exact)), key=lambda index: (int(exact[index]) - exact[index], -index))
        numbers = [int(number) for number in exact]
        for index in order[: total - sum(numbers)]:
            numbers[index] += 1
        left, merged = self.grid.num_patches, []
        for number in numbers + [self.grid.num_patches] * self.last_is_free:
            merged.append(min(number, left // 2))
            left -= merged[-1]
        return tuple(merged)

    def raise_out_of_reach(self) -> NoReturn:
        """Raise ValueError with the lowest cost that merging reaches."""
        schedule = self._scaled((1.0,) * self.depth, MAX_MERGED * self.grid.num_patches)
        raise ValueError(
            f"budget is {self.budget:g} of the dense multiply-adds, but merging half of all tokens in every block "
            f"leaves {self.cost(schedule):.4g}; pass a larger budget"
        )


def stretched(shape: Sequence[float], depth: int) -> Weights:
    """Stretch the weights of a model of another depth to this depth."""
    return tuple(float(shape[index * len(shape) // depth]) for index in range(depth))


def varied(weights: Weights, spread: float, draw: torch.Generator) -> Weights:
    """Return other weights near these: some scaled, one moved to another block, or one set to 0."""
    kind, depth = torch.rand((), generator=draw).item(), len(weights)
    new = torch.tensor(weights) / sum(weights) * depth
    one, other = torch.randint(depth, (2,), generator=draw).tolist()
    if kind < 0.25:
        moved = new[one] * torch.rand((), generator=draw)
        new[one], new[other] = new[one] - moved, new[other] + moved
    elif kind < 0.45:
        new[one] = 0
    else:
        chosen = torch.rand(depth, generator=draw) < 0.35
        new = (new + 0.02) * torch.exp(spread * torch.randn(depth, generator=draw) * chosen)
    return tuple(new.tolist()) if new[:-1].sum() > 0 else weights
