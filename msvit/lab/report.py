"""One page that shows what came of some runs: opens anywhere, needs no network.

    write_report([Path("runs/dense-64"), Path("runs/gbas")], Path("report.html"))

First the result in one sentence and images with their tokens; then top-1 or mIoU, tokens, GMACs and speed-up of every
run, the dense curve beside them, where the masks are fine, and more images; for segmentation also predictions and
ground truth, and which classes are coarse. Runs of different tasks are in different tables and curves. What a run lacks
is said in its place. Speeds are compared within one evaluation only, which times a run and its dense host in turn.
"""

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

import msvit
from msvit.atomic import replacing
from msvit.lab.runs import OWN, Metric, Run, Samples, cell_map, finite, look_up, name_of, numbers, read_runs, with_gaps
from msvit.lab.viz import figures, page
from msvit.lab.viz.compare import (
    NONE,
    Result,
    Setting,
    as_point,
    by_metric,
    common_setting,
    labels,
    percent,
    record,
    reducer_label,
    result,
    share_words,
    short,
)
from msvit.lab.viz.label_map import css_colour, label_picture
from msvit.lab.viz.overlay import image_bytes, overlay
from msvit.lab.viz.page import Html
from msvit.types import IGNORE

MAX_IMAGES = 24  # shown of a run
MAX_ROWS = 12  # of a run with label maps: four pictures each
MAX_SHOWN = 6  # at the top of the page
SIDE = 256  # px at least, of a shown image
LOSSES = {  # of gates, in a few words
    "gbas": "generalized batch-shaping, which learns for every place how often it should be fine",
    "bas": "batch-shaping, which wants the same share of fine cells in every place",
    "bas-flat": "batch-shaping of all cells at once",
    "l0": "a penalty on every fine cell above the target",
    "edges": "cells with borders of labelled areas shall be fine",
    "attention": "cells that a dense model looks at shall be fine",
}


def write_report(runs: list[Path], out: Path) -> Path:
    """Read run folders, write one HTML file. The file is replaced whole or not at all."""
    if not runs:
        raise ValueError("there are 0 runs to report on; pass at least one run folder")
    if Path(out).is_dir():
        raise ValueError(f"{out} is a folder, but the report is one file; pass for example {Path(out) / 'report.html'}")
    html, out = render(read_runs(runs)), Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as part:
        part.write_text(html, encoding="utf-8")
    return out


def render(runs: Sequence[Run]) -> str:
    groups, pieces, lead = by_metric(runs), [], []
    names = labels(runs)
    anchors = {run: f"run-{index}" for index, run in enumerate(runs)}
    for metric, group in groups.items():
        how, found = common_setting(group), result(group)
        title = "Runs" if len(groups) == 1 else f"Runs that {metric.task}"
        lead += [page.answer([found.sentence, " ".join(found.notes)]), opening_picture(found)]
        links = {run: page.link(names[run], anchors[run]) for run in group}
        pieces.append(page.section(title, summary(group, metric, how, links)))
        pieces.append(page.section(f"Cost and {metric.name}", cost_figures(group, metric, how, names)))
    pieces += [about_run(run, names[run], anchors[run]) for run in runs]
    folders = ", ".join(run.name for run in runs)
    foot = f"Written by msvit {msvit.__version__} from {folders}."
    return page.page(page_title(runs, names), page.join(lead), page.join(pieces), foot)


def page_title(runs: Sequence[Run], names: dict[Run, str]) -> str:
    """Recipe and data, which a sweep has in common."""
    recipes = dict.fromkeys(str(run.about.get("recipe") or "?") for run in runs)
    sources = dict.fromkeys(str(run.setting("data", "source") or "?").rstrip("/").rpartition("/")[2] for run in runs)
    where = f"recipe {', '.join(recipes)}"
    where += f" on {', '.join(sources)}" if list(sources) not in (list(recipes), ["?"]) else ""
    what = names[runs[0]] if len(runs) == 1 else f"{len(runs)} runs"
    return f"Mixed-scale tokens, {where}: {what}"


def opening_picture(found: Result) -> Html:
    """Some images beside their tokens, and what the squares mean."""
    samples = None if found.run is None or found.run.dense else found.run.own_samples
    if samples is None:
        return Html("")
    k, scale = samples.coarse // samples.fine, enlargement(samples)
    dense = samples.masks[0].size * k * k
    pairs = []
    try:
        for image, mask in zip(samples.images[:MAX_SHOWN], samples.masks, strict=False):
            drawn = overlay(image, mask, samples.coarse, samples.fine, scale)
            plain = image.repeat(scale, 0).repeat(scale, 1)
            num = num_tokens(mask, samples)
            alt = f"the image, and its {num} tokens: {int(mask.sum())} of {mask.size} cells are fine"
            pairs.append(page.pair([image_bytes(plain, "WEBP"), image_bytes(drawn, "WEBP")], alt, num, dense))
    except ValueError:  # said where the run's images are shown
        return Html("")
    return page.opening(pairs, k, samples.cell_tokens)


def summary(runs: Sequence[Run], metric: Metric, how: Setting | None, links: dict[Run, Html]) -> Html:
    records = {run: record(run, runs, links[run], how) for run in runs}
    batches = sorted({row["batch"] for found in records.values() for row in found["speed_ups"]}, reverse=True)
    head = ["run", "input px", *(title for title, _ in metric.columns), "tokens", "GMACs", "of dense"]
    head += [f"{metric.per}s/s at batch {batch}" for batch in batches]
    on_object = any(found["fine_on_object"] is not None for found in records.values())
    head += ["fine on object", "fine on ground"] if on_object else []
    rows = []
    for run, found in records.items():
        speeds = {row["batch"]: row for row in found["speed_ups"]}
        cells = [links[run], str(run.img_size or NONE), *(percent(found[key]) for _, key in metric.columns)]
        cells += [tokens_of(run), short(found["gmacs"]), share_words(found)]
        cells += [speed_cell(speeds.get(batch)) for batch in batches]
        cells += [percent(found[f"fine_on_{what}"]) for what in ("object", "ground")] if on_object else []
        rows.append(cells)
    hint = page.paragraph("The table goes on to the right.", "soft narrow")
    table = page.table(head, rows, f"Runs with {metric.name}", "summary")
    words = page.words(table_words(runs, metric, how, on_object))
    return page.join([table, hint, words])


def speed_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return NONE
    return f"{row['speed_up']:.2f}x ({row['images_per_second']:,.0f}, dense {row['dense_images_per_second']:,.0f})"


def table_words(runs: Sequence[Run], metric: Metric, how: Setting | None, on_object: bool) -> list[tuple[str, str]]:
    """What the columns mean, one line each."""
    window = " Here of gate and encoder; the decoder comes on top." if metric.task == "segment" else ""
    words = [
        ("tokens", f"What the transformer gets of {an(metric.per)}: mean ± standard deviation, of the dense model's."),
        ("GMACs", f"Billions of multiply-adds per {metric.per}: the work, whatever the machine.{window}"),
        ("of dense", "GMACs as a share of those of the dense model at the same input; of a smaller dense model, as it "
         "says, of the largest one's."),
    ]  # fmt: skip
    if how:
        words.append((
            f"{metric.per}s/s", "How many times as fast as the dense model of the same input, which was timed beside "
            f"it, in turn, on the same {metric.per}s ({', '.join(how)}). Times of different runs were measured at "
            "different moments and are not compared; msvit bench --runs times runs side by side.",
        ))  # fmt: skip
    else:
        words.append(("speed", "Nothing was timed beside its dense model; msvit eval RUN does that."))
    if on_object:
        words.append(("fine on object, on ground", "Share of the cells that are fine, on the objects and beside them."))
    targets = [run.setting("gate", "target") for run in runs if not run.dense]
    if target := next(filter(None, targets), None):
        words.append((f"gate {target:g}", "A gate that learned to make about that share of the cells fine."))
    return words


def an(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def gate_words(run: Run) -> str:
    """The gate in words, and the loss it learned with."""
    loss, target = run.setting("gate", "loss"), finite(run.setting("gate", "target"))
    gate = str(run.setting("model", "gate") or "?")
    if gate not in ("learned", "context"):
        return "no gate" if gate == "none" else f"gate {gate}, which does not learn"
    words = f"gate {gate}" + ("" if target is None else f" with a target of {percent(target, 0)} fine cells")
    meaning = f" ({LOSSES[loss]})" if loss in LOSSES else ""
    return words + (f" and the loss {loss}{meaning}" if loss else "")


def tokens_of(run: Run) -> str:
    mean, std, dense = (run.number("tokens", key) for key in ("mean", "std", "dense"))
    spread = "" if std is None else f" ± {std:.1f}"
    return NONE if mean is None else f"{mean:.1f}{spread}" + ("" if dense is None else f" of {dense:.0f}")


def cost_figures(runs: Sequence[Run], metric: Metric, how: Setting | None, names: dict[Run, str]) -> Html:
    points = [point for run in runs if (point := as_point(run, runs, names[run], how))]
    pieces, gaps = [], []
    if any(point.gmacs is not None for point in points):
        pieces.append(page.figure(figures.accuracy_against_gmacs(points)))
    else:
        gaps.append(page.missing(f"No run has both {metric.name} and GMACs, so there is no curve of them."))
    if how and any(point.speed_up is not None and not point.dense for point in points):
        pieces.append(page.figure(figures.accuracy_against_speed_up(points, ", ".join(how))))
    elif any(not point.dense for point in points):
        gaps.append(page.missing("No run was timed beside its dense host, so there is no curve of speed-ups."))
    if points and not any(point.dense for point in points):
        gaps.append(page.missing("No dense run is among these, so there is no dense curve."))
    return page.join([page.plots(pieces), *gaps])


def about_run(run: Run, name: str, anchor: str) -> Html:
    gaps = [page.missing(run.problems[what]) for what in ("evaluation", "metrics") if what in run.problems]
    pieces: list[Html] = []
    for draw in (mask_figure, histogram_figure, class_figure, prior_figure, training_figure):
        piece = draw(run)
        if isinstance(piece, figures.Plot):
            pieces.append(page.figure(piece))
        elif piece:
            gaps.append(page.missing(piece))
    settings = json.dumps(run.about.get("config"), indent=2, ensure_ascii=False)
    body = [page.paragraph(headline(run)), *gaps, images(run), page.plots(pieces, "flow"), iou(run), times(run)]
    body += [others(run), page.details("Configuration", page.preformatted(settings)), versions(run)]
    return page.section(name, page.join(body), anchor)


def headline(run: Run) -> str:
    parts = [f"Folder {run.name}, recipe {run.about.get('recipe', '?')}", gate_words(run)]
    if reducer := reducer_label(run):
        parts.append(f"reducer {reducer}: fewer tokens from block to block")
    if run.score is not None:
        parts.append(f"{percent(run.score)} {run.metric.name} on {short(run.number('num_images'))} images")
    if (fine := run.number("fine_share")) is not None and not run.dense:
        parts.append(f"{percent(fine)} of cells fine")
    if (decoder := run.number("decoder_gmacs")) is not None:
        parts.append(f"{short(decoder)} GMACs per window of the decoder on top")
    return ", ".join(parts) + "."


def others(run: Run) -> Html:
    """Evaluations beside the run's own, such as on other data."""
    rows = []
    for name in run.evaluations:
        if name == OWN:
            continue
        try:
            found = run.evaluations[name]
        except ValueError as error:
            rows.append([name, str(error), NONE, NONE, NONE])
            continue
        tokens, gmacs = (short(finite(look_up(found, (key, "mean")))) for key in ("tokens", "gmacs"))
        score = percent(finite(found.get(run.metric.key)))
        rows.append([name, str(found.get("data", NONE)), score, tokens, gmacs])
    head = ["evaluation", "data", run.metric.name, "tokens", "GMACs"]
    if not rows:
        return Html("")
    return page.details("Other evaluations", page.table(head, rows, f"Other evaluations of {run.name}"))


def mask_figure(run: Run) -> figures.Plot | str:
    mean, var = run.map("mask_mean"), run.map("mask_var")
    if run.dense or not run.evaluation:
        return ""
    if mean is None or var is None or mean.shape != var.shape:
        return "There is no mean and variance of the masks in the evaluation."
    return figures.mask_statistics(mean, var, run.metric.per)


def histogram_figure(run: Run) -> figures.Plot | str:
    edges, counts = (numbers(look_up(run.evaluation, ("tokens", "histogram", key))) for key in ("edges", "counts"))
    if run.dense or not run.evaluation:
        return ""
    if not counts or len(edges) != len(counts) + 1:
        return "There is no histogram of tokens in the evaluation."
    dense = run.number("tokens", "dense")
    return figures.token_histogram(edges, counts, None if dense is None else int(dense), run.metric.per)


def class_figure(run: Run) -> figures.Plot | str:
    if run.dense or not run.evaluation or run.metric.task != "segment":
        return ""
    coarse, frequency = (with_gaps(run.evaluation.get(key)) for key in ("class_coarse", "class_frequency"))
    if len(coarse) != len(frequency) or not any(None not in pair for pair in zip(coarse, frequency, strict=True)):
        return "There are no shares of coarse pixels and frequencies of the classes in the evaluation."
    return figures.class_bars([name_of(index, run.classes) for index in range(len(coarse))], coarse, frequency)


def prior_figure(run: Run) -> figures.Plot | str:
    maps = [(int(line["step"]), cell_map(line.get("theta"))) for line in run.of_kind("prior")]
    known = [(step, theta) for step, theta in maps if theta is not None]
    if known:
        return figures.priors_over_training([step for step, _ in known], [theta for _, theta in known])
    if run.dense or ("metrics" in run.problems and not run.metrics):
        return ""
    return "This run learned no priors, so there are no maps of theta (only the generalized loss learns them)."


def training_figure(run: Run) -> figures.Plot | str:
    train, evals = run.of_kind("train"), run.of_kind("eval")
    if train or evals:
        return figures.training_curves(train, evals, run.metric)
    return "" if "metrics" in run.problems else "metrics.jsonl has no lines about the training yet."


def images(run: Run) -> Html:
    if (samples := run.own_samples) is None:
        return page.missing(run.problems["samples"])
    num, k = len(samples.images), samples.coarse // samples.fine
    shown = min(MAX_ROWS if samples.of_pixels else MAX_IMAGES, num)
    scale = enlargement(samples)
    try:
        show = label_map_rows if samples.of_pixels else labelled_photos
        title, gallery = show(samples, shown, scale)
    except ValueError as error:
        return page.missing(f"The images cannot be shown with their masks: {error}.")
    note = (
        f"The first {shown} of {num} kept, in the order they came, none chosen. Fine cells keep their "
        f"colours and show their {k} x {k} patches; coarse cells are veiled. Tokens are counted without prefix tokens."
    )
    note += " Each is an image's first window; hatched pixels are ignored." if samples.of_pixels else ""
    return page.details(title, page.join([page.paragraph(note, "soft"), gallery]), is_open=not run.dense)


def enlargement(samples: Samples) -> int:
    return max(1, -(-SIDE // max(samples.images.shape[1:3])))


def labelled_photos(samples: Samples, shown: int, scale: int) -> tuple[str, Html]:
    photos, num_right = [], 0
    for image, mask, label, prediction in zip(
        samples.images[:shown], samples.masks, samples.labels, samples.predictions, strict=False
    ):
        drawn = overlay(image, mask, samples.coarse, samples.fine, scale)
        right = "right" if label == prediction else "wrong"
        num_right += int(label == prediction)
        name, guess = samples.class_name(int(label)), samples.class_name(int(prediction))
        words = f"label <b>{page.text(name)}</b><br>predicted {page.text(guess)}: <b>{right}</b><br>"
        alt = f"{name}, {right}; {int(mask.sum())} fine cells"
        photos.append(page.photo(image_bytes(drawn, "WEBP"), alt, Html(f"{words}{num_tokens(mask, samples)} tokens")))
    return f"Images and masks: {num_right} of {shown} right", page.gallery(photos)


def label_map_rows(samples: Samples, shown: int, scale: int) -> tuple[str, Html]:
    """Image, mask, prediction and ground truth side by side, with a legend of the classes in them."""
    rows = []
    for image, mask, label, prediction in zip(
        samples.images[:shown], samples.masks, samples.labels, samples.predictions, strict=False
    ):
        drawn = overlay(image, mask, samples.coarse, samples.fine, scale)
        plain = image.repeat(scale, 0).repeat(scale, 1)
        pictures = [
            ("image", page.picture(image_bytes(plain, "WEBP"), "image")),
            ("mask", page.picture(image_bytes(drawn, "WEBP"), f"mask with {int(mask.sum())} fine cells")),
        ]
        for title, classes in (("prediction", prediction), ("ground truth", label)):
            names = ", ".join(legend_name(int(index), samples) for index in np.unique(classes))
            content = image_bytes(label_picture(classes, scale))  # exact: a colour is a class
            pictures.append((title, page.picture(content, f"{title}: {names}")))
        there = label != IGNORE
        right = percent(float((label == prediction)[there].mean()), 0) if there.any() else "none"
        words = f"<b>{num_tokens(mask, samples)} tokens</b>, {right} of {there.sum():,} labelled pixels right"
        found = np.union1d(label, prediction).tolist()
        legend = " ".join(page.swatch(legend_name(index, samples), css_colour(index)) for index in found)
        rows.append(page.row(pictures, Html(f"{words}<br>{legend}")))
    return f"Images, masks, predictions and ground truth: {shown} windows", page.rows(rows)


def legend_name(index: int, samples: Samples) -> str:
    return "ignored" if index == IGNORE else samples.class_name(index)


def num_tokens(mask: UInt8[np.ndarray, "hc wc"], samples: Samples) -> int:
    num_fine = int(mask.sum())
    return num_fine * (samples.coarse // samples.fine) ** 2 + (mask.size - num_fine) * samples.cell_tokens


def iou(run: Run) -> Html:
    if run.metric.task != "segment" or not run.evaluation:
        return Html("")
    keys = "iou", "class_frequency", "class_coarse"
    values, frequency, coarse = (with_gaps(run.evaluation.get(key)) for key in keys)
    if not values:
        return page.missing("There is no IoU of the classes in the evaluation.")
    rows = []
    for index, row in enumerate(zip_longest(values, frequency, coarse)):
        rows.append([name_of(index, run.classes), *(percent(number) for number in row)])
    head = ["class", "IoU", "of all labelled pixels", "of its pixels in coarse cells"]
    body = page.details("IoU by class", page.table(head, rows, f"IoU by class of {run.name}"))
    if not run.classes:
        body = page.join([page.missing("There are no names of classes in config.json, so they have numbers."), body])
    return body


def times(run: Run) -> Html:
    if not run.times:
        return page.missing("No time was measured for this run.") if run.evaluation else Html("")
    per = run.metric.per
    head = ["what", "device", "precision", "batch", f"ms per {per}", "quartiles", f"{per}s/s"]
    rows = []
    for row in run.times:
        cells = [str(row.get(key, NONE)) for key in ("what", "device", "dtype", "batch")]
        quartiles = " to ".join(map(short, numbers(row.get("quartiles")))) or NONE
        rows.append([*cells, short(finite(row.get("ms_per_image"))), quartiles, f"{row['images_per_second']:,.0f}"])
    when = look_up(run.evaluation, ("measured", "at"))
    words = [("dense host", "The transformer as it was, all patches at the fine scale.")]
    if not run.dense:
        words.append(("packed", "The mixed-scale model, gate included; only the tokens that it uses are computed."))
    note = f"Rows of one batch and precision were timed in turn{f', {when}' if when else ''}."
    table = page.table(head, rows, f"Measured time of {run.name}")
    body = page.join([table, page.paragraph(note, "soft"), page.words(words)])
    return page.details("Measured time", body)


def versions(run: Run) -> Html:
    rows = []
    for source, about in (("trained", run.about), ("evaluated", run.evaluation)):
        for key in ("versions", "machine"):
            value = about.get(key) or {}
            entries = value.items() if isinstance(value, dict) else [(key, value)]
            rows += [[f"{source}: {name}", str(entry)] for name, entry in entries]
    if not rows:
        return page.missing("No versions were recorded.")
    return page.details("Versions and machine", page.table(["part", "value"], rows, f"Versions of {run.name}", "facts"))
