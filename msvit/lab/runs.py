"""A run folder, as training and evaluation leave it; everything that reads or writes one goes through `Run`.

    run = Run("runs/gbas")
    run.config, run.classes, run.model    # the configuration, the names of the classes, the folder for msvit.load
    run.metrics                           # lines of metrics.jsonl
    run.evaluations["val"]                # the run's own evaluation; other data or another reducer has another name
    run.samples["val"]                    # images of it, with masks, labels and predictions
    run.score, run.number("gmacs", "mean")   # of the own evaluation, or None
    run.problems                          # {"metrics": "There is no ..."}: what is missing, in sentences

    RUN/config.json                       # configuration, classes, versions and machine
    RUN/metrics.jsonl                     # one line per measurement
    RUN/checkpoint.safetensors            # the state to resume from
    RUN/model/                            # the trained model, for msvit.load
    RUN/evaluations/NAME.json, RUN/evaluations/NAME.safetensors

Before evaluations had names there was eval.json with samples.safetensors, read as "val", and eval_multi.json, "multi".
"""

import json
import math
import os
import platform
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float64, Int64, UInt8

import msvit
from msvit.atomic import replacing
from msvit.lab.config import Config, from_dict, to_dict
from msvit.types import check_scales

FORMAT = 1
UNCOMPILED = {"graphs": False, "inductor": False}
MAX_JSON = 1 << 26  # bytes
OWN = "val"  # the name of a run's own evaluation: its validation images, at its size, with its reducer
FOLDER = "evaluations"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
CONTENTS = f"config.json (always), metrics.jsonl and {FOLDER}/ (once trained and evaluated)"
T = TypeVar("T")


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

    def class_name(self, index: int) -> str:
        return name_of(index, self.classes)


class EvaluationFiles(Mapping[str, T], ABC):
    """Files of a run by the name of their evaluation, read anew at each access."""

    suffix: ClassVar[str]
    old: ClassVar[dict[str, str]]  # where they were before evaluations had names

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def read(self, path: Path) -> T: ...

    def path(self, name: str) -> Path:
        """The path that a file of this name is written to."""
        check_name(name)
        return self.folder / FOLDER / f"{name}{self.suffix}"

    def find(self, name: str) -> Path | None:
        """The existing file of this name, if any."""
        places = [self.path(name), *([self.folder / self.old[name]] if name in self.old else [])]
        return next((place for place in places if place.is_file()), None)

    def __getitem__(self, name: str) -> T:
        path = self.find(name)
        if path is None:
            raise KeyError(name)
        return self.read(path)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and NAME.fullmatch(name) is not None and self.find(name) is not None

    def __iter__(self) -> Iterator[str]:
        """The run's own first."""
        found = {path.name.removesuffix(self.suffix) for path in (self.folder / FOLDER).glob(f"*{self.suffix}")}
        return iter(sorted((name for name in found | self.old.keys() if name in self), key=lambda n: (n != OWN, n)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Evaluations(EvaluationFiles[dict[str, Any]]):
    suffix = ".json"
    old: ClassVar[dict[str, str]] = {OWN: "eval.json", "multi": "eval_multi.json"}

    def read(self, path: Path) -> dict[str, Any]:
        where = path.relative_to(self.folder)
        try:
            evaluation = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{where} is not readable as JSON ({error}); evaluate the run again") from None
        if not isinstance(evaluation, dict):
            raise ValueError(f"{where} holds a {type(evaluation).__name__}, no record; evaluate the run again")
        if (task := evaluation.get("task", "classify")) not in list(METRICS):
            known = " and ".join(METRICS)
            raise ValueError(f"{where} is of task {task!r}, but known are {known}; evaluate the run again")
        return evaluation

    def write(self, name: str, values: dict[str, Any]) -> Path:
        """Replaced whole or not at all."""
        path = self.path(name)
        path.parent.mkdir(exist_ok=True)
        write_json(path, values)
        for kind in (Evaluations, SampleFiles):  # a file from before evaluations had names is an older one
            if name in kind.old:
                (self.folder / kind.old[name]).unlink(missing_ok=True)
        return path

    def clear(self) -> None:
        """Delete all, with their samples: they are of other weights."""
        shutil.rmtree(self.folder / FOLDER, ignore_errors=True)
        for old in (*Evaluations.old.values(), *SampleFiles.old.values()):
            (self.folder / old).unlink(missing_ok=True)


class SampleFiles(EvaluationFiles[Samples]):
    suffix = ".safetensors"
    old: ClassVar[dict[str, str]] = {OWN: "samples.safetensors"}

    def read(self, path: Path) -> Samples:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in ("images", "masks", "labels", "predictions")}
            check_scales(fine := int(about["fine"]), coarse := int(about["coarse"]), least=1)
            check_samples(**tensors)
            classes = [str(name) for name in json.loads(about.get("classes", "[]"))]
            cell_tokens = int(about.get("cell_tokens", 1))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            where = path.relative_to(self.folder)
            raise ValueError(f"{where} could not be read ({error}); evaluate the run again") from None
        kinds = {"images": np.uint8, "masks": np.uint8, "labels": np.int64, "predictions": np.int64}
        cast: dict[str, Any] = {name: tensors[name].astype(kind) for name, kind in kinds.items()}
        return Samples(**cast, classes=classes, coarse=coarse, fine=fine, cell_tokens=cell_tokens)


class Run:
    """One run. A folder without a config.json is none; any other file may be missing or cut short.

    The values of a missing file are None or empty, and `problems` has a sentence about it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.about = _read_about(self.folder)  # config.json: recipe, config, classes, versions, machine
        self.evaluations, self.samples = Evaluations(self.folder), SampleFiles(self.folder)
        self._problems: dict[str, str] = {}

    @property
    def config(self) -> Config:
        """The configuration; raises ValueError if it is not one that this msvit has."""
        return from_dict(_completed(self.about["config"]))

    @property
    def classes(self) -> list[str]:
        names = self.about.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []

    @property
    def model(self) -> Path:
        """The folder of the trained model, for msvit.load; it is there once the training is finished."""
        return self.folder / "model"

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that can be read."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            self._problems["metrics"] = "There is no metrics.jsonl, so nothing is known about the training."
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
            self._problems["metrics"] = f"{what} of metrics.jsonl could not be read (a stopped run cuts its last one)."
        return lines

    @cached_property
    def evaluation(self) -> dict[str, Any]:
        """The run's own evaluation; empty unless there is one that can be read."""
        missing = f"There is no {FOLDER}/{OWN}.json: this run has not been evaluated."
        return self._own("evaluation", self.evaluations, missing) or {}

    @cached_property
    def own_samples(self) -> Samples | None:
        """The images of the run's own evaluation; None unless there are some that can be read."""
        missing = f"There is no {FOLDER}/{OWN}.safetensors, so there are no images to show."
        return self._own("samples", self.samples, missing)

    def _own(self, what: str, files: EvaluationFiles[T], missing: str) -> T | None:
        try:
            return files[OWN]
        except KeyError:
            self._problems[what] = missing
        except ValueError as error:
            self._problems[what] = f"{error}."
        return None

    @property
    def problems(self) -> dict[str, str]:
        """A sentence about each of "metrics", "evaluation" and "samples" that is missing or cannot be read."""
        _ = self.metrics, self.evaluation, self.own_samples  # reads them
        return self._problems

    @property
    def metric(self) -> Metric:
        """The metric of the task, by the evaluation or, if there is none, the configuration; by default of classify."""
        return METRICS.get(str(self.evaluation.get("task", self.setting("task"))), METRICS["classify"])

    @property
    def score(self) -> float | None:
        """The value of its metric, 0..1."""
        return self.number(self.metric.key)

    @property
    def dense(self) -> bool:
        """Whether it is a host without a gate, by its evaluation, before that by its configuration."""
        return bool(self.evaluation.get("dense", self.setting("model", "gate") in (None, "none")))

    @property
    def img_size(self) -> int | None:
        size = self.evaluation.get("img_size") or self.setting("data", "img_size")
        return size if isinstance(size, int) else None

    @property
    def times(self) -> list[dict[str, Any]]:
        """Rows of measured time that have a speed."""
        rows = self.evaluation.get("latency")
        rows = rows if isinstance(rows, list) else []
        return [row for row in rows if isinstance(row, dict) and finite(row.get("images_per_second"))]

    def setting(self, *keys: str) -> Any:
        """A value of the configuration, or None."""
        return look_up(self.about.get("config"), keys)

    def number(self, *keys: str) -> float | None:
        """A finite number of the own evaluation, or None."""
        return finite(look_up(self.evaluation, keys))

    def map(self, key: str) -> Float64[np.ndarray, "hc wc"] | None:
        """One number per cell from the own evaluation, or None."""
        return cell_map(self.evaluation.get(key))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line.get("kind") == kind and finite(line.get("step")) is not None]


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read several runs; of runs with the same folder name, the names have as much of the path as tells them apart."""
    runs = {Path(folder).resolve(): Run(folder) for folder in folders}  # the same folder twice is one run
    depth = 1
    while len({path.parts[-depth:] for path in runs}) < len(runs):
        depth += 1
    for path, run in runs.items():
        run.name = "/".join(path.parts[-depth:])
    return list(runs.values())


def is_evaluated(folder: Path) -> bool:
    return (folder / "config.json").is_file() and OWN in Evaluations(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a run, its configuration as a `Config`."""
    about = _read_about(folder)
    if missing := [key for key in ("recipe", "classes", "versions", "machine") if key not in about]:
        raise ValueError(f"{folder}/config.json is not the configuration of a run (no {missing[0]}); train it again")
    return {**about, "config": from_dict(_completed(about["config"]))}


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """With the settings of runs from before `optim.graphs` and `optim.inductor`, whose defaults are others now."""
    optim = config.get("optim", {})
    return {**config, "optim": UNCOMPILED | optim} if isinstance(optim, dict) else config


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        state = "has no config.json" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {state}, so it is no run; a run contains {CONTENTS}")
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        about = json.loads(path.read_text(encoding="utf-8"))
        found = about.get("format")
        if found == FORMAT and not isinstance(about["config"], dict):
            raise ValueError(f"its config is a {type(about['config']).__name__}")
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({error}); train it again") from None
    if found != FORMAT:
        raise ValueError(f"{folder} is a run of format {found}, but this msvit reads format {FORMAT}; train it again")
    return about


def write_config(folder: Path, config: Config, recipe: str, classes: list[str]) -> None:
    about = {"format": FORMAT, "recipe": recipe, "config": to_dict(config), "classes": classes}
    write_json(folder / "config.json", {**about, "versions": versions(), "machine": machine()})


def versions() -> dict[str, str]:
    import timm

    python = platform.python_version()
    return {"msvit": msvit.__version__, "torch": torch.__version__, "timm": timm.__version__, "python": python}


def machine() -> str:
    cores = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name()}, {cores}" if torch.cuda.is_available() else cores


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replaced whole or not at all."""
    with replacing(path) as part:
        part.write_text(json.dumps(values, indent=2))


def run_to_start_from(config: Config) -> Path | None:
    """The run that `model.weights` names, if it is one and no file."""
    folder = Path(config.model.weights or "")
    return folder if config.model.weights is not None and (folder / "config.json").is_file() else None


def check_finished(folder: Path, about: dict[str, Any]) -> None:
    """Raise ValueError unless a run has its trained model."""
    if not (folder / "model").is_dir():
        raise ValueError(
            f"the run {folder} is not finished: it has no trained model yet; finish it with "
            f"msvit train {about.get('recipe', 'RECIPE')} --resume --out {folder}"
        )


def check_source(folder: Path, config: Config) -> None:
    """Raise ValueError if the data that a folder names would be fetched from the network."""
    if config.data.source.startswith("hfds/"):
        raise ValueError(
            f"{folder / 'config.json'} names {config.data.source}, which is fetched from the network; a folder does "
            f"not decide that: if you trust it, name the data yourself, msvit eval ... --data {config.data.source}"
        )


class Metrics:
    """metrics.jsonl: one line per measurement, flushed as it is written. Without a path, nothing is written."""

    def __init__(self, path: Path | None, keep_until: int = 0) -> None:
        """Keep the lines of the first `keep_until` steps; later ones are of steps that will be done again."""
        kept = []
        if path is not None and keep_until and path.is_file():
            for line in path.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= keep_until:
                        kept.append(line)
                except (json.JSONDecodeError, KeyError):
                    continue  # a line cut short when the run was killed
        if path is not None:
            with replacing(path) as part:
                part.write_text("".join(f"{line}\n" for line in kept))
        self._file = open(os.devnull if path is None else path, "a")  # noqa: SIM115  (closed by __exit__)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()


def check_name(name: str) -> None:
    """Raise ValueError unless an evaluation may have this name."""
    if NAME.fullmatch(name) is None:
        raise ValueError(
            f"an evaluation cannot be named {name!r}, as it names a file; use letters, digits and . _ + -, "
            "for example data-flowers"
        )


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
