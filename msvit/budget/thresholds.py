"""Any budget at inference, without training: a gate's threshold, or share, for the mean cost that is wanted.

    model = calibrate(model, images, budget=0.6)         # a few hundred images without labels set the threshold
    model = set_budget(model, 0.45)                      # later, without images: by the curve that calibrate recorded
    model = set_budget(model, 0.5, unit="tokens")
    model = calibrate(model, images, 3.2, unit="ms")     # ms per image on this device, in batches as given

Multiply-adds and tokens are shares of the dense host's, gate included. What they are for an image follows from which
of its cells are fine, so nothing but the gate runs. The threshold is the observed score at which their mean over the
images is nearest to the budget. Of gates that make the same share of every image fine, that share is set.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msvit.budget.images import checked_batches, gated_encoder
from msvit.checks import check_choice, check_eval, check_int, check_ints, check_number, warn
from msvit.gates import Gate
from msvit.gates.curve import Curve, curve_for
from msvit.gates.fixed import centre_distance
from msvit.gates.ranking import top_num
from msvit.host_settings import native_size
from msvit.model import inner_msvit
from msvit.reduction import Reducer
from msvit.shapes import Bool, Float
from msvit.types import ScaleGrid

UNITS = {"macs": "of the dense multiply-adds", "tokens": "of the dense tokens", "ms": "ms per image"}
TIMED = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of fine cells that are timed
NEAR = 0.1  # and, around the one that seems right, shares so far from it
ROUNDS = 7  # of timing; in each every share is timed once


def calibrate(model: Any, images: Tensor | Iterable[Any], budget: float, unit: str = "macs") -> Any:
    """Return a model of the same weights whose gate meets the budget on average over images like these.

        model = msvit.calibrate(model, images, budget=0.6)                 # (n, 3, h, w), prepared as for the model
        model = msvit.calibrate(model, loader, budget=0.5, unit="tokens")  # batches, (batch, label), {"pixel_values":}
        model = msvit.calibrate(model, "photos/", budget=0.6)              # a folder, paths or PIL images

    Files and PIL images are prepared as `model.preprocessing` has it. `unit`: "macs" and "tokens" are shares of the
    dense host's; "ms" is the time per image on this device, measured at some shares of fine cells with the first batch.
    The gate also gets the curve of its scores, which is saved with it and by which `set_budget` sets other budgets
    later. The model given stays as it is.
    """
    if (inner := inner_msvit(model)) is not None:
        return model.around(calibrate(inner, images, budget, unit))
    check_budget(budget, unit)
    gate = gated_encoder(model).gate
    name = cost_setting(gate)
    scored = score_images(model, images)
    asked = (_tokens_for_ms(model, scored, budget, name), "tokens") if unit == "ms" else (budget, unit)
    value = scored.solve(model, *asked, name)
    curves = {"curves": (Curve.of(scored.scores),)} if name == "threshold" else {}
    return model.with_options(gate=gate.with_settings(**{name: value}, **curves)).with_budget(budget, unit)


def set_budget(
    model: Any, budget: float, unit: str = "macs", size: int | tuple[int, int] | None = None
) -> Any:
    """Return a model of the same weights with another budget, met on average over images as in the calibration.

    `size`: of the images in px; by default that of the calibration or, with several, that of the host. The gate must
    have been calibrated, as the one that comes with msvit is, or be one with a share. In Swin hosts, whose cost also
    depends on which windows have tokens, fine cells are taken to lie in the centre: `calibrate` is exact.
    """
    if (inner := inner_msvit(model)) is not None:
        return model.around(set_budget(inner, budget, unit, size))
    check_budget(budget, unit)
    if unit == "ms":
        raise ValueError('unit is "ms", but time is measured on images; call msvit.calibrate(model, images, budget)')
    encoder = gated_encoder(model)
    name = cost_setting(encoder.gate)
    if name == "threshold" and not encoder.gate.curves:
        raise ValueError(
            f"the {type(encoder.gate).__name__} has not been calibrated; call msvit.calibrate(model, images, budget), "
            f'or take the gate that comes with msvit: gate="default"'
        )
    grid = _grid(encoder, size)
    cost = Cost(model, grid, unit)
    by_count = cost.by_count()
    cost.check_reached(budget, by_count[0], by_count[-1])
    if name == "share":
        value = float(np.abs(by_count - budget).argmin()) / grid.num_cells
    else:
        value = _threshold(_curve(encoder.gate, grid), by_count, budget)
    return model.with_options(gate=encoder.gate.with_settings(**{name: value})).with_budget(budget, unit)


def check_budget(budget: float, unit: str) -> None:
    """Raise ValueError unless the unit is known and the budget positive, and no percentage."""
    check_choice("unit", unit, UNITS)
    check_number("budget", budget, above=0, example=3.2 if unit == "ms" else 0.6)
    if unit != "ms" and 2 < budget <= 100:
        raise ValueError(
            f"budget is {budget}, but is a share of the dense model's cost; pass {budget / 100:g} for {budget:g} %"
        )


def cost_setting(gate: Gate) -> str:
    """Return the name of the setting that a gate's cost follows from: "threshold" or "share"."""
    for name in ("threshold", "share"):
        if gate.config.get(name) is not None:
            return name
    raise ValueError(
        f"the gate, {type(gate).__name__}, has neither a threshold nor a share, so that its budget cannot be set; "
        f'take another, such as msvit.convert(host, gate="default"), and for a model of speed_up call that again'
    )


class Cost:
    """The cost of images by which of their cells are fine, in a unit: shares of the dense host's."""

    def __init__(self, model: Any, grid: ScaleGrid, unit: str) -> None:
        self.encoder, self.grid, self.unit = gated_encoder(model), grid, unit
        self.head = self.encoder is model
        self.decoder = 0 if self.head else model.decoder_macs(grid)
        self.dense = float(self._count(torch.ones(1, *grid.cells, dtype=torch.bool), dense=True)[0])

    def __call__(self, fine: Bool[Tensor, "n hc wc"], reducer: Reducer | None = None) -> Float[Tensor, " n"]:
        """Return the cost of each image. `reducer`: another than the model's."""
        if reducer is not None:
            reducer.fit(self.encoder.host)
        return self._count(fine, reducer=reducer or self.encoder.reducer).double() / self.dense

    def _count(self, fine: Tensor, dense: bool = False, reducer: Reducer | None = None) -> Tensor:
        backbone = self.encoder.backbone
        if self.unit == "tokens":
            return backbone.num_tokens(fine.flatten(1).sum(1), self.grid)
        extra = self.decoder if dense else self.decoder + self.encoder.gate.num_macs(self.grid.num_cells)
        return backbone.num_macs(fine, self.grid, reducer, self.head) + extra

    def by_count(self) -> Float[np.ndarray, " counts"]:
        """Return the cost of images with 0, 1, ... fine cells, which lie in the centre."""
        centre = -centre_distance(*self.grid.cells)[None]
        return self(torch.cat([top_num(centre, num) > 0.5 for num in range(self.grid.num_cells + 1)])).numpy()

    def check_reached(self, budget: float, lowest: float, highest: float) -> None:
        """Raise ValueError unless the budget lies between the costs of all cells coarse and all fine."""
        if not lowest <= budget * (1 + 1e-9) or not budget <= highest * (1 + 1e-9):
            host, grid = self.encoder.host_name, self.grid
            raise ValueError(
                f"budget is {budget:g} {UNITS[self.unit]}, but {host} with images of {grid.height}x{grid.width}px "
                f"and cells of {grid.coarse}px has {lowest:.4g} with all cells coarse and {highest:.4g} with all "
                f"fine; pass a number between them"
            )


@dataclass(frozen=True)
class Scored:
    """The scores of all cells of some images, and the first batch of them."""

    grid: ScaleGrid
    scores: Float[Tensor, "n hc wc"]
    first: Float[Tensor, "b c h w"]

    def solve(self, model: Any, budget: float, unit: str, name: str) -> float:
        """Return the threshold or the share at which the mean cost of the images is nearest to the budget."""
        cost = Cost(model, self.grid, unit)
        num = self.scores.numel() if name == "threshold" else self.grid.num_cells
        values = self.thresholds() if name == "threshold" else np.linspace(0, 1, num + 1)

        def mean(index: int) -> float:
            return cost(self.fine(values[index], name)).mean().item()

        cost.check_reached(budget, mean(0), mean(num))
        above = min(num, bisect_right(range(num + 1), budget, key=mean))
        below = max(0, above - 1)
        return float(values[min(below, above, key=lambda index: abs(mean(index) - budget))])

    def fine(self, value: float, name: str) -> Bool[Tensor, "n hc wc"]:
        """Return which cells are fine at this threshold or share."""
        if name == "threshold":
            return self.scores > value
        return top_num(self.scores, round(value * self.grid.num_cells)) > 0.5

    def thresholds(self) -> Float[np.ndarray, " cells"]:
        """Return thresholds over which 0, 1, ... of all cells are, each halfway between two scores, in float32."""
        ordered = self.scores.flatten().double().sort(descending=True).values.numpy()
        ends = [2 * ordered[0] - ordered[-1] + 1], [2 * ordered[-1] - ordered[0] - 1]
        between = (ordered[1:] + ordered[:-1]) / 2
        return np.concatenate([ends[0], between, ends[1]]).astype(np.float32).astype(np.float64)


@torch.no_grad()
def score_images(model: Any, images: Tensor | Iterable[Any]) -> Scored:
    """Run the gate on all images. Raise ValueError unless there are some, of one size, without NaN."""
    encoder = gated_encoder(model)
    all_scores: list[Tensor] = []
    first: Tensor | None = None
    for batch in checked_batches(model, images):
        first = batch if first is None else first
        scores = encoder.gate.scores(batch).cpu()
        if not scores.isfinite().all():
            kind = type(encoder.gate).__name__
            raise ValueError(f"the {kind} has scores that are no numbers; check its weights for NaN")
        all_scores.append(scores)
    assert first is not None, "no images are an error"
    return Scored(encoder.grid(first), torch.cat(all_scores), first)


def time_values(run: Callable[[float], Any], values: Sequence[float], rounds: int) -> list[float]:
    """Return the seconds of `run` with each of these values: medians of rounds, in each of which all are timed once."""
    for value in values:
        run(value)
    seconds: list[list[float]] = [[] for _ in values]
    for _ in range(rounds):
        for value, times in zip(values, seconds, strict=True):
            begin = perf_counter()
            run(value)
            times.append(perf_counter() - begin)
    return [median(times) for times in seconds]


@torch.no_grad()
def _tokens_for_ms(model: Any, scored: Scored, budget: float, name: str) -> float:
    """The share of the dense tokens at which a forward takes `budget` ms per image, between those that are timed."""
    given = gated_encoder(model).gate
    check_eval({*model.modules()} - {*given.modules()})
    timed = model.with_options(gate=given.with_settings().eval())
    gate, image = timed.gate, scored.first
    cost, thresholds = Cost(model, scored.grid, "tokens"), scored.thresholds()
    first_batch = Scored(scored.grid, scored.scores[: len(image)], image)

    def run(value: float) -> None:
        setattr(gate, name, value)
        timed(image)
        if image.is_cuda:
            torch.cuda.synchronize(image.device)

    def measure(shares: Sequence[float]) -> tuple[list[float], Float[np.ndarray, " shares"]]:
        """Tokens and ms per image with these shares of fine cells; more tokens never take less time."""
        values = [float(thresholds[round(s * (len(thresholds) - 1))]) if name == "threshold" else s for s in shares]
        seconds = time_values(run, values, ROUNDS)
        tokens = [cost(first_batch.fine(value, name)).mean().item() for value in values]
        return tokens, np.maximum.accumulate(seconds) * 1e3 / len(image)

    _, ms = measure(TIMED)
    if not ms[0] <= budget <= ms[-1]:
        raise ValueError(
            f"budget is {budget:g} ms per image, but in batches of {len(image)} on {image.device} they take "
            f"{ms[0]:.4g} ms with all cells coarse and {ms[-1]:.4g} ms with all fine; pass a number between them"
        )
    share = float(np.interp(budget, ms, TIMED))
    tokens, ms = measure([max(0.0, share - NEAR), share, min(1.0, share + NEAR)])  # times are no straight lines
    return float(np.interp(budget, ms, tokens))


def _threshold(curve: Curve, by_count: Float[np.ndarray, " counts"], budget: float) -> float:
    """The threshold at which the mean cost is the budget, for images that differ from each other as the curve says."""
    counts, spread = np.linspace(0, 1, len(by_count)), np.array(curve.spread)
    shares = np.linspace(0, 1, len(spread))
    ends = [np.interp(np.clip(shares + sign * spread, 0, 1), counts, by_count) for sign in (-1, 1)]
    costs = np.maximum.accumulate((ends[0] + ends[1]) / 2)  # exact where the cost is quadratic in the count
    return float(np.interp(budget, costs, curve.thresholds))


def _curve(gate: Gate, grid: ScaleGrid) -> Curve:
    curve = curve_for(gate.curves, grid.cells)
    if curve.cells != grid.cells:
        rows, columns = curve.cells
        warn(
            f"the gate's thresholds are those of images of {rows}x{columns} cells, and these have "
            f"{grid.cells[0]}x{grid.cells[1]}, so that the budget is met less exactly; "
            f"call msvit.calibrate(model, images, budget) with images of {grid.height}x{grid.width}px"
        )
    return curve


def _grid(encoder: Any, size: int | tuple[int, int] | None) -> ScaleGrid:
    """That of images of this size; by default of the calibration's, or of the largest the host was built for."""
    fine, coarse = encoder.fine, encoder.coarse
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else check_ints("size", size, 2, example=(224, 224))
        if check_int("size", height, at_least=1) % coarse or width % coarse:
            raise ValueError(f"size is {height}x{width}px, but cells of {coarse}px need multiples of {coarse}")
        return ScaleGrid(height, width, fine=fine, coarse=coarse)
    curves = encoder.gate.curves
    if len(curves) == 1:
        height, width = (max(1, num) * coarse for num in curves[0].cells)
    else:
        height, width = native_size(encoder)
    return ScaleGrid(height, width, fine=fine, coarse=coarse)
