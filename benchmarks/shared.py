"""What the scripts share: arguments, records and tables; and validation images that runs are compared on.

abouts = read_abouts([Path("runs/gated"), Path("runs/disc")], data=None)    # classifiers, of the same images
for batch in val_loader(abouts[0], device).iterate(0):
    batch.image, batch.label
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from msvit.saving.file import replacing
from msvit_lab.bench.images import short
from msvit_lab.bench.results import make_record
from msvit_lab.build import make_loader, open_val
from msvit_lab.data import Loader
from msvit_lab.json_values import write_json
from msvit_lab.runs import read_config
from msvit_lab.viz.compare import readable, setting  # noqa: F401  (for the scripts, too)

ROOT = Path(__file__).resolve().parents[1]
BATCH = 256


def script_parser(doc: str | None, *, results: bool = True, data: bool = False) -> argparse.ArgumentParser:
    """With --out and --commit for a file of `results`, and --data for runs compared on images."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if results:
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--commit", help="where the source is from, if it is no git checkout")
    if data:
        parser.add_argument("--data", help="validation images, if not where they were in training")
    return parser


def run_script(main: Callable[[], None]) -> None:
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")


def write(out: Path, table: Callable[[dict[str, Any]], str], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure, write the results and print their table; an `out` that cannot be made fails before the measurement."""
    out.parent.mkdir(parents=True, exist_ok=True)
    results = measure()
    write_json(out, results)
    print(table(results))
    return results


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def record(device: torch.device, commit: str | None, source: str | None = None) -> dict[str, Any]:
    """By what command, on what machine, of what images. Absolute paths are cut to their last two names."""
    made = make_record(device, sys.argv, commit, program="python")
    return made if source is None else made | {"data": short(Path(source)) if source.startswith("/") else source}


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
    """Raise ValueError unless these settings of the data are the same in all runs."""
    first = abouts[0]["config"].data
    for run, about in zip(runs, abouts, strict=True):
        for name in settings:
            own, other = getattr(about["config"].data, name), getattr(first, name)
            if own != other:
                raise ValueError(f"{run} has data.{name}={own}, but {runs[0]} has {other}; {why}")


def val_loader(about: dict[str, Any], device: torch.device) -> Loader:
    """Every validation image once, in order; without a cache, as they are read once."""
    config = with_data(about, cache=False)["config"]
    config = replace(config, optim=replace(config.optim, batch_size=BATCH, accumulate=1))
    return make_loader(open_val(config, about["classes"]), config, train=False, device=device)


def with_data(about: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = about["config"]
    return {**about, "config": replace(config, data=replace(config.data, **changes))}


def by_setting(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ in their seed alone, together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(setting(run["name"]), []).append(run)
    return groups


def markdown(heads: list[str], rows: list[list[str]], source: str) -> str:
    """A table, and below it where it is from."""
    lines = (f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))
    return "\n".join([*lines, "", source])


def source_line(results: dict[str, Any]) -> str:
    """Command, machine and commit."""
    changes = " and changes" if results.get("dirty") else ""
    return f"`{results['command']}`, {results['machine']}, commit {results['commit']}{changes}."


def put(page: Path, name: str, table: str) -> None:
    """Write the table into the page, between <!-- NAME --> and <!-- /NAME -->."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.read_text().partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no place for the table; put {start} and {end} around it")
    with replacing(page) as part:
        part.write_text(f"{before}{start}\n{table}\n{end}{after}")
