"""One page that shows what came of some runs: opens anywhere, needs no network.

    write_report([Path("runs/dense-64"), Path("runs/gbas")], Path("report.html"))

Top-1 or mIoU, tokens, GMACs and time of every run, the dense curve beside them, where the masks are fine, and images
with their masks in the order they came; for segmentation also predictions and ground truth, and which classes are
coarse. Runs of different tasks stand in different tables and curves. What a run lacks is said in its place.
"""

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

import msvit
from msvit.atomic import replacing
from msvit.data.dense import IGNORE
from msvit.viz import figures, page
from msvit.viz.compare import NONE, Setting, answer, as_point, by_metric, common_setting, fastest, percent, short
from msvit.viz.label_map import css_colour, label_picture
from msvit.viz.overlay import image_bytes, overlay
from msvit.viz.page import Html
from msvit.viz.runs import Metric, Run, Samples, cell_map, finite, look_up, name_of, numbers, read_runs, with_gaps

MAX_IMAGES = 24  # shown of a run
MAX_ROWS = 12  # of a run with label maps: four pictures each
SIDE = 256  # px at least, of a shown image


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
    groups, pieces = by_metric(runs), []
    anchors = {run.name: f"run-{index}" for index, run in enumerate(runs)}
    for metric, group in groups.items():
        how = common_setting(group)
        title = "Runs" if len(groups) == 1 else f"Runs that {metric.task}"
        pieces.append(page.section(title, summary(group, metric, how, anchors)))
        pieces.append(page.section(f"Cost and {metric.name}", cost_figures(group, metric, how)))
    pieces += [about_run(run, anchors[run.name]) for run in runs]
    lead = page.join([page.answer(answer(group)) for group in groups.values()])
    names = ", ".join(run.name for run in runs)
    title = f"msvit report: {names}" if len(runs) == 1 else f"msvit report: {len(runs)} runs"
    return page.page(title, lead, page.join(pieces), f"Written by msvit {msvit.__version__} from {names}.")


def summary(runs: Sequence[Run], metric: Metric, how: Setting | None, anchors: dict[str, str]) -> Html:
    head = ["run", "gate", "input px", *(title for title, _ in metric.columns)]
    head += ["tokens", "GMACs", "of dense", f"{metric.per}s/s"]
    on_object = any(run.number("fine_on_object") is not None for run in runs)
    head += ["fine on object", "fine on ground"] if on_object else []
    rows = []
    for run in runs:
        row = fastest(run, how) if how else None
        cells = [page.link(run.name, anchors[run.name]), gate_of(run), str(run.img_size or NONE)]
        cells += [percent(run.number(key)) for _, key in metric.columns]
        cells += [tokens_of(run), short(run.number("gmacs", "mean")), percent(run.share, 0)]
        cells += [f"{row['images_per_second']:,.0f} ({row.get('what', '?')})" if row else NONE]
        cells += [percent(run.number(f"fine_on_{what}")) for what in ("object", "ground")] if on_object else []
        rows.append(cells)
    note = f"Tokens: mean ± standard deviation over {metric.per}s, of what the dense host takes. "
    if metric.task == "segment":
        note += "Tokens, GMACs and speed are those of a window, of gate and encoder; the decoder comes on top. "
    note += f"Speed: {', '.join(how)}; each run at its fastest." if how else "No run has a measured speed."
    if on_object:
        note += " Fine on object, on ground: the share of cells that are fine on the objects and beside them."
    hint = page.paragraph("The table goes on to the right.", "soft narrow")
    table = page.table(head, rows, f"Runs with {metric.name}", "summary")
    return page.join([table, hint, page.paragraph(note, "soft")])


def gate_of(run: Run) -> str:
    if run.dense:
        return "none (dense)"
    loss, target = run.setting("gate", "loss"), run.setting("gate", "target")
    more = [str(loss)] if loss else []
    more += [f"target {target}"] if target is not None else []
    name = str(run.setting("model", "gate") or "?")
    name = f"{name} ({', '.join(more)})" if more and name == "learned" else name
    reducer = look_up(run.evaluation, ("reducer",))
    return f"{name}, {reducer}" if reducer else name


def tokens_of(run: Run) -> str:
    mean, std, dense = (run.number("tokens", key) for key in ("mean", "std", "dense"))
    spread = "" if std is None else f" ± {std:.1f}"
    return NONE if mean is None else f"{mean:.1f}{spread}" + ("" if dense is None else f" of {dense:.0f}")


def cost_figures(runs: Sequence[Run], metric: Metric, how: Setting | None) -> Html:
    points = [point for run in runs if (point := as_point(run, how))]
    pieces, gaps = [], []
    if any(point.gmacs is not None for point in points):
        pieces.append(page.figure(figures.accuracy_against_gmacs(points)))
    else:
        gaps.append(page.missing(f"No run has both {metric.name} and GMACs, so there is no curve of them."))
    if how and any(point.images_per_second is not None for point in points):
        pieces.append(page.figure(figures.accuracy_against_time(points, ", ".join(how))))
    else:
        gaps.append(page.missing(f"No run has both {metric.name} and a measured speed, so there is no curve of them."))
    if points and not any(point.dense for point in points):
        gaps.append(page.missing("No dense run is among these, so there is no dense curve."))
    return page.join([page.plots(pieces), *gaps])


def about_run(run: Run, anchor: str) -> Html:
    gaps = [page.missing(run.problems[name]) for name in ("eval.json", "metrics.jsonl") if name in run.problems]
    pieces: list[Html] = []
    for draw in (mask_figure, histogram_figure, class_figure, prior_figure, training_figure):
        piece = draw(run)
        if isinstance(piece, figures.Plot):
            pieces.append(page.figure(piece))
        elif piece:
            gaps.append(page.missing(piece))
    settings = json.dumps(run.about.get("config"), indent=2, ensure_ascii=False)
    body = [page.paragraph(headline(run)), *gaps, page.plots(pieces, "flow"), images(run), iou(run), times(run)]
    body += [page.details("Configuration", page.preformatted(settings)), versions(run)]
    return page.section(run.name, page.join(body), anchor)


def headline(run: Run) -> str:
    parts = [f"Recipe {run.about.get('recipe', '?')}", f"gate {gate_of(run)}"]
    if run.score is not None:
        parts.append(f"{percent(run.score)} {run.metric.name} on {short(run.number('num_images'))} images")
    scales = numbers(run.evaluation.get("scales"))
    parts += [f"each at scales {', '.join(map(short, scales))}"] if scales not in ([], [1.0]) else []
    parts += ["each also flipped"] if run.evaluation.get("flip") is True else []
    if (fine := run.number("fine_share")) is not None and not run.dense:
        parts.append(f"{percent(fine)} of cells fine")
    if (decoder := run.number("decoder_gmacs")) is not None:
        parts.append(f"{short(decoder)} GMACs per window of the decoder on top")
    return ", ".join(parts) + "."


def mask_figure(run: Run) -> figures.Plot | str:
    mean, var = run.map("mask_mean"), run.map("mask_var")
    if run.dense or not run.evaluation:
        return ""
    if mean is None or var is None or mean.shape != var.shape:
        return "There is no mean and variance of the masks in eval.json."
    return figures.mask_statistics(mean, var, run.metric.per)


def histogram_figure(run: Run) -> figures.Plot | str:
    edges, counts = (numbers(look_up(run.evaluation, ("tokens", "histogram", key))) for key in ("edges", "counts"))
    if run.dense or not run.evaluation:
        return ""
    if not counts or len(edges) != len(counts) + 1:
        return "There is no histogram of tokens in eval.json."
    dense = run.number("tokens", "dense")
    return figures.token_histogram(edges, counts, None if dense is None else int(dense), run.metric.per)


def class_figure(run: Run) -> figures.Plot | str:
    if run.dense or not run.evaluation or run.metric.task != "segment":
        return ""
    coarse, frequency = (with_gaps(run.evaluation.get(key)) for key in ("class_coarse", "class_frequency"))
    if len(coarse) != len(frequency) or not any(None not in pair for pair in zip(coarse, frequency, strict=True)):
        return "There are no shares of coarse pixels and frequencies of the classes in eval.json."
    return figures.class_bars([name_of(index, run.classes) for index in range(len(coarse))], coarse, frequency)


def prior_figure(run: Run) -> figures.Plot | str:
    maps = [(int(line["step"]), cell_map(line.get("theta"))) for line in run.of_kind("prior")]
    known = [(step, theta) for step, theta in maps if theta is not None]
    if known:
        return figures.priors_over_training([step for step, _ in known], [theta for _, theta in known])
    if run.dense or ("metrics.jsonl" in run.problems and not run.metrics):
        return ""
    return "This run learned no priors, so there are no maps of theta (only the generalized loss learns them)."


def training_figure(run: Run) -> figures.Plot | str:
    train, evals = run.of_kind("train"), run.of_kind("eval")
    if train or evals:
        return figures.training_curves(train, evals, run.metric)
    return "" if "metrics.jsonl" in run.problems else "metrics.jsonl has no lines about the training yet."


def images(run: Run) -> Html:
    if (samples := run.samples) is None:
        return page.missing(run.problems["samples.safetensors"])
    num, k = len(samples.images), samples.coarse // samples.fine
    shown = min(MAX_ROWS if samples.of_pixels else MAX_IMAGES, num)
    scale = max(1, -(-SIDE // max(samples.images.shape[1:3])))
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
        return page.missing("There is no IoU of the classes in eval.json.")
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
    return page.details("Measured time", page.table(head, rows, f"Measured time of {run.name}"))


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
