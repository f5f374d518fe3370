"""Figures for a page: each a `Plot` with an SVG that takes the page's text colour, and a caption in words.

    plots, gaps = figures_of(run)                # masks, tokens, classes, training; a sentence for what is missing
    plots, gaps = score_figures(make_points(runs, names, how), metric, how)      # several runs: top-1 or mIoU, cost
    page.write(plot.svg)                     # inline: no network, no script, no fonts of its own

They are drawn small, about 330 units wide, so that their letters are still readable on a phone.
"""

import hashlib
import io
import math
import re
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from msvit_lab.evaluation_files import Metric, name_of
from msvit_lab.json_values import cell_map, finite, look_up, numbers, with_gaps
from msvit_lab.runs import Run
from msvit_lab.viz.compare import Point, dense_command, target_lines

INK = "#010203"  # stands for the page's own text colour
COLOURS = ["#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2"]  # for the colour-blind too (Okabe and Ito)
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


class Plot(NamedTuple):
    svg: str
    caption: str


@matplotlib.rc_context(STYLE)
def score_figures(points: Sequence[Point], metric: Metric, how: Sequence[str] | None) -> tuple[list[Plot], list[str]]:
    """Top-1 or mIoU over multiply-adds and over speed-ups, with the dense runs as a curve; and what is missing.

    `how`: what speed-ups were measured on. They are those at the largest batch. A dense run is its own host: its
    speed-up is 1 where a run with a gate has the same input.
    """
    sizes = {point.run.img_size for point in points if point.speed_ups and not point.run.dense}
    costs = {point: point.gmacs for point in points if not math.isnan(point.gmacs)}
    faster = {point: next(iter(point.speed_ups.values())) for point in points if point.speed_ups}
    faster |= {point: 1.0 for point in points if point.run.dense and point.run.img_size in sizes}
    plots, gaps = [], []
    if costs:
        plots.append(_score_against(
            costs, points, f"GMACs per {metric.per}", metric,
            f"The {metric.name} of each run against billions of multiply-adds per {metric.per}, gate included. "
            "Further up and to the left is better.",
        ))  # fmt: skip
    else:
        gaps.append(f"No run has both {metric.name} and GMACs, so there is no curve of them.")
    if sizes and how:
        plots.append(_score_against(
            faster, points, "times as fast as dense", metric,
            f"The {metric.name} of each run against its speed-up over the dense model of the same input, gate "
            f"included, both timed in turn ({', '.join(how)}). Further up and to the right is better.",
        ))  # fmt: skip
    elif any(not point.run.dense for point in points):
        gaps.append("No run was timed beside its dense host, so there is no curve of speed-ups.")
    if points and not any(point.run.dense for point in points):
        gaps.append(f"No dense run is among these, so there is no dense curve; {dense_command(points[0].run)}.")
    return plots, gaps


def _score_against(cost: dict[Point, float], points: Sequence[Point], label: str, metric: Metric, caption: str) -> Plot:
    """Points that have a cost, a line through those that differ in their target alone.

    Colours are by place among all `points`, so that a run has one in all figures.
    """
    dense = sorted((point for point in cost if point.run.dense), key=lambda point: cost[point])
    mixed = target_lines([point for point in points if not point.run.dense])
    num_lines = sum(any(point in cost for point in line) for _, line in mixed) + bool(dense)
    if any(len(line) > 1 for _, line in mixed):
        caption += " A coloured line joins runs that differ in the gate's target alone."
    figure = Figure(figsize=(WIDTH, 2.9 + 0.2 * num_lines), layout="constrained")
    axes = figure.subplots()
    if dense:
        name = "dense, at several input sizes" if len(dense) > 1 else "dense"
        line = [cost[point] for point in dense], [100 * point.score for point in dense]
        axes.plot(*line, "-o", color=INK, markersize=5, label=name)
    for point in dense:
        words = "" if point.run.img_size is None else f"{point.run.img_size} px"
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "left", "va": "top", "fontsize": 9}
        axes.annotate(words, (cost[point], 100 * point.score), (6, -4), **style)
    for index, (name, joined) in enumerate(mixed):
        if own := [point for point in joined if point in cost]:
            style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 8}
            path = [cost[point] for point in own], [100 * point.score for point in own]
            axes.plot(*path, label=_shorten(name), linewidth=1, **style)
    axes.set(xlabel=label, ylabel=f"{metric.name} (%)")
    axes.margins(0.14)
    axes.locator_params(axis="x", nbins=6)
    figure.legend(loc="outside lower left")
    return _plot(figure, caption)


@matplotlib.rc_context(STYLE)
def figures_of(run: Run) -> tuple[list[Plot], list[str]]:
    """Every figure that a run has values for, and a sentence for each that it should have and has not."""
    draw = [] if run.dense or not run.evaluation else [mask_statistics, token_histogram]
    draw += [class_bars] if draw and run.metric.task == "segment" else []
    found = [each(run) for each in (*draw, priors_over_training, training_curves)]
    return [plot for plot in found if isinstance(plot, Plot)], [gap for gap in found if isinstance(gap, str) and gap]


def mask_statistics(run: Run) -> Plot | str:
    """Mean and variance of the masks at every position."""
    mean, var, per = run.map("mask_mean"), run.map("mask_var"), run.metric.per
    if mean is None or var is None or mean.shape != var.shape:
        return "There is no mean and variance of the masks in the evaluation."
    return _maps(
        [("share fine", mean, 1.0), ("variance", var, 0.25)], 3.0,
        f"Masks by position, over the evaluated {per}s. Left: the share of {per}s in which a cell is fine. Right: its "
        f"variance, 0 where every {per} is treated alike and 0.25 where half of them are fine.",
    )  # fmt: skip


def priors_over_training(run: Run) -> Plot | str:
    """The learned priors, one map per step, at most four of them, first and last among them."""
    known = prior_maps(run)
    if not known:
        unknown = run.dense or ("metrics" in run.problems and not run.metrics)
        sentence = "This run learned no priors, so there are no maps of theta (only the generalized loss learns them)."
        return "" if unknown else sentence
    return _maps(
        [(title, theta, 1.0) for title, theta in known], 1.5 if len(known) > 2 else 2.4,
        "The learned prior theta of every position over training: the location the batch-shaping loss pulls a cell's "
        "fine probability to. Bright cells are expected to be fine in most images.", shared="theta",
    )  # fmt: skip


def prior_maps(run: Run) -> list[tuple[str, np.ndarray]]:
    """Titles and maps (hc, wc) of theta, by step, at most four: the first and the last, and some between them."""
    lines = sorted(run.of_kind("prior"), key=lambda line: line["step"])
    maps = [(line["step"], theta) for line in lines if (theta := cell_map(line.get("theta"))) is not None]
    chosen = np.unique(np.linspace(0, len(maps) - 1, min(MAX_MAPS, len(maps))).round().astype(int))
    return [("initial" if maps[i][0] == 0 else f"step {maps[i][0]:.0f}", maps[i][1]) for i in chosen]


def _maps(maps: Sequence[tuple[str, np.ndarray, float]], height: float, caption: str, shared: str = "") -> Plot:
    """Maps of cells (hc, wc) side by side, first row on top, with the title and highest value of each.

    A colour bar below each, or a `shared` one of that name for all.
    """
    figure = Figure(figsize=(WIDTH, height), layout="compressed")
    row = figure.subplots(1, len(maps), squeeze=False)[0]
    for axes, (title, values, top) in zip(row, maps, strict=True):
        rows, columns = (np.arange(side) for side in values.shape)
        mesh = axes.pcolormesh(columns, rows, values, vmin=0, vmax=top, edgecolors="face", linewidth=0.3)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        ticks = ([], []) if shared else (sorted({0, columns[-1]}), sorted({0, rows[-1]}))
        axes.set(title=title, aspect="equal", xticks=ticks[0], yticks=ticks[1])
        axes.invert_yaxis()
        if not shared or axes is row[0]:
            axes.set(xlabel="cell column", ylabel="cell row")
        if not shared:
            figure.colorbar(mesh, ax=axes, orientation="horizontal", ticks=[0, top], format="%g", aspect=12)
    if shared:
        figure.colorbar(mesh, ax=list(row), label=shared, ticks=[0, 0.5, 1], aspect=12)
    return _plot(figure, caption)


def token_histogram(run: Run) -> Plot | str:
    """How many images, or windows, took how many tokens."""
    edges, counts = (numbers(look_up(run.evaluation, ("tokens", "histogram", key))) for key in ("edges", "counts"))
    dense, per = run.number("tokens", "dense"), run.metric.per
    if not counts or len(edges) != len(counts) + 1:
        return "There is no histogram of tokens in the evaluation."
    caption = f"Tokens per {per}, over {sum(counts):.0f} {per}s: one bar per range of token counts."
    figure = Figure(figsize=(WIDTH, 2.5), layout="constrained")
    axes = figure.subplots()
    axes.stairs(counts, edges, fill=True, color=COLOURS[5], alpha=0.9)
    if dense is not None:
        caption += f" The dashed line is the dense host's {dense:.0f}."
        axes.axvline(dense, color=INK, linestyle="--", label="dense")
        axes.legend(loc="upper left", bbox_to_anchor=(0, 1.16), borderaxespad=0)
    axes.set(xlabel=f"tokens per {per}", ylabel=f"{per}s")
    return _plot(figure, caption)


def class_bars(run: Run) -> Plot | str:
    """The classes most and least often coarse (the paper's figure 5c), of those that occur."""
    coarse, frequency = (with_gaps(run.evaluation.get(key)) for key in ("class_coarse", "class_frequency"))
    known = []
    for index, (share, often) in enumerate(zip(coarse, frequency, strict=False)):
        if share is not None and often is not None:
            words = f"{100 * often:.3g}" if often >= RARE else f"under {100 * RARE:g}"
            known.append((share, f"{_shorten(name_of(index, run.classes), 20)}, {words} %"))
    if not known or len(coarse) != len(frequency):
        return "There are no shares of coarse pixels and frequencies of the classes in the evaluation."
    known.sort(key=lambda bar: -bar[0])
    most = known[: min(MAX_BARS, -(-len(known) // 2))]
    least = known[len(most) :][-MAX_BARS:]
    groups = [("most often coarse", most, COLOURS[1]), ("least often coarse", least, COLOURS[0])][: 2 if least else 1]
    heights = [len(bars) + 0.5 for _, bars, _ in groups]
    figure = Figure(figsize=(WIDTH, 0.7 + sum(0.24 * high + 0.23 for high in heights)), layout="constrained")
    panels = figure.subplots(len(groups), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, bars, colour) in zip(panels, groups, strict=True):
        drawn = axes.barh(range(len(bars)), [100 * share for share, _ in bars], color=colour, height=0.7)
        axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=9)
        axes.set_yticks(range(len(bars)), [label for _, label in bars])
        axes.set(title=title, ylim=(len(bars) - 0.4, -0.6), xlim=(0, 108), xticks=[0, 25, 50, 75, 100])
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
    panels[-1].set_xlabel("pixels in coarse cells (%)")
    return _plot(
        figure, f"Classes most and least often coarse, of {len(known)} that occur: the share of their pixels that lie "
        "in coarse cells. Beside each name stands how frequent the class is, as a share of all labelled pixels.",
    )  # fmt: skip


def training_curves(run: Run) -> Plot | str:
    """Losses, top-1 or mIoU, and tokens over training."""
    train, evals, metric = run.of_kind("train"), run.of_kind("eval"), run.metric
    if not train and not evals:
        return "" if "metrics" in run.problems else "metrics.jsonl has no lines about the training yet."
    clock = "epoch" if all(finite(line.get("epoch")) is not None for line in [*train, *evals]) else "step"
    curves = [  # panel, lines, key, factor, label, colour, marker
        (0, train, "task", 1, "task loss", COLOURS[5], None),
        (0, train, "gate", 1, "gate loss", COLOURS[3], None),
        (1, train, "accuracy", 100, f"training, {metric.in_training}", COLOURS[1], None),
        (1, evals, metric.key, 100, f"evaluation, {metric.name}", INK, "o"),
        (2, train, "tokens", 1, "training", COLOURS[2], None),
        (2, evals, "tokens", 1, "evaluation", INK, "o"),
    ]
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    panels = figure.subplots(3, sharex=True)
    for panel, lines, key, factor, label, colour, marker in curves:
        dots = [(line[clock], factor * y) for line in lines if (y := finite(line.get(key))) is not None]
        dots = dots[:: -(-len(dots) // MAX_POINTS) or 1]
        if dots:
            mark = marker or ("." if len(dots) <= FEW_POINTS else None)  # a line through one point shows nothing
            panels[panel].plot(*zip(*dots, strict=True), color=colour, marker=mark, markersize=4, label=label)
    for axes, label in zip(panels, ("loss", "score (%)", f"tokens per {metric.per}"), strict=True):
        axes.set_ylabel(label)
        if axes.lines:
            axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    panels[-1].set_xlabel(f"training {clock}s")
    names = " and ".join(dict.fromkeys((metric.name, metric.in_training)))
    words = f"Over training, by {clock}: the losses, {names}, and tokens per {metric.per}; large dots: evaluations."
    return _plot(figure, words)


def _shorten(name: str, length: int = 38) -> str:
    name = name if len(name) <= length else name[: length - 3] + "..."
    return f" {name}" if name.startswith("_") else name  # matplotlib hides labels that begin so


def _plot(figure: Figure, caption: str) -> Plot:
    """Make of the SVG file an element that can stand in a page beside others of its kind."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    head, body = text.split(">", 1)
    viewbox = re.search(r'viewBox="[^"]*"', head)
    assert viewbox, head
    body = body.replace(INK, "currentColor")
    # Ids are known to the whole page: make them this figure's own.
    own = "f" + hashlib.sha256(body.encode(errors="replace")).hexdigest()[:8]
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", body)
    return Plot(f'<svg {viewbox[0]} role="img" aria-label="{escape(caption)}">{body}'.strip(), caption)
