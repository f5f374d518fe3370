"""Figures for a page: each a `Plot` with an SVG that takes the page's text colour, and a caption in words.

    plots, gaps = figures_of(run)                # masks, priors, training; a sentence for what is missing
    score_figure(make_points(runs, names), metric)      # several runs: top-1 or mIoU, cost
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

from msvit_lab.evaluation_files import Metric
from msvit_lab.runs import Run
from msvit_lab.viz.compare import Point, target_lines

INK = "#010203"  # stands for the page's own text colour
COLOURS = ["#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2"]  # for the colour-blind too (Okabe and Ito)
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
WIDTH = 4.6  # inches
MAX_POINTS = 300  # of a curve
FEW_POINTS = 30  # of a curve: each gets a dot
MAX_MAPS = 4
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
def score_figure(points: Sequence[Point], metric: Metric) -> Plot | str:
    """Top-1 or mIoU over multiply-adds: the dense runs as a curve, a line through runs that differ in their target
    alone. A sentence where no run has both."""
    if not points:
        return f"No run has both {metric.name} and GMACs, so there is no curve of them."
    caption = (
        f"The {metric.name} of each run against billions of multiply-adds per {metric.per}, gate included. "
        "Further up and to the left is better."
    )
    dense = sorted((point for point in points if point.run.dense), key=lambda point: point.gmacs)
    mixed = target_lines([point for point in points if not point.run.dense])
    if any(len(line) > 1 for _, line in mixed):
        caption += " A coloured line joins runs that differ in the gate's target alone."
    figure = Figure(figsize=(WIDTH, 2.9 + 0.2 * (len(mixed) + bool(dense))), layout="constrained")
    axes = figure.subplots()
    if dense:
        name = "dense, at several input sizes" if len(dense) > 1 else "dense"
        line = [point.gmacs for point in dense], [100 * point.score for point in dense]
        axes.plot(*line, "-o", color=INK, markersize=5, label=name)
    for point in dense:
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "left", "va": "top", "fontsize": 9}
        axes.annotate(f"{point.run.img_size} px", (point.gmacs, 100 * point.score), (6, -4), **style)
    for index, (name, own) in enumerate(mixed):
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 8}
        path = [point.gmacs for point in own], [100 * point.score for point in own]
        label = " " * name.startswith("_") + (name if len(name) <= 38 else name[:35] + "...")  # _: matplotlib hides it
        axes.plot(*path, label=label, linewidth=1, **style)
    axes.set(xlabel=f"GMACs per {metric.per}", ylabel=f"{metric.name} (%)")
    axes.margins(0.14)
    axes.locator_params(axis="x", nbins=6)
    figure.legend(loc="outside lower left")
    return _plot(figure, caption)


@matplotlib.rc_context(STYLE)
def figures_of(run: Run) -> tuple[list[Plot], list[str]]:
    """Every figure that a run has values for, and a sentence for each that it should have and has not."""
    draw = [] if run.dense or not run.evaluation else [mask_statistics]
    found = [each(run) for each in (*draw, priors_over_training, training_curves)]
    return [plot for plot in found if isinstance(plot, Plot)], [gap for gap in found if isinstance(gap, str) and gap]


def mask_statistics(run: Run) -> Plot:
    """Mean and variance of the masks at every position."""
    mean, var = (np.array(run.evaluation[key]) for key in ("mask_mean", "mask_var"))
    per = run.metric.per
    return _maps(
        [("share fine", mean, 1.0), ("variance", var, 0.25)], 3.0,
        f"Masks by position, over the evaluated {per}s. Left: the share of {per}s in which a cell is fine. Right: its "
        f"variance, 0 where every {per} is treated alike and 0.25 where half of them are fine.",
    )  # fmt: skip


def priors_over_training(run: Run) -> Plot | str:
    """The learned priors, one map per step, at most four of them, first and last among them."""
    maps = [(line["step"], np.array(line["theta"])) for line in run.of_kind("prior")]
    if not maps:
        unknown = run.dense or ("metrics" in run.problems and not run.metrics)
        sentence = "This run learned no priors, so there are no maps of theta (only the generalized loss learns them)."
        return "" if unknown else sentence
    chosen = np.unique(np.linspace(0, len(maps) - 1, min(MAX_MAPS, len(maps))).round().astype(int))
    titles = [f"step {step}" if step else "initial" for step, _ in maps]
    return _maps(
        [(titles[i], maps[i][1], 1.0) for i in chosen], 1.5 if len(chosen) > 2 else 2.4,
        "The learned prior theta of every position over training: the location the batch-shaping loss pulls a cell's "
        "fine probability to. Bright cells are expected to be fine in most images.", shared="theta",
    )  # fmt: skip


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


def training_curves(run: Run) -> Plot | str:
    """Losses, top-1 or mIoU, and tokens over training."""
    train, evals, metric = run.of_kind("train"), run.of_kind("eval"), run.metric
    if not train and not evals:
        return "" if "metrics" in run.problems else "metrics.jsonl has no lines about the training yet."
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
        dots = [(line["epoch"], factor * y) for line in lines if math.isfinite(y := line.get(key, math.nan))]
        dots = dots[:: -(-len(dots) // MAX_POINTS) or 1]
        if dots:
            mark = marker or ("." if len(dots) <= FEW_POINTS else None)  # a line through one point shows nothing
            panels[panel].plot(*zip(*dots, strict=True), color=colour, marker=mark, markersize=4, label=label)
    for axes, label in zip(panels, ("loss", "score (%)", f"tokens per {metric.per}"), strict=True):
        axes.set_ylabel(label)
        if axes.lines:
            axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    panels[-1].set_xlabel("training epochs")
    names = " and ".join(dict.fromkeys((metric.name, metric.in_training)))
    words = f"Over training, by epoch: the losses, {names}, and tokens per {metric.per}; large dots: evaluations."
    return _plot(figure, words)


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
