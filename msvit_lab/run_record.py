"""The record of a run for the model card of its model: settings, versions, figures of its own evaluation.

    write_run_record(Path("runs/photos"))    # runs/photos/record.json, which msvit.load("runs/photos") reads
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from msvit.run_record import SCORES, Measured, RunRecord, from_dict
from msvit.saving.model import RECORD
from msvit_lab.json_values import look_up, write_json
from msvit_lab.runs import Run

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


def write_run_record(folder: Path) -> None:
    """Write what is known of a run; once it is trained, and again with each of its own evaluations."""
    write_json(folder / RECORD, asdict(make_run_record(Run(folder))))


def make_run_record(run: Run) -> RunRecord:
    """Return what config.json, metrics.jsonl and the run's own evaluation say; what is of another type is left out."""
    gated = run.setting("model", "gate") not in (None, "none") and not run.setting("model", "freeze_gate")
    names = TRAINING | (GATE_TRAINING if gated else {})
    steps = next((line["step"] for line in reversed(run.metrics) if "step" in line), None)
    source = run.setting("data", "source")
    record = {
        "task": run.setting("task"),
        "dataset": source.rstrip("/").rpartition("/")[2] if isinstance(source, str) else None,  # without its path
        "img_size": run.setting("data", "img_size"),
        "num_images": run.evaluation.get("num_images"),
        "pretrained": run.setting("model", "name") if run.setting("model", "pretrained") is True else None,
        "mixed": _measured(run, "mean", scores_of(run)),
        "dense": _measured(run, "dense", dense_scores(run)),
        "training": {"steps": steps, **{name: look_up(run.about, keys) for name, keys in names.items()}},
    }
    return from_dict(record) or RunRecord()


def _measured(run: Run, kind: str, scores: dict[str, Any]) -> dict[str, Any]:
    tokens, gmacs = (run.number(what, kind) for what in ("tokens", "gmacs"))
    return vars(Measured(scores, tokens, gmacs))


def scores_of(run: Run) -> dict[str, Any]:
    names = SCORES["segment" if run.setting("task") == "segment" else "classify"]
    return {name: run.evaluation.get(key) for key, name in names.items()}


def dense_scores(run: Run) -> dict[str, Any]:
    """Return those of the dense run that this one started from, if that had the same images at the same size."""
    weights = run.setting("model", "weights")
    if not isinstance(weights, str) or not (Path(weights) / "config.json").is_file():
        return {}
    other = Run(weights)
    same = all(run.setting("data", key) == other.setting("data", key) for key in ("source", "img_size"))
    return scores_of(other) if same and other.evaluation.get("dense") is True else {}
