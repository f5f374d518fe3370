"""What scripts that compare runs on validation images share: which images, in what batches, and the record of it all.

abouts = read_abouts([Path("runs/gated"), Path("runs/disc")], data=None)    # classifiers, of the same images
for batch in val_loader(abouts[0], device).iterate(0):
    batch.image, batch.label
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from msvit.lab.bench.images import short
from msvit.lab.bench.record import make_record
from msvit.lab.build import make_loader, open_val
from msvit.lab.data import Loader
from msvit.lab.runs import read_config

BATCH = 256


def read_abouts(runs: list[Path], data: str | None) -> list[dict[str, Any]]:
    """config.json of every run, with the same images in all: those of `data`, by default what they were trained on."""
    found = [read_config(run) for run in runs]
    for run, about in zip(runs, found, strict=True):
        if about["config"].task != "classify":
            raise ValueError(f"{run} segments, but only classifiers are compared here; leave it out")
    sources = list(dict.fromkeys(about["config"].data.source for about in found))
    if data is None and len(sources) > 1:
        raise ValueError(
            f"the runs were trained on {', '.join(sources)}; say with --data which images to compare them on"
        )
    return [with_data(about, source=data or sources[0]) for about in found]


def check_same(runs: list[Path], abouts: list[dict[str, Any]], settings: tuple[str, ...], why: str) -> None:
    """Refuse runs of which `settings` of the data differ."""
    first = abouts[0]["config"].data
    for run, about in zip(runs, abouts, strict=True):
        for name in settings:
            own, other = getattr(about["config"].data, name), getattr(first, name)
            if own != other:
                raise ValueError(f"{run} has data.{name}={own}, but {runs[0]} has {other}; {why}")


def val_loader(about: dict[str, Any], device: torch.device) -> Loader:
    """Every validation image once, in order. What a cache would keep is asked for once."""
    config = with_data(about, cache=False, objects=None)["config"]
    config = replace(config, optim=replace(config.optim, batch_size=BATCH, accumulate=1))
    return make_loader(open_val(config, about["classes"]), config, train=False, device=device)


def with_data(about: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = about["config"]
    return {**about, "config": replace(config, data=replace(config.data, **changes))}


def record(about: dict[str, Any], device: torch.device, commit: str | None) -> dict[str, Any]:
    """Of what images, by what command, on what machine. Absolute paths are cut to their last two names."""
    source = about["config"].data.source
    return {**script_record(device, commit), "data": short(Path(source)) if source.startswith("/") else source}


def script_record(device: torch.device, commit: str | None) -> dict[str, Any]:
    made = make_record(device, sys.argv, commit)
    return {**made, "command": made["command"].replace("msvit", "python", 1)}


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def source_line(results: dict[str, Any]) -> str:
    """What stands below a table."""
    changes = " and changes" if results.get("dirty") else ""
    return f"`{results['command']}`, {results['machine']}, commit {results['commit']}{changes}."


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_script(main: Callable[[], None]) -> None:
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
