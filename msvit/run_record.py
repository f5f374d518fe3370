"""Settings and figures of the run that trained a model, kept with it by `msvit.save` and shown on its model card.

    model.run_record                                # of msvit.load("runs/photos"); `msvit train` and `eval` write it
    model.run_record.training                       # {"recipe": "folder", "steps": 840, ...}
    model.run_record.mixed, model.run_record.dense  # Measured(scores={"top-1": 0.93}, tokens=104.2, gmacs=2.4)

A record that is read may be cut short or forged: what is missing or of another type is left out.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCORES = {
    "classify": {"top1": "top-1", "top5": "top-5"},
    "segment": {"miou": "mIoU", "pixel_accuracy": "pixel accuracy", "class_accuracy": "mean class accuracy"},
}
MAX_BYTES = 1 << 20  # of a file that is read
MAX_TEXT = 120  # letters of a name
MAX_SETTINGS = 32
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
    training: dict[str, Value] = field(default_factory=dict)  # settings by the names they have on the card


def from_dict(values: Any) -> RunRecord | None:
    """Return the record of `asdict`; None for anything but a dict."""
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
        training=_settings(training) if isinstance(training, dict) else {},
    )


def read_record(path: Path) -> RunRecord | None:
    """Read the record that `msvit train` and `msvit eval` write; None unless there is one that can be read."""
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return None
    try:
        return from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def _measured(values: Any) -> Measured:
    known: dict[str, Any] = values if isinstance(values, dict) else {}
    scores = known["scores"] if isinstance(known.get("scores"), dict) else {}
    names = [name for names in SCORES.values() for name in names.values()]
    numbers = {name: number for name in names if (number := _number(scores.get(name))) is not None}
    return Measured(numbers, _number(known.get("tokens")), _number(known.get("gmacs")))


def _settings(values: dict[str, Any]) -> dict[str, Value]:
    """Return names with texts and finite numbers."""
    pairs = [(_text(k), _text(v) if isinstance(v, str) else _number(v)) for k, v in [*values.items()][:MAX_SETTINGS]]
    return {name: value for name, value in pairs if name is not None and value is not None}


def _text(value: Any) -> str | None:
    """Return one line of printable letters, without what Markdown's tables and HTML are made of."""
    if not isinstance(value, str):
        return None
    clean = "".join(letter for letter in value if letter.isprintable() and letter not in "|`<>[]")
    return clean.strip()[-MAX_TEXT:] or None


def _number(value: Any) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    return value if fits and abs(value) < 2**63 and math.isfinite(value) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 2**63 else None
