"""The record of a run for the model card of its model: settings, versions, figures of its own evaluation.

    write_run_record(Path("runs/photos"))    # runs/photos/record.json, which msvit.load("runs/photos") reads
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from msvit.run_record import SCORES, RunRecord, from_dict
from msvit.saving.model import RECORD
from msvit_lab.json_values import write_json
from msvit_lab.runs import Run


def write_run_record(folder: Path) -> None:
    """Write what is known of a run; once it is trained, and again with each of its own evaluations."""
    write_json(folder / RECORD, asdict(make_run_record(Run(folder))))


def make_run_record(run: Run) -> RunRecord:
    """Return what config.json, metrics.jsonl and the run's own evaluation say; what is of another type is left out."""
    config = run.about["config"]
    data, model = config["data"], config["model"]
    record = {
        "task": config["task"],
        "dataset": data["source"].rstrip("/").rpartition("/")[2],  # without its path
        "img_size": data["img_size"],
        "num_images": run.evaluation.get("num_images"),
        "pretrained": model["name"] if model["pretrained"] else None,
        "mixed": {"scores": scores_of(run), **{key: run.number(key, "mean") for key in ("tokens", "gmacs")}},
        "dense": {"scores": dense_scores(run), **{key: run.number(key, "dense") for key in ("tokens", "gmacs")}},
        "training": training_of(run),
    }
    return from_dict(record) or RunRecord()


def training_of(run: Run) -> dict[str, Any]:
    """Return what the card says of the training, by its names there."""
    config = run.about["config"]
    optim, gate, model = config["optim"], config["gate"], config["model"]
    training = {
        "steps": next((line["step"] for line in reversed(run.metrics) if "step" in line), None),
        "recipe": run.about["recipe"], "seed": config["seed"], "epochs": optim["epochs"],
        "batch size": optim["batch_size"], "optimizer": optim["name"], "learning rate": optim["lr"],
        "mode in training": model["mode"],
        **{package: run.about["versions"][package] for package in ("msvit", "torch", "timm")},
        "machine": run.about["machine"],
    }  # fmt: skip
    if model["gate"] != "none" and not model["freeze_gate"]:
        training |= {f"gate {name}": gate[name] for name in ("loss", "target", "weight")}
    return training


def scores_of(run: Run) -> dict[str, Any]:
    return {name: run.evaluation.get(key) for key, name in SCORES[run.about["config"]["task"]].items()}


def dense_scores(run: Run) -> dict[str, Any]:
    """Return those of the dense run that this one started from, if that had the same images at the same size."""
    weights = run.about["config"]["model"]["weights"]
    if weights is None or not (Path(weights) / "config.json").is_file():
        return {}
    other = Run(weights)
    same = all(run.about["config"]["data"][key] == other.about["config"]["data"][key] for key in ("source", "img_size"))
    return scores_of(other) if same and other.evaluation.get("dense") else {}
