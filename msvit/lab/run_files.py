"""A run folder: what a training leaves behind, and what evaluation and report read.

    RUN/config.json            the configuration, versions and machine
    RUN/metrics.jsonl          one line a measurement
    RUN/checkpoint.safetensors the state to go on from
    RUN/model/                 the trained model, for msvit.load
    RUN/evaluations/           written by `msvit eval`: NAME.json and NAME.safetensors; msvit/lab/runs.py reads them
"""

import json
import os
import platform
from pathlib import Path
from typing import Any

import timm
import torch

import msvit
from msvit.atomic import replacing
from msvit.lab.config import Config, from_dict, to_dict

FORMAT = 1
MAX_JSON = 1 << 26  # bytes


def versions() -> dict[str, str]:
    python = platform.python_version()
    return {"msvit": msvit.__version__, "torch": torch.__version__, "timm": timm.__version__, "python": python}


def machine() -> str:
    cores = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name()}, {cores}" if torch.cuda.is_available() else cores


def write_text(path: Path, text: str) -> None:
    """Replaced whole or not at all."""
    with replacing(path) as part:
        part.write_text(text)


def write_json(path: Path, values: dict[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2))


def write_config(folder: Path, config: Config, recipe: str, classes: list[str]) -> None:
    write_json(
        folder / "config.json",
        {
            "format": FORMAT, "recipe": recipe, "config": to_dict(config), "classes": classes,
            "versions": versions(), "machine": machine(),
        },
    )  # fmt: skip


def run_to_start_from(config: Config) -> Path | None:
    """The run that `model.weights` names, if it is one and no file."""
    folder = Path(config.model.weights or "")
    return folder if config.model.weights is not None and (folder / "config.json").is_file() else None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a run, its configuration as a `Config`."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no run: it has no config.json; give a folder written by msvit train")
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        about = json.loads(path.read_text())
        found = about["format"]
        if found == FORMAT:
            about = {key: about[key] for key in ("recipe", "config", "classes", "versions", "machine")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({error}); train it again") from None
    if found != FORMAT:
        raise ValueError(f"{folder} is a run of format {found}, but this msvit reads format {FORMAT}; train it again")
    return {**about, "config": from_dict(about["config"])}


def check_finished(folder: Path, about: dict[str, Any]) -> None:
    """Raise ValueError unless a run has its trained model."""
    if not (folder / "model").is_dir():
        raise ValueError(
            f"the run {folder} is not finished: it has no trained model yet; finish it with "
            f"msvit train {about['recipe']} --resume --out {folder}"
        )


def check_source(folder: Path, config: Config) -> None:
    """Raise ValueError if the data that a folder names would be fetched from the network."""
    if config.data.source.startswith("hfds/"):
        raise ValueError(
            f"{folder / 'config.json'} names {config.data.source}, which is fetched from the network; a folder does "
            f"not decide that: if you trust it, name the data yourself, msvit eval ... --data {config.data.source}"
        )


class Metrics:
    """metrics.jsonl: one line a measurement, flushed as it is written. Without a path, nothing is kept."""

    def __init__(self, path: Path | None, keep_until: int = 0) -> None:
        """Goes on after `keep_until` steps; what was written later belongs to steps that will be done again."""
        kept = []
        if path is not None and keep_until and path.is_file():
            for line in path.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= keep_until:
                        kept.append(line)
                except (json.JSONDecodeError, KeyError):
                    continue  # a line cut short when the run was killed
        if path is not None:
            write_text(path, "".join(f"{line}\n" for line in kept))
        self._file = open(os.devnull if path is None else path, "a")  # noqa: SIM115  (closed by __exit__)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()
