"""Run folders, read back: what training and evaluation left behind.

    run = read_run("runs/gbas")
    run.metric.name, run.score         # "top-1", or "mIoU" for segmentation, and its value or None
    run.number("gmacs", "mean")        # from eval.json, or None
    run.of_kind("prior")               # lines of metrics.jsonl
    run.problems                       # {"samples.safetensors": "There is no ..."}: what is missing, in sentences
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from msvit.types import check_scales

FORMAT = 1
CONTENTS = "config.json (always), metrics.jsonl, eval.json and samples.safetensors (once trained and evaluated)"


@dataclass(frozen=True)
class Metric:
    """What a task's runs are judged by, and what their numbers are called."""

    task: str
    key: str  # in eval.json and metrics.jsonl
    name: str
    in_training: str  # what "accuracy" of a training line is
    per: str  # what tokens, multiply-adds and time are counted for
    columns: tuple[tuple[str, str], ...]  # of a table: title, key in eval.json


METRICS = {
    "classify": Metric("classify", "top1", "top-1", "top-1", "image", (("top-1", "top1"), ("top-5", "top5"))),
    "segment": Metric(
        "segment", "miou", "mIoU", "pixel accuracy", "window",
        (("mIoU", "miou"), ("pixel accuracy", "pixel_accuracy"), ("mean class accuracy", "class_accuracy")),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Samples:
    """Images of an evaluation, in the order they came, with what was decided and what was answered.

    A label is that of the image, or for segmentation one of each pixel, where 255 is ignored.
    """

    images: UInt8[np.ndarray, "n h w 3"]
    masks: UInt8[np.ndarray, "n hc wc"]  # 1 = fine
    labels: Int64[np.ndarray, "n *pixels"]
    predictions: Int64[np.ndarray, "n *pixels"]
    classes: list[str]
    coarse: int
    fine: int
    cell_tokens: int = 1  # of a coarse cell

    @property
    def of_pixels(self) -> bool:
        return self.labels.ndim > 1

    def class_name(self, index: int) -> str:
        return name_of(index, self.classes)


@dataclass(frozen=True)
class Run:
    """One run. What a file lacks is None or empty here, and a sentence in `problems` says so."""

    name: str
    about: dict[str, Any]  # config.json: recipe, config, classes, versions, machine
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    samples: Samples | None = None
    problems: dict[str, str] = field(default_factory=dict)  # file -> sentence

    @property
    def metric(self) -> Metric:
        """That of its task, as evaluation says; before that, as the configuration says. Old runs classify."""
        return METRICS.get(str(self.evaluation.get("task", self.setting("task"))), METRICS["classify"])

    @property
    def score(self) -> float | None:
        """The value of its metric, 0..1."""
        return self.number(self.metric.key)

    @property
    def classes(self) -> list[str]:
        names = self.about.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []

    @property
    def dense(self) -> bool:
        """A host without a gate, as evaluation says; before that, as the configuration says."""
        return bool(self.evaluation.get("dense", self.setting("model", "gate") in (None, "none")))

    @property
    def img_size(self) -> int | None:
        size = self.evaluation.get("img_size") or self.setting("data", "img_size")
        return size if isinstance(size, int) else None

    @property
    def share(self) -> float | None:
        """GMACs of a mean image over those of the dense host."""
        mean, dense = self.number("gmacs", "mean"), self.number("gmacs", "dense")
        return mean / dense if mean is not None and dense else None

    @property
    def times(self) -> list[dict[str, Any]]:
        """Rows of measured time that tell a speed."""
        rows = self.evaluation.get("latency")
        rows = rows if isinstance(rows, list) else []
        return [row for row in rows if isinstance(row, dict) and finite(row.get("images_per_second")) is not None]

    def setting(self, *keys: str) -> Any:
        """A value of the configuration, or None."""
        return look_up(self.about.get("config"), keys)

    def number(self, *keys: str) -> float | None:
        """A finite number of eval.json, or None."""
        return finite(look_up(self.evaluation, keys))

    def map(self, key: str) -> Float64[np.ndarray, "hc wc"] | None:
        """One number per cell from eval.json, or None."""
        return cell_map(self.evaluation.get(key))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line.get("kind") == kind and finite(line.get("step")) is not None]


def look_up(value: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def finite(value: Any) -> float | None:
    """A number as a float; None for anything else, infinities included."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def name_of(index: int, classes: Sequence[str]) -> str:
    return classes[index] if 0 <= index < len(classes) else f"class {index}"


def with_gaps(value: Any) -> list[float | None]:
    """A list of finite numbers, None where there is none; empty for anything else."""
    return [finite(item) for item in value] if isinstance(value, list) else []


def numbers(value: Any) -> list[float]:
    """A list of finite numbers as floats; empty for anything else."""
    known = with_gaps(value)
    return [] if None in known else [item for item in known if item is not None]


def cell_map(value: Any) -> Float64[np.ndarray, "hc wc"] | None:
    """Nested lists of finite numbers as an array; None for anything else."""
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return array if array.ndim == 2 and array.size and np.isfinite(array).all() else None


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read several runs; those with the same folder name get as much of the path as tells them apart."""
    runs = {Path(folder).resolve(): read_run(folder) for folder in folders}  # the same folder twice is one run
    depth = 1
    while len({path.parts[-depth:] for path in runs}) < len(runs):
        depth += 1
    return [replace(run, name="/".join(path.parts[-depth:])) for path, run in runs.items()]


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read one run. Without a config.json it is none; any other file may be missing or cut."""
    folder = Path(folder)
    problems: dict[str, str] = {}
    about = _read_about(folder)
    metrics = _read_metrics(folder / "metrics.jsonl", problems)
    evaluation = _read_evaluation(folder / "eval.json", problems)
    samples = _read_samples(folder / "samples.safetensors", problems)
    return Run(folder.resolve().name, about, metrics, evaluation, samples, problems)


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        state = "has no config.json" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {state}, so it is no run; a run contains {CONTENTS}")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable as JSON ({error}), so {folder} is no run; train it again") from None
    found = about.get("format") if isinstance(about, dict) else None
    if found != FORMAT or not isinstance(about.get("config"), dict):
        raise ValueError(
            f"{path} is of format {found}, but a run's is of format {FORMAT} with a config in it; "
            f"a run contains {CONTENTS}"
        )
    return about


def _read_metrics(path: Path, problems: dict[str, str]) -> list[dict[str, Any]]:
    if not path.is_file():
        problems[path.name] = "There is no metrics.jsonl, so nothing is known about the training."
        return []
    lines, cut = [], 0
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text) if text.strip() else None
        except ValueError:
            cut += 1
            continue
        lines += [line] if isinstance(line, dict) else []
    if cut:
        what = "One line" if cut == 1 else f"{cut} lines"
        problems[path.name] = f"{what} of metrics.jsonl could not be read (a stopped run cuts its last one)."
    return lines


def _read_evaluation(path: Path, problems: dict[str, str]) -> dict[str, Any]:
    if not path.is_file():
        problems[path.name] = "There is no eval.json: this run has not been evaluated."
        return {}
    try:
        evaluation = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        problems[path.name] = f"eval.json is not readable as JSON ({error}); evaluate the run again."
        return {}
    if not isinstance(evaluation, dict):
        problems[path.name] = f"eval.json holds a {type(evaluation).__name__}, no record; evaluate the run again."
        return {}
    if (task := evaluation.get("task", "classify")) not in list(METRICS):
        known = " and ".join(METRICS)
        problems[path.name] = f"eval.json is of task {task!r}, but known are {known}; evaluate the run again."
        return {}
    return evaluation


def _read_samples(path: Path, problems: dict[str, str]) -> Samples | None:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        problems[path.name] = "There is no samples.safetensors, so there are no images to show."
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            images, masks, labels, predictions = (
                file.get_tensor(name) for name in ("images", "masks", "labels", "predictions")
            )
        classes = [str(name) for name in json.loads(about.get("classes", "[]"))]
        coarse, fine = int(about["coarse"]), int(about["fine"])
        check_scales(fine, coarse)
        num, *size = images.shape
        if not images.size or len(size) != 3 or size[2] != 3 or masks.ndim != 3:
            raise ValueError(f"images are {images.shape} and masks {masks.shape}, not (n, h, w, 3) and (n, hc, wc)")
        if not num == len(masks) == len(labels) == len(predictions):
            raise ValueError(f"{num} images, {len(masks)} masks, {len(labels)} labels, {len(predictions)} predictions")
        if labels.shape != predictions.shape or labels.shape not in ((num,), images.shape[:3]):
            shapes = f"labels are {labels.shape} and predictions {predictions.shape}"
            raise ValueError(f"{shapes}, but must both be ({num},), or {images.shape[:3]} for segmentation")
        cast = images.astype(np.uint8), masks.astype(np.uint8), labels.astype(np.int64), predictions.astype(np.int64)
        return Samples(*cast, classes=classes, coarse=coarse, fine=fine, cell_tokens=int(about.get("cell_tokens", 1)))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        problems[path.name] = f"samples.safetensors could not be read ({error}); evaluate the run again."
        return None
