"""One page that shows what came of some runs: opens anywhere, needs no network.

    write_report([Path("runs/dense-64"), Path("runs/gbas")], Path("report.html"))

Accuracy, tokens, GMACs and time of every run, the dense curve beside them, where the masks are fine, and images with
their masks in the order they came. What a run lacks is said in its place.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import msvit
from msvit.atomic import replacing
from msvit.viz import figures, page
from msvit.viz.compare import NONE, Setting, answer, as_point, common_setting, fastest, percent, short
from msvit.viz.overlay import image_bytes, overlay
from msvit.viz.page import Html
from msvit.viz.runs import Run, cell_map, finite, look_up, numbers, read_runs

MAX_IMAGES = 24  # shown of a run
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
    how = common_setting(runs)
    pieces = [
        page.section("Runs", summary(runs, how)),
        page.section("Accuracy and cost", cost_figures(runs, how)),
        *(about_run(run, f"run-{index}") for index, run in enumerate(runs)),
    ]
    names = ", ".join(run.name for run in runs)
    title = f"msvit report: {names}" if len(runs) == 1 else f"msvit report: {len(runs)} runs"
    return page.page(title, answer(runs), page.join(pieces), f"Written by msvit {msvit.__version__} from {names}.")


def summary(runs: Sequence[Run], how: Setting | None) -> Html:
    head = ["run", "gate", "input px", "top-1", "top-5", "tokens", "GMACs", "of dense", "images/s"]
    on_object = any(run.number("fine_on_object") is not None for run in runs)
    head += ["fine on object", "fine on ground"] if on_object else []
    rows = []
    for index, run in enumerate(runs):
        row = fastest(run, how) if how else None
        cells = [page.link(run.name, f"run-{index}"), gate_of(run), str(run.img_size or NONE)]
        cells += [percent(run.number("top1")), percent(run.number("top5"))]
        cells += [tokens_of(run), short(run.number("gmacs", "mean")), percent(run.share, 0)]
        cells += [f"{row['images_per_second']:,.0f} ({row.get('what', '?')})" if row else NONE]
        cells += [percent(run.number(f"fine_on_{what}")) for what in ("object", "ground")] if on_object else []
        rows.append(cells)
    note = "Tokens: mean ± standard deviation over images, of what the dense host takes. "
    note += f"Speed: {', '.join(how)}; each run at its fastest." if how else "No run has a measured speed."
    if on_object:
        note += " Fine on object, on ground: the share of cells that are fine on the objects and beside them."
    hint = page.paragraph("The table goes on to the right.", "soft narrow")
    return page.join([page.table(head, rows, "All runs", "summary"), hint, page.paragraph(note, "soft")])


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


def cost_figures(runs: Sequence[Run], how: Setting | None) -> Html:
    points = [point for run in runs if (point := as_point(run, how))]
    pieces, gaps = [], []
    if any(point.gmacs is not None for point in points):
        pieces.append(page.figure(figures.accuracy_against_gmacs(points)))
    else:
        gaps.append(page.missing("No run has both an accuracy and GMACs, so there is no curve of accuracy and GMACs."))
    if how and any(point.images_per_second is not None for point in points):
        pieces.append(page.figure(figures.accuracy_against_time(points, ", ".join(how))))
    else:
        gaps.append(page.missing("No run has both an accuracy and a measured speed, so there is no curve of them."))
    if points and not any(point.dense for point in points):
        gaps.append(page.missing("No dense run is among these, so there is no dense curve."))
    return page.join([page.plots(pieces), *gaps])


def about_run(run: Run, anchor: str) -> Html:
    gaps = [page.missing(run.problems[name]) for name in ("eval.json", "metrics.jsonl") if name in run.problems]
    pieces: list[Html] = []
    for draw in (mask_figure, histogram_figure, prior_figure, training_figure):
        piece = draw(run)
        if isinstance(piece, figures.Plot):
            pieces.append(page.figure(piece))
        elif piece:
            gaps.append(page.missing(piece))
    settings = json.dumps(run.about.get("config"), indent=2, ensure_ascii=False)
    body = [page.paragraph(headline(run)), *gaps, page.plots(pieces, "flow"), images(run), times(run)]
    body += [page.details("Configuration", page.preformatted(settings)), versions(run)]
    return page.section(run.name, page.join(body), anchor)


def headline(run: Run) -> str:
    parts = [f"Recipe {run.about.get('recipe', '?')}", f"gate {gate_of(run)}"]
    if (top1 := run.number("top1")) is not None:
        parts.append(f"{percent(top1)} top-1 on {short(run.number('num_images'))} images")
    if (fine := run.number("fine_share")) is not None and not run.dense:
        parts.append(f"{percent(fine)} of cells fine")
    return ", ".join(parts) + "."


def mask_figure(run: Run) -> figures.Plot | str:
    mean, var = run.map("mask_mean"), run.map("mask_var")
    if run.dense or not run.evaluation:
        return ""
    if mean is None or var is None or mean.shape != var.shape:
        return "There is no mean and variance of the masks in eval.json."
    return figures.mask_statistics(mean, var)


def histogram_figure(run: Run) -> figures.Plot | str:
    edges, counts = (numbers(look_up(run.evaluation, ("tokens", "histogram", key))) for key in ("edges", "counts"))
    if run.dense or not run.evaluation:
        return ""
    if not counts or len(edges) != len(counts) + 1:
        return "There is no histogram of tokens in eval.json."
    dense = run.number("tokens", "dense")
    return figures.token_histogram(edges, counts, None if dense is None else int(dense))


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
        return figures.training_curves(train, evals)
    return "" if "metrics.jsonl" in run.problems else "metrics.jsonl has no lines about the training yet."


def images(run: Run) -> Html:
    if (samples := run.samples) is None:
        return page.missing(run.problems["samples.safetensors"])
    shown, k = min(MAX_IMAGES, len(samples.images)), samples.coarse // samples.fine
    scale = max(1, -(-SIDE // max(samples.images.shape[1:3])))
    photos, num_right = [], 0
    for image, mask, label, prediction in zip(
        samples.images[:shown], samples.masks, samples.labels, samples.predictions, strict=False
    ):
        try:
            picture = overlay(image, mask, samples.coarse, samples.fine, scale)
        except ValueError as error:
            return page.missing(f"The images cannot be shown with their masks: {error}.")
        right = "right" if label == prediction else "wrong"
        num_right += int(label == prediction)
        tokens = mask.size + (k * k - 1) * int(mask.sum())
        name, guess = samples.class_name(int(label)), samples.class_name(int(prediction))
        words = f"label <b>{page.text(name)}</b><br>predicted {page.text(guess)}: <b>{right}</b><br>{tokens} tokens"
        alt = f"{name}, {right}; {int(mask.sum())} fine cells"
        photos.append(page.photo(image_bytes(picture, "WEBP"), alt, Html(words)))
    title = f"Images and masks: {num_right} of {shown} right"
    note = (
        f"The first {shown} of {len(samples.images)} kept, in the order they came, none chosen. Fine cells keep their "
        f"colours and show their {k} x {k} patches; coarse cells are veiled. Tokens are counted without prefix tokens."
    )
    return page.details(title, page.join([page.paragraph(note, "soft"), page.gallery(photos)]), is_open=not run.dense)


def times(run: Run) -> Html:
    if not run.times:
        return page.missing("No time was measured for this run.") if run.evaluation else Html("")
    head = ["what", "device", "precision", "batch", "ms per image", "quartiles", "images/s"]
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
