"""Figures for a page: each a `Plot` with an SVG that takes the page's text colour, and a caption in words.

    plot = accuracy_against_gmacs([as_point(run) for run in runs])             # top-1 or mIoU
    plot = token_histogram(edges=[16, 20, 24], counts=[3, 5], num_dense=64)
    page.write(plot.svg)                     # inline: no network, no script, no fonts of its own

They are drawn small, about 330 units wide, so that their letters are still readable on a phone.
"""

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from msvit.lab.runs import Metric, finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"  # stands for the page's own text colour
COLOURS = ["#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2"]  # told apart by all eyes (Okabe and Ito)
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
WIDTH = 4.6  # inches
MAX_POINTS = 300  # of a curve
FEW_POINTS = 30  # of a curve: each gets a dot
MAX_MAPS = 4
RARE = 1e-4  # of all pixels: a class that is rarer has no exact frequency written
MAX_BARS = 8  # of the classes most often coarse, and as many of the least
STYLE: dict[Any, Any] = {
    "font.size": 10.0, "axes.titlesize": 10.0, "legend.fontsize": 9.5, "legend.frameon": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "grid.color": INK, "grid.alpha": 0.15, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.6,
    "svg.fonttype": "none", "svg.hashsalt": "msvit", "text.parse_math": False,
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    svg: str
    caption: str


@dataclass(frozen=True)
class Point:
    """A run as one point of a curve."""

    name: str
    dense: bool
    img_size: int | None
    metric: Metric
    score: float  # 0..1, its value
    gmacs: float | None = None  # per image, or what the metric says
    speed_up: float | None = None  # over its dense host, timed beside it; a dense run that is such a host has 1


def accuracy_against_gmacs(points: Sequence[Point]) -> Plot:
    """Top-1 or mIoU over multiply-adds, with the curve of the dense runs."""
    metric = _one_metric(points)
    caption = f"The {metric.name} of each run against billions of multiply-adds per {metric.per}, gate included."
    costs, label = [point.gmacs for point in points], f"GMACs per {metric.per}"
    return _accuracy_against(points, costs, label, f"{caption} Further up and to the left is better.")


def accuracy_against_speed_up(points: Sequence[Point], how: str) -> Plot:
    """Top-1 or mIoU over how many times as fast a run is as its dense host. `how` says on what it was measured."""
    metric = _one_metric(points)
    caption = (
        f"The {metric.name} of each run against its speed-up over the dense model of the same input, gate included, "
        f"both timed in turn ({how}). Further up and to the right is better."
    )
    known = [point.speed_up for point in points]
    return _accuracy_against(points, known, "times as fast as dense", caption)


def _one_metric(points: Sequence[Point]) -> Metric:
    metrics = {point.metric.name: point.metric for point in points}
    if len(metrics) != 1:
        names = " and ".join(metrics) or "no metric"
        raise ValueError(f"{len(points)} points have {names}, but a curve shows one; draw the runs of each task apart")
    return next(iter(metrics.values()))


def _accuracy_against(points: Sequence[Point], costs: Sequence[float | None], label: str, caption: str) -> Plot:
    known = [(x, point) for x, point in zip(costs, points, strict=True) if x is not None]
    if not known:
        raise ValueError(f"none of the {len(points)} points has {label}; evaluate the runs first")
    dense = sorted(((x, point) for x, point in known if point.dense), key=lambda pair: pair[0])
    gated = [point.name for point in points if not point.dense]
    looks = {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(gated)}

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        if dense:
            line = [x for x, _ in dense], [100 * point.score for _, point in dense]
            name = "dense, at several input sizes" if len(dense) > 1 else "dense"
            axes.plot(*line, "-o", color=INK, markersize=5, label=name)
        for x, point in dense:
            style: dict[str, Any] = {"ha": "left", "va": "top", "fontsize": 9}
            words = "" if point.img_size is None else f"{point.img_size} px"
            axes.annotate(words, (x, 100 * point.score), (6, -4), textcoords="offset points", **style)
        for x, point in known:
            if not point.dense:
                colour, marker = looks[point.name]
                style = {"color": colour, "marker": marker, "markersize": 8, "linestyle": "none"}
                axes.plot(x, 100 * point.score, label=_shorten(point.name), **style)
        axes.set(xlabel=label, ylabel=f"{points[0].metric.name} (%)")
        axes.margins(0.14)
        axes.locator_params(axis="x", nbins=6)
        figure.legend(loc="outside lower left")

    num_rows = len(known) - len(dense) + bool(dense)
    return Plot(_svg(draw, height=2.9 + 0.2 * num_rows, label=caption), caption)


def mask_statistics(mean: Float[np.ndarray, "hc wc"], var: Float[np.ndarray, "hc wc"], per: str = "image") -> Plot:
    """Mean and variance of the masks at every position."""
    caption = (
        f"Masks by position, over the evaluated {per}s. Left: the share of {per}s in which a cell is fine. Right: its "
        f"variance, 0 where every {per} is treated alike and 0.25 where half of them are fine."
    )

    def draw(figure: "Figure") -> None:
        for axes, values, title, top in zip(
            figure.subplots(1, 2), (mean, var), ("share fine", "variance"), (1.0, 0.25), strict=True
        ):
            mesh = _map(axes, values, top)
            axes.set(title=title, xlabel="cell column", ylabel="cell row")
            figure.colorbar(mesh, ax=axes, orientation="horizontal", ticks=[0, top], format="%g", aspect=12)

    return Plot(_svg(draw, height=3.0, label=caption, layout="compressed"), caption)


def priors_over_training(steps: Sequence[int], thetas: Sequence[np.ndarray]) -> Plot:
    """The learned priors, one map per step, at most four of them, first and last among them."""
    if not steps or len(steps) != len(thetas):
        raise ValueError(f"there are {len(steps)} steps and {len(thetas)} maps, but each step needs its map")
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(MAX_MAPS, len(steps))).round().astype(int))
    caption = (
        "The learned prior theta of every position over training: the location the batch-shaping loss pulls a cell's "
        "fine probability to. Bright cells are expected to be fine in most images."
    )

    def draw(figure: "Figure") -> None:
        row = figure.subplots(1, len(chosen), squeeze=False)[0]
        for axes, index in zip(row, chosen, strict=True):
            mesh = _map(axes, thetas[index], 1.0)
            axes.set(title=f"step {steps[index]}", xticks=[], yticks=[])
            axes.set_xlabel("cell column" if index == chosen[0] else "")
        row[0].set_ylabel("cell row")
        figure.colorbar(mesh, ax=list(row), label="theta", ticks=[0, 0.5, 1], aspect=12)

    return Plot(_svg(draw, height=1.5 if len(chosen) > 2 else 2.4, label=caption, layout="compressed"), caption)


def token_histogram(
    edges: Sequence[float], counts: Sequence[float], num_dense: int | None = None, per: str = "image"
) -> Plot:
    """How many images, or windows, took how many tokens."""
    if len(edges) != len(counts) + 1:
        raise ValueError(f"there are {len(edges)} edges for {len(counts)} counts; a histogram has one edge more")
    caption = f"Tokens per {per}, over {sum(counts):.0f} {per}s: one bar per range of token counts."
    if num_dense is not None:
        caption += f" The dashed line is the dense host's {num_dense}."

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.stairs(counts, edges, fill=True, color=COLOURS[5], alpha=0.9)
        if num_dense is not None:
            axes.axvline(num_dense, color=INK, linestyle="--", label="dense")
            axes.legend(loc="upper left", bbox_to_anchor=(0, 1.16), borderaxespad=0)
        axes.set(xlabel=f"tokens per {per}", ylabel=f"{per}s")

    return Plot(_svg(draw, height=2.5, label=caption), caption)


def class_bars(names: Sequence[str], coarse: Sequence[float | None], frequency: Sequence[float | None]) -> Plot:
    """The classes most and least often coarse (the paper's figure 5c); a class that does not occur has None."""
    if not len(names) == len(coarse) == len(frequency):
        raise ValueError(f"{len(names)} classes, {len(coarse)} shares, {len(frequency)} frequencies; pass one of each")
    known = [
        (share, f"{_shorten(name, 20)}, {f'{100 * often:.3g}' if often >= RARE else f'under {100 * RARE:g}'} %")
        for name, share, often in zip(names, coarse, frequency, strict=True)
        if share is not None and often is not None
    ]
    if not known:
        raise ValueError(f"none of the {len(names)} classes occurs; evaluate the run on images that show some")
    known.sort(key=lambda bar: -bar[0])
    most = known[: min(MAX_BARS, -(-len(known) // 2))]
    least = known[len(most) :][-MAX_BARS:]
    groups = [("most often coarse", most), ("least often coarse", least)][: 2 if least else 1]
    caption = (
        f"Classes most and least often coarse, of {len(known)} that occur: the share of their pixels that lie in "
        "coarse cells. Beside each name stands how frequent the class is, as a share of all labelled pixels."
    )

    def draw(figure: "Figure") -> None:
        heights = [len(bars) + 0.5 for _, bars in groups]
        panels = figure.subplots(len(groups), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, bars), colour in zip(panels, groups, (COLOURS[1], COLOURS[0]), strict=False):
            places = range(len(bars))
            drawn = axes.barh(places, [100 * share for share, _ in bars], color=colour, height=0.7)
            axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=9)
            axes.set_yticks(places, [label for _, label in bars])
            axes.set(title=title, ylim=(len(bars) - 0.4, -0.6), xlim=(0, 108), xticks=[0, 25, 50, 75, 100])
            axes.grid(False, axis="y")
            axes.tick_params(axis="y", length=0)
        panels[-1].set_xlabel("pixels in coarse cells (%)")

    height = 0.7 + sum(0.24 * len(bars) + 0.35 for _, bars in groups)
    return Plot(_svg(draw, height=height, label=caption), caption)


def training_curves(train: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]], metric: Metric) -> Plot:
    """Losses, top-1 or mIoU, and tokens over training, from lines of metrics.jsonl of the kinds "train" and "eval"."""
    if not train and not evals:
        raise ValueError("there are 0 train and 0 eval lines to draw; a run writes them to metrics.jsonl")
    clock = "epoch" if all(finite(line.get("epoch")) is not None for line in [*train, *evals]) else "step"
    scores = " and ".join(dict.fromkeys((metric.name, metric.in_training)))
    caption = f"Over training, by {clock}: the losses, {scores}, and tokens per {metric.per}; large dots: evaluations."
    curves = [  # panel, lines, key, factor, label, colour, marker
        (0, train, "task", 1, "task loss", COLOURS[5], None),
        (0, train, "gate", 1, "gate loss", COLOURS[3], None),
        (1, train, "accuracy", 100, f"training, {metric.in_training}", COLOURS[1], None),
        (1, evals, metric.key, 100, f"evaluation, {metric.name}", INK, "o"),
        (2, train, "tokens", 1, "training", COLOURS[2], None),
        (2, evals, "tokens", 1, "evaluation", INK, "o"),
    ]

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(3, sharex=True)
        for panel, lines, key, factor, label, colour, marker in curves:
            dots = [(line[clock], y) for line in lines if (y := finite(line.get(key))) is not None]
            dots = dots[:: -(-len(dots) // MAX_POINTS) or 1]
            if dots:
                mark = marker or ("." if len(dots) <= FEW_POINTS else None)  # a line through one point shows nothing
                places = [dot[0] for dot in dots], [factor * dot[1] for dot in dots]
                panels[panel].plot(*places, color=colour, marker=mark, markersize=4, label=label)
        for axes, label in zip(panels, ("loss", "score (%)", f"tokens per {metric.per}"), strict=True):
            axes.set_ylabel(label)
            if axes.lines:
                axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
        panels[-1].set_xlabel(f"training {clock}s")

    return Plot(_svg(draw, height=4.6, label=caption), caption)


def _map(axes: Any, values: Float[np.ndarray, "hc wc"], top: float) -> Any:
    """One square per cell, the first row on top."""
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set(aspect="equal", xticks=_ends(values.shape[1]), yticks=_ends(values.shape[0]))
    axes.invert_yaxis()
    centres = np.arange(values.shape[1]), np.arange(values.shape[0])
    return axes.pcolormesh(*centres, values, vmin=0, vmax=top, cmap="viridis", edgecolors="face", linewidth=0.3)


def _ends(length: int) -> list[int]:
    return sorted({0, length - 1})


def _shorten(name: str, length: int = 38) -> str:
    name = name if len(name) <= length else name[: length - 3] + "..."
    return f" {name}" if name.startswith("_") else name  # matplotlib hides labels that begin so


def _svg(
    draw: Callable[["Figure"], None],
    height: float,
    label: str,
    layout: Literal["constrained", "compressed"] = "constrained",
) -> str:
    """Draw, and make of the file an element that can stand in a page beside others of its kind."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout=layout)
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    head, body = text.split(">", 1)
    viewbox = re.search(r'viewBox="[^"]*"', head)
    assert viewbox, head
    body = body.replace(INK, "currentColor")
    # Ids are known to the whole page: make them this figure's own.
    own = "f" + hashlib.sha256(body.encode()).hexdigest()[:8]
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", body)
    return f'<svg {viewbox[0]} role="img" aria-label="{escape(label)}">{body}'.strip()
