"""The evaluations of a run by name: numbers as JSON, images with masks, labels and predictions as safetensors.

    Evaluations(run)["val"]              # RUN/evaluations/val.json, the run's own
    Evaluations(run).samples("val")      # RUN/evaluations/val.safetensors
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from msvit.types import check_scales
from msvit_lab.json_values import write_json

OWN = "val"  # the name of a run's own evaluation: its validation images, at its size, with its reducer
FOLDER = "evaluations"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


@dataclass(frozen=True)
class Metric:
    """What a task's runs are judged by, and what their numbers are called."""

    task: str
    key: str  # in an evaluation and metrics.jsonl
    name: str
    in_training: str  # what "accuracy" of a training line is
    per: str  # what tokens, multiply-adds and time are counted for
    columns: tuple[tuple[str, str], ...]  # of a table: title, key in an evaluation


METRICS = {
    "classify": Metric("classify", "top1", "top-1", "top-1", "image", (("top-1", "top1"), ("top-5", "top5"))),
    "segment": Metric(
        "segment", "miou", "mIoU", "pixel accuracy", "window",
        (("mIoU", "miou"), ("pixel accuracy", "pixel_accuracy"), ("mean class accuracy", "class_accuracy")),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Samples:
    """Images of an evaluation in the order of the data, with masks, labels and predictions.

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


class Evaluations:
    """The evaluations of a run by name, read anew at each access."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str, suffix: str = ".json") -> Path:
        """Where the evaluation of this name is written or, with the suffix .safetensors, its samples."""
        check_name(name)
        return self.folder / FOLDER / f"{name}{suffix}"

    def __getitem__(self, name: str) -> dict[str, Any]:
        path = self.path(name)
        where = path.relative_to(self.folder)
        if not path.is_file():
            raise KeyError(name)
        try:
            evaluation = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{where} is not readable as JSON ({error}); evaluate the run again") from None
        task = evaluation.get("task") if isinstance(evaluation, dict) else None
        if task not in list(METRICS):
            known = " and ".join(METRICS)
            raise ValueError(f"{where} is of task {task!r}, but known are {known}; evaluate the run again")
        return evaluation

    def samples(self, name: str) -> Samples:
        from safetensors import SafetensorError, safe_open

        path = self.path(name, ".safetensors")
        if not path.is_file():
            raise KeyError(name)
        try:
            with safe_open(path, framework="numpy") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in ("images", "masks", "labels", "predictions")}
            check_scales(fine := int(about["fine"]), coarse := int(about["coarse"]), min_factor=1)
            check_samples(**tensors)
            classes = [str(name) for name in json.loads(about.get("classes", "[]"))]
            cell_tokens = int(about.get("cell_tokens", 1))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            where = path.relative_to(self.folder)
            raise ValueError(f"{where} could not be read ({error}); evaluate the run again") from None
        kinds = {"images": np.uint8, "masks": np.uint8, "labels": np.int64, "predictions": np.int64}
        cast: dict[str, Any] = {name: tensors[name].astype(kind) for name, kind in kinds.items()}
        return Samples(**cast, classes=classes, coarse=coarse, fine=fine, cell_tokens=cell_tokens)

    def write(self, name: str, values: dict[str, Any]) -> None:
        """Replaced whole or not at all."""
        path = self.path(name)
        path.parent.mkdir(exist_ok=True)
        write_json(path, values)

    def clear(self) -> None:
        """Delete all, with their samples: they are of other weights."""
        shutil.rmtree(self.folder / FOLDER, ignore_errors=True)


def name_of(index: int, classes: Sequence[str]) -> str:
    return classes[index] if 0 <= index < len(classes) else f"class {index}"


def check_name(name: str) -> None:
    """Raise ValueError unless an evaluation may have this name."""
    if NAME.fullmatch(name) is None:
        raise ValueError(
            f"an evaluation cannot be named {name!r}, as it names a file; use letters, digits and . _ + -, "
            "for example data-flowers"
        )


def check_samples(images: np.ndarray, masks: np.ndarray, labels: np.ndarray, predictions: np.ndarray) -> None:
    """Raise ValueError unless the shapes of the samples fit each other."""
    num, *size = images.shape
    if not images.size or len(size) != 3 or size[2] != 3 or masks.ndim != 3:
        raise ValueError(f"images are {images.shape} and masks {masks.shape}, not (n, h, w, 3) and (n, hc, wc)")
    if not num == len(masks) == len(labels) == len(predictions):
        raise ValueError(f"{num} images, {len(masks)} masks, {len(labels)} labels, {len(predictions)} predictions")
    if labels.shape != predictions.shape or labels.shape not in ((num,), images.shape[:3]):
        shapes = f"labels are {labels.shape} and predictions {predictions.shape}"
        raise ValueError(f"{shapes}, but must both be ({num},), or {images.shape[:3]} for segmentation")
