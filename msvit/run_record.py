"""What a training run used and measured, kept with the model that came out of it and shown on its model card.

    record = read_run_record(Path("runs/photos"))    # of config.json and the run's own evaluation
    model = msvit.load("runs/photos")                # model.run_record is that record; msvit.save keeps it
    record.training                                  # {"recipe": "folder", "steps": 840, ...}
    record.mixed, record.dense                       # Measured(scores={"top-1": 0.93}, tokens=104.2, gmacs=2.4)

The files are plain JSON that may be cut short, older or forged: what is missing or of another type is left out.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OWN_EVALUATION = "evaluations/val.json"
MAX_BYTES = 1 << 26  # of a file that is read
MAX_TEXT = 120  # letters of a name
SCORES = {
    "classify": {"top1": "top-1", "top5": "top-5"},
    "segment": {"miou": "mIoU", "pixel_accuracy": "pixel accuracy", "class_accuracy": "mean class accuracy"},
}
# What the card says of the training: its name there, and the keys of config.json.
TRAINING = {
    "recipe": ("recipe",),
    "seed": ("config", "seed"),
    "epochs": ("config", "optim", "epochs"),
    "batch size": ("config", "optim", "batch_size"),
    "optimizer": ("config", "optim", "name"),
    "learning rate": ("config", "optim", "lr"),
    "mode in training": ("config", "model", "mode"),
    "msvit": ("versions", "msvit"),
    "torch": ("versions", "torch"),
    "timm": ("versions", "timm"),
    "machine": ("machine",),
}
GATE_TRAINING = {
    "gate loss": ("config", "gate", "loss"),
    "gate target": ("config", "gate", "target"),
    "gate weight": ("config", "gate", "weight"),
}
Value = str | int | float


@dataclass(frozen=True)
class Measured:
    """Figures of one model on the validation images; None or absent: not measured."""

    scores: dict[str, float] = field(default_factory=dict)  # 0..1, the most important first
    tokens: float | None = None  # mean per image, of a segmenter per window
    gmacs: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """The settings and figures of a training run."""

    task: str = "classify"
    dataset: str | None = None
    img_size: int | None = None
    num_images: int | None = None  # that were evaluated
    pretrained: str | None = None  # the timm model whose published weights it started from
    mixed: Measured = field(default_factory=Measured)  # the model of the run
    dense: Measured = field(default_factory=Measured)  # its host with all cells fine, as far as known
    training: dict[str, Value] = field(default_factory=dict)


def to_dict(record: RunRecord) -> dict[str, Any]:
    return asdict(record)


def from_dict(values: Any) -> RunRecord | None:
    """The record that `to_dict` described; None for anything else."""
    if not isinstance(values, dict):
        return None
    task, training = values.get("task"), values.get("training")
    return RunRecord(
        task=task if task in list(SCORES) else "classify",
        dataset=_text(values.get("dataset")),
        img_size=_count(values.get("img_size")),
        num_images=_count(values.get("num_images")),
        pretrained=_text(values.get("pretrained")),
        mixed=_measured(values.get("mixed")),
        dense=_measured(values.get("dense")),
        training=_known(training) if isinstance(training, dict) else {},
    )


def read_run_record(folder: Path) -> RunRecord | None:
    """The record of a run folder; None unless it has a config.json."""
    about, evaluation = _read(folder / "config.json"), _read(folder / OWN_EVALUATION)
    if not about:
        return None
    task = _look_up(about, "config", "task")
    task = task if task in list(SCORES) else "classify"
    gated = _look_up(about, "config", "model", "gate") not in (None, "none")
    wanted = TRAINING | (GATE_TRAINING if gated and not _look_up(about, "config", "model", "freeze_gate") else {})
    training = _known({name: _look_up(about, *keys) for name, keys in wanted.items()})
    if steps := _last_step(folder / "metrics.jsonl"):
        training = {"steps": steps, **training}
    size = _count(_look_up(about, "config", "data", "img_size"))
    pretrained = _look_up(about, "config", "model", "pretrained") is True
    return RunRecord(
        task=task,
        dataset=_dataset(about),
        img_size=size,
        num_images=_count(evaluation.get("num_images")),
        pretrained=_text(_look_up(about, "config", "model", "name")) if pretrained else None,
        mixed=_of_evaluation(evaluation, "mean", _scores(evaluation, task)),
        dense=_of_evaluation(evaluation, "dense", _dense_scores(about, task, size)),
        training=training,
    )


def _of_evaluation(evaluation: dict[str, Any], kind: str, scores: dict[str, float]) -> Measured:
    tokens, gmacs = (_number(_look_up(evaluation, what, kind)) for what in ("tokens", "gmacs"))
    return Measured(scores, tokens, gmacs)


def _scores(evaluation: dict[str, Any], task: str) -> dict[str, float]:
    found = {name: _number(evaluation.get(key)) for key, name in SCORES[task].items()}
    return {name: value for name, value in found.items() if value is not None}


def _dense_scores(about: dict[str, Any], task: str, size: int | None) -> dict[str, float]:
    """Those of the dense run that this one started from, if it is a run on the same images at the same size."""
    weights = _look_up(about, "config", "model", "weights")
    if not isinstance(weights, str) or "\0" in weights or not (folder := Path(weights)).is_dir():
        return {}
    other, evaluation = _read(folder / "config.json"), _read(folder / OWN_EVALUATION)
    data = [_look_up(each, "config", "data", "source") for each in (about, other)]
    same = data[0] == data[1] and _look_up(other, "config", "data", "img_size") == size
    return _scores(evaluation, task) if same and evaluation.get("dense") is True else {}


def _dataset(about: dict[str, Any]) -> str | None:
    """The name of the data, without the path to it."""
    source = _text(_look_up(about, "config", "data", "source"))
    return None if source is None else source.rstrip("/").rpartition("/")[2] or None


def _last_step(path: Path) -> int | None:
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return None
    for line in reversed(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict) and (step := _count(values.get("step"))):
            return step
    return None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _look_up(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _measured(values: Any) -> Measured:
    scores = _look_up(values, "scores")
    known = {name: number for scored in SCORES.values() for name in scored.values()
             if (number := _number(_look_up(scores, name))) is not None}  # fmt: skip
    return Measured(known, _number(_look_up(values, "tokens")), _number(_look_up(values, "gmacs")))


def _known(values: dict[str, Any]) -> dict[str, Value]:
    """Only names and finite numbers."""
    found: dict[str, Value] = {}
    for name in ("steps", *TRAINING, *GATE_TRAINING):
        value = values.get(name)
        kept = _text(value) if isinstance(value, str) else value if _number(value) is not None else None
        if kept is not None:
            found[name] = kept
    return found


def _text(value: Any) -> str | None:
    """One line of printable letters, without what Markdown's tables and HTML are made of."""
    if not isinstance(value, str):
        return None
    clean = "".join(letter for letter in value if letter.isprintable() and letter not in "|`<>[]")
    return clean.strip()[-MAX_TEXT:] or None


def _number(value: Any) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    return value if fits and abs(value) < 2**63 and math.isfinite(value) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 2**63 else None
