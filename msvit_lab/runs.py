"""A run folder, as training and evaluation leave it; everything that reads or writes one goes through `Run`.

    run = Run("runs/gbas")
    run.config, run.classes, run.model    # the configuration, the names of the classes, the folder for msvit.load
    run.metrics                           # lines of metrics.jsonl
    run.evaluations["val"]                # the run's own evaluation; other data or another reducer has another name
    run.evaluations.samples("val")        # images of it, with masks, labels and predictions
    run.score, run.number("gmacs", "mean")   # of the own evaluation, or None
    run.problems                          # {"metrics": "There is no ..."}: what is missing, in sentences

    RUN/config.json                       # configuration, classes, versions and machine
    RUN/metrics.jsonl                     # one line per measurement
    RUN/checkpoint.safetensors            # the state to resume from
    RUN/model/                            # the trained model, for msvit.load
    RUN/record.json                       # settings and figures for its model card
    RUN/evaluations/NAME.json, RUN/evaluations/NAME.safetensors
"""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

import msvit
from msvit.saving.file import replacing
from msvit_lab.config import Config, from_dict
from msvit_lab.evaluation_files import FOLDER, METRICS, OWN, Evaluations, Metric, Samples
from msvit_lab.json_values import write_json

FORMAT = 3
MAX_JSON = 1 << 26  # bytes
CONTENTS = f"config.json (always), metrics.jsonl and {FOLDER}/ (once trained and evaluated)"
T = TypeVar("T")


class Run:
    """One run. A folder without a config.json is none; any other file may be missing or cut short.

    The values of a missing file are None or empty, and `problems` has a sentence about it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.about = _read_about(self.folder)  # config.json: recipe, config, classes, versions, machine
        self.classes: list[str] = self.about["classes"]
        self.evaluations = Evaluations(self.folder)
        self._problems: dict[str, str] = {}

    @cached_property
    def config(self) -> Config:
        """The configuration; raises ValueError if it is not one that this msvit has."""
        return from_dict(self.about["config"])

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
        lines, cut = read_lines(path)
        if cut:
            what = "One line" if cut == 1 else f"{cut} lines"
            self._problems["metrics"] = f"{what} of metrics.jsonl could not be read (a stopped run cuts its last one)."
        return lines

    @cached_property
    def evaluation(self) -> dict[str, Any]:
        """The run's own evaluation; empty unless there is one that can be read."""
        missing = f"There is no {FOLDER}/{OWN}.json: this run has not been evaluated."
        return self._own("evaluation", self.evaluations.__getitem__, missing) or {}

    @cached_property
    def own_samples(self) -> Samples | None:
        """The images of the run's own evaluation; None unless there are some that can be read."""
        missing = f"There is no {FOLDER}/{OWN}.safetensors, so there are no images to show."
        return self._own("samples", self.evaluations.samples, missing)

    def _own(self, what: str, read: Callable[[str], T], missing: str) -> T | None:
        try:
            return read(OWN)
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
        """The metric of the task."""
        return METRICS[self.evaluation.get("task", self.config.task)]

    @property
    def score(self) -> float | None:
        """The value of its metric, 0..1."""
        return self.number(self.metric.key)

    @property
    def dense(self) -> bool:
        """Whether it is a host without a gate, by its evaluation, before that by its configuration."""
        return self.evaluation.get("dense", self.config.model.gate == "none")

    @property
    def img_size(self) -> int:
        return self.evaluation.get("img_size", self.config.data.img_size)

    def check_finished(self) -> None:
        """Raise ValueError unless it has its trained model."""
        if not self.model.is_dir():
            raise ValueError(
                f"the run {self.folder} is not finished: it has no trained model yet; finish it with "
                f"msvit train {self.about['recipe'] or 'RECIPE'} --resume --out {self.folder}"
            )

    def number(self, *keys: str) -> float | None:
        """A number of the own evaluation, or None."""
        value: Any = self.evaluation
        for key in keys:
            value = (value or {}).get(key)
        return value

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line.get("kind") == kind]


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read several runs; of runs with the same folder name, the names have as much of the path as tells them apart."""
    runs = {Path(folder).resolve(): Run(folder) for folder in folders}  # the same folder twice is one run
    depth = 1
    while len({path.parts[-depth:] for path in runs}) < len(runs):
        depth += 1
    for path, run in runs.items():
        run.name = "/".join(path.parts[-depth:])
    return list(runs.values())


def run_folders(folder: Path) -> list[Path]:
    """A run itself, or the runs in a sweep's folder."""
    if (folder / "config.json").is_file() or not folder.is_dir():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/config.json")) or [folder]


def is_run(folder: Path) -> bool:
    """Whether a folder is a run; `save_pretrained` writes a config.json too, beside the weights."""
    return (folder / "config.json").is_file() and not (folder / "model.safetensors").is_file()


def is_evaluated(folder: Path) -> bool:
    return (folder / "config.json").is_file() and Evaluations(folder).path(OWN).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a run, its configuration as a `Config`."""
    about = _read_about(folder)
    return {**about, "config": from_dict(about["config"])}


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
    if missing := [key for key in ("recipe", "classes", "versions", "machine") if key not in about]:
        raise ValueError(f"{path} is not the configuration of a run (no {missing[0]}); train it again")
    return about


def write_config(folder: Path, config: Config, recipe: str, classes: list[str]) -> None:
    about = {"format": FORMAT, "recipe": recipe, "config": asdict(config), "classes": classes}
    write_json(folder / "config.json", {**about, "versions": versions(), "machine": machine()})


def versions() -> dict[str, str]:
    import timm

    python = platform.python_version()
    return {"msvit": msvit.__version__, "torch": torch.__version__, "timm": timm.__version__, "python": python}


def machine() -> str:
    cores = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name()}, {cores}" if torch.cuda.is_available() else cores


def run_to_start_from(config: Config) -> Path | None:
    """The run that `model.weights` names, if it is one and no file."""
    folder = Path(config.model.weights or "")
    return folder if config.model.weights is not None and (folder / "config.json").is_file() else None


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a metrics.jsonl, and how many cannot be read: a run that is killed cuts its last one."""
    lines, cut = [], 0
    for text in filter(None, path.read_text(encoding="utf-8", errors="replace").split("\n")):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        lines += [line] if isinstance(line, dict) else []
        cut += not isinstance(line, dict)
    return lines, cut


class Metrics:
    """metrics.jsonl: one line per measurement, flushed as it is written. Without a path, nothing is written."""

    def __init__(self, path: Path | None, keep_until: int = 0) -> None:
        """Keep the lines of the first `keep_until` steps; later ones are of steps that will be done again."""
        if path is not None:
            lines = read_lines(path)[0] if keep_until and path.is_file() else []
            with replacing(path) as part:
                part.write_text("".join(f"{json.dumps(line)}\n" for line in lines if line["step"] <= keep_until))
        self._file = open(os.devnull if path is None else path, "a")  # noqa: SIM115  (closed by __exit__)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()
