"""One page that shows what came of some runs: opens anywhere, needs no network.

    write_report([Path("runs/dense-64"), Path("runs/gbas")], Path("report.html"))

First the result in one sentence and images with their tokens; then top-1 or mIoU, tokens, GMACs and speed-up of every
run, the dense curve beside them, where the masks are fine, and more images; for segmentation also predictions and
ground truth, and a table of classes. Runs of different tasks are in different tables and curves. A sentence
stands in place of what a run lacks. Speeds are compared within one evaluation, which times run and dense host in turn.

This module prepares values. Words and looks are in page.html, a Jinja2 template that escapes every value: a run folder
may come from anywhere.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

import msvit
from msvit.saving.file import replacing
from msvit.types import IGNORE
from msvit_lab.evaluation_files import Metric, Samples, name_of
from msvit_lab.runs import Run, read_runs
from msvit_lab.viz import compare
from msvit_lab.viz.figures import figures_of, score_figure
from msvit_lab.viz.pictures import css_colour, enlarge, image_bytes, label_picture, overlay

MAX_IMAGES = 24  # shown of a run
MAX_ROWS = 12  # of a run with label maps: four pictures each
MAX_OPENING = 6  # at the top of the page
SIDE = 256  # px at least, of a shown image


def write_report(runs: list[Path], out: Path) -> Path:
    """Read run folders, write one HTML file. The file is replaced whole or not at all."""
    if Path(out).is_dir():
        raise ValueError(f"{out} is a folder, but the report is one file; pass for example {Path(out) / 'report.html'}")
    html, out = render(read_runs(runs)), Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as part:
        part.write_text(html, encoding="utf-8", errors="replace")  # JSON may hold half a surrogate pair
    return out


@cache
def page_template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    words = (compare.percent, compare.short, compare.share_words, compare.interval_words)
    environment.filters |= {function.__name__: function for function in (*words, name_of, data_uri)}
    environment.globals |= {"NONE": compare.NONE, "zip": zip}
    return environment.get_template("page.html")


def render(runs: Sequence[Run]) -> str:
    names = compare.labels(runs)
    sections = {run: run_values(run, names[run], f"run-{index}") for index, run in enumerate(runs)}
    groups = [group_values(metric, group, sections) for metric, group in compare.by_metric(runs).items()]
    values = {"title": page_title(runs, names), "groups": groups, "sections": sections.values()}
    return page_template().render(values, version=msvit.__version__).lstrip()


def data_uri(picture: np.ndarray, kind: str = "WEBP") -> str:
    return f"data:image/{kind.lower()};base64,{b64encode(image_bytes(picture, kind)).decode()}"


def page_title(runs: Sequence[Run], names: dict[Run, str]) -> str:
    """Recipe and data, which a sweep has in common."""
    recipes = dict.fromkeys(run.about["recipe"] or "?" for run in runs)
    sources = dict.fromkeys(run.config.data.source.rstrip("/").rpartition("/")[2] for run in runs)
    where = f"recipe {', '.join(recipes)}"
    where += f" on {', '.join(sources)}" if list(sources) != list(recipes) else ""
    what = names[runs[0]] if len(runs) == 1 else f"{len(runs)} runs"
    return f"Mixed-scale tokens, {where}: {what}"


def group_values(metric: Metric, runs: Sequence[Run], sections: dict[Run, dict[str, Any]]) -> dict[str, Any]:
    """Runs of one task: result, table, curves."""
    how, found = compare.common_setting(runs), compare.result(runs)
    names = {run: sections[run]["name"] for run in runs}
    records = [compare.record(run, runs, names[run], how) | {"anchor": sections[run]["anchor"]} for run in runs]
    plot = score_figure(compare.make_points(runs, names), metric)
    return {
        "metric": metric, "how": how, "result": found, "records": records, "plot": plot,
        "batches": sorted({row["batch"] for each in records for row in each["speed_ups"]}, reverse=True),
        "on_object": any(each["fine_on_object"] is not None for each in records),
        "target": next((run.config.gate.target for run in runs if not run.dense), None),
        "images": None if found.run is None or found.run.dense else sections[found.run]["images"],
    }  # fmt: skip


def run_values(run: Run, name: str, anchor: str) -> dict[str, Any]:
    """All that is shown of one run."""
    gaps = [run.problems[what] for what in ("evaluation", "metrics") if what in run.problems]
    plots, missing = figures_of(run)
    samples, images, no_images = run.own_samples, None, run.problems.get("samples")
    try:
        images = None if samples is None else image_values(samples)
    except ValueError as error:
        no_images = f"The images cannot be shown with their masks: {error}."
    return {
        "run": run, "name": name, "anchor": anchor, "gaps": gaps + missing, "plots": plots, "images": images,
        "no_images": no_images,
        "settings": json.dumps(asdict(run.config), indent=2, ensure_ascii=False),
    }  # fmt: skip


def image_values(samples: Samples) -> dict[str, Any]:
    """The first images of an evaluation, enlarged, with their tokens, labels and predictions."""
    size, cells = samples.images.shape[1:3], samples.masks.shape[1:]
    if (cells[0] * samples.coarse, cells[1] * samples.coarse) != size:
        raise ValueError(f"masks are {cells} cells of {samples.coarse}px, but images are {size[0]}x{size[1]}px")
    k, scale = samples.coarse // samples.fine, max(1, -(-SIDE // max(size)))
    num = min(len(samples.images), MAX_ROWS if samples.of_pixels else MAX_IMAGES)
    shown = []
    for image, mask, label, prediction in zip(
        samples.images[:num], samples.masks, samples.labels, samples.predictions, strict=False
    ):
        large, num_fine = enlarge(image, scale), int(mask.sum())
        num_tokens = num_fine * k**2 + (mask.size - num_fine) * samples.cell_tokens
        values = {"image": large, "overlay": overlay(large, mask, k), "num_fine": num_fine, "num_tokens": num_tokens}
        if samples.of_pixels:
            values |= label_maps(label, prediction, samples, scale)
        else:
            names = (name_of(int(index), samples.classes) for index in (label, prediction))
            values |= {**dict(zip(("label", "prediction"), names, strict=True)), "right": label == prediction}
        shown.append(values)
    middle = np.median([each["num_tokens"] for each in shown])
    typical = np.argsort([abs(each["num_tokens"] - middle) for each in shown], kind="stable")[:MAX_OPENING]
    return {
        "shown": shown, "opening": [shown[index] for index in sorted(typical)], "num": len(samples.images),
        "of_pixels": samples.of_pixels, "k": k, "num_cells": cells[0] * cells[1], "cell_tokens": samples.cell_tokens,
    }  # fmt: skip


def label_maps(label: np.ndarray, prediction: np.ndarray, samples: Samples, scale: int) -> dict[str, Any]:
    """Ground truth and prediction as pictures, with the classes in them."""
    found = np.union1d(label, prediction).tolist()
    names = {index: "ignored" if index == IGNORE else name_of(index, samples.classes) for index in found}
    labelled = label != IGNORE
    return {
        "maps": [
            (title, label_picture(enlarge(classes, scale)), [names[index] for index in np.unique(classes).tolist()])
            for title, classes in (("prediction", prediction), ("ground truth", label))
        ],
        "right": float((label == prediction)[labelled].mean()) if labelled.any() else None,
        "num_labelled": int(labelled.sum()),
        "legend": [(name, css_colour(index)) for index, name in names.items()],
    }
