"""Predictions of a folder of images as one table: one row per image, in the order of their paths.

    run, out = Path("runs/photos"), Path("predictions.parquet")
    found = write_predictions(run, Path("photos"), out, partial(predict_here, read_predictor(run)), top=5)
    found.num_images, found.num_failed       # a file that cannot be read is a row with its error

    path, label_1, probability_1, label_2, ..., tokens, max_tokens, gmacs, error

The sorted list of paths is cut into shards. The rows of a finished shard lie in OUT.parts as one file, written whole or
not at all, beside a manifest of everything that rows depend on. The same call after an interruption predicts only the
shards that are missing; another call for the same OUT is a ValueError. In the end all are joined and OUT.parts is
removed. Shards may be predicted by many processes, on machines that share the folder (`msvit_lab.on_ray`): whichever
writes a shard, its rows are in the table once.
"""

import csv
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from msvit.image_files import read_image
from msvit.prediction import Prediction, groups
from msvit.saving.file import check_writable, replacing
from msvit_lab.folder_lock import locked
from msvit_lab.predict import Predictor
from msvit_lab.runs import is_run
from msvit_lab.viz.files import list_files

FORMAT = 1
SHARD = 256  # images: seconds of work, and a million are 4,000 files
ROW_GROUP = 256  # shards that are one group of rows in Parquet
MANIFEST = "manifest.json"
NUMBERS = {"tokens": int, "max_tokens": int, "gmacs": float}  # columns behind the classes
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Which images are predicted by which model. Paths are absolute, as other machines see them."""

    run: Path
    images: Path
    out: Path
    top: int
    model: str  # fingerprint
    paths: tuple[str, ...]  # below `images`, sorted

    @property
    def parts(self) -> Path:
        return self.out.with_name(f"{self.out.name}.parts")

    @property
    def num_shards(self) -> int:
        return math.ceil(len(self.paths) / SHARD)

    @property
    def columns(self) -> list[str]:
        classes = [f"{kind}_{place}" for place in range(1, self.top + 1) for kind in ("label", "probability")]
        return ["path", *classes, *NUMBERS, "error"]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        own = {"run": str(self.run), "model": self.model, "images": str(self.images), "top": self.top}
        return {"format": FORMAT, "shard": SHARD, **own, "paths": list(self.paths)}

    def shard(self, number: int) -> tuple[str, ...]:
        return self.paths[number * SHARD : (number + 1) * SHARD]

    def part(self, number: int) -> Path:
        return self.parts / f"{number:07d}.jsonl"

    def missing(self) -> list[int]:
        there = {entry.name for entry in os.scandir(self.parts)}
        return [number for number in range(self.num_shards) if self.part(number).name not in there]


@dataclass(frozen=True)
class Summary:
    num_images: int
    num_failed: int


PredictShards = Callable[[Plan, list[int]], Iterator[int]]  # writes the part of each of these shards, yields its number


def write_predictions(
    run: Path,
    images: Path,
    out: Path,
    predict_shards: PredictShards,
    top: int = 5,
    progress: Callable[[int, int], None] = lambda num_done, num_images: None,
) -> Summary:
    """Predict every image below a folder that has no row yet, and join all rows.

    `predict_shards` is `predict_here` with a predictor, or that of `msvit_lab.on_ray`. `progress` is called with the
    number of images that have rows, and of all.
    """
    check_out(out)
    plan = make_plan(run, images, out, top)
    with open_parts(plan) as finished:
        if finished is not None:  # and killed before the parts were removed
            shutil.rmtree(plan.parts, ignore_errors=True)
            return finished
        missing = plan.missing()
        num_done = len(plan.paths) - sum(len(plan.shard(number)) for number in missing)
        progress(num_done, len(plan.paths))
        for number in predict_shards(plan, missing) if missing else ():
            num_done += len(plan.shard(number))
            progress(num_done, len(plan.paths))
        return join(plan)


def check_out(out: Path) -> None:
    """Raise ValueError unless a table can be written there."""
    if out.suffix not in WRITERS:
        known = ", ".join(WRITERS)
        raise ValueError(f"--out is {out}, but must end with one of {known}; call it {out.with_suffix('.csv').name}")
    if out.is_dir():
        raise ValueError(f"--out is {out}, which is a folder; give a file in it, such as {out / 'predictions.csv'}")
    if out.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise ValueError(
                f"{out.name} needs pyarrow, which is not installed; pip install 'pyarrow>=15', or call it "
                f"{out.with_suffix('.csv').name} or {out.with_suffix('.jsonl').name}"
            ) from None
    check_writable(out.parent, "choose another --out")


def make_plan(run: Path, images: Path, out: Path, top: int) -> Plan:
    if not images.is_dir():
        raise ValueError(f"{images} is no folder, but --out needs one: paths in the table are those below it")
    images = images.resolve()
    paths = sorted(below.as_posix() for _, below in list_files([images], command="predict"))
    return Plan(run.resolve(), images, out.resolve(), top, fingerprint(run), tuple(paths))


def fingerprint(folder: Path) -> str:
    """SHA-256 of the files that a run's model, or a saved one, is read from."""
    files = [folder / "config.json", *sorted((folder / "model").glob("*"))]
    if not is_run(folder):
        files = sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while chunk := file.read(1 << 22):
                    digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def open_parts(plan: Plan) -> Iterator[Summary | None]:
    """OUT.parts, locked, with this plan's manifest; the summary, if its table is there already.

    Raise ValueError if it was begun with another plan, or OUT is another file.
    """
    exists = ValueError(f"{plan.out} exists; delete it, or choose another --out")
    manifest = plan.parts / MANIFEST
    if plan.out.exists() and not manifest.is_file():
        raise exists
    plan.parts.mkdir(exist_ok=True)
    with locked(plan.parts):
        finished = None
        if manifest.is_file():
            before = read_manifest(manifest)
            check_same(plan, before)
            finished = before["finished"] if plan.out.exists() else None
            if plan.out.exists() and finished is None:
                raise exists
        else:
            write_manifest(plan)
        yield None if finished is None else Summary(**finished)


def check_same(plan: Plan, before: dict[str, Any]) -> None:
    remedy = f"repeat the command that began it, or delete {plan.parts} to begin anew"
    for name, value in plan.manifest.items():
        if name != "paths" and before.get(name) != value:
            raise ValueError(f"{plan.parts} was begun with {name} {before.get(name)}, but now it is {value}; {remedy}")
    old, new = set(before["paths"]), set(plan.paths)
    if old != new:
        first = min(old ^ new)
        raise ValueError(
            f"{plan.images} had {len(old)} images when {plan.parts} was begun and has {len(new)} now; {first} was "
            f"{'added' if first in new else 'removed'}; {remedy}"
        )


def write_manifest(plan: Plan, finished: Summary | None = None) -> None:
    with replacing(plan.parts / MANIFEST) as part:
        part.write_text(json.dumps({**plan.manifest, "finished": finished and asdict(finished)}))


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        return {**found, "paths": list(found["paths"]), "finished": found["finished"]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); delete {path.parent} to begin anew") from None


def predict_here(predictor: Predictor, plan: Plan, numbers: list[int]) -> Iterator[int]:
    """Shard after shard, in this process."""
    for number in numbers:
        write_shard(plan.part(number), predictor, plan.images, plan.shard(number), plan.top)
        yield number


def write_shard(part: Path, predictor: Predictor, images: Path, paths: Iterable[str], top: int) -> None:
    """The rows of these images, below `images`, as one file."""
    rows = predict_rows(predictor, images, paths, top)
    lines = [json.dumps(row, allow_nan=False) for row in rows]
    with replacing(part) as beside:
        beside.write_text("".join(f"{line}\n" for line in lines))


def predict_rows(predictor: Predictor, images: Path, paths: Iterable[str], top: int) -> list[Row]:
    """A row for each image, in order. Files are read and prepared in threads."""

    def prepare(path: str) -> Any:
        try:
            return predictor.prepare(read_image(images / path))
        except ValueError as error:
            return error

    rows: list[Row] = []
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for group in groups(paths, predictor.window):
            prepared = list(threads.map(prepare, group))
            usable = [each for each in prepared if not isinstance(each, ValueError)]
            found = iter(predictor.predict_prepared(usable, top) if usable else [])
            for path, each in zip(group, prepared, strict=True):
                failed = isinstance(each, ValueError)
                rows.append(failed_row(path, str(each)) if failed else make_row(path, next(found)))
    return rows


def make_row(path: str, found: Prediction) -> Row:
    if not all(math.isfinite(score.probability) for score in found.top):
        return failed_row(path, f"{path} has probabilities that are not finite; are the model's weights?")
    row: Row = {"path": printable(path)}
    for place, score in enumerate(found.top, 1):
        row |= {f"label_{place}": score.name, f"probability_{place}": score.probability}
    return row | {name: getattr(found, name) for name in NUMBERS}


def failed_row(path: str, error: str) -> Row:
    return {"path": printable(path), "error": printable(error)}


def printable(text: str) -> str:
    """Without the halves of characters that stand for bytes of a file's name that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def join(plan: Plan) -> Summary:
    """All parts as one table, which is there whole or not at all; then the parts are removed."""
    num_failed = 0

    def shards() -> Iterator[list[Row]]:
        nonlocal num_failed
        for number in range(plan.num_shards):
            rows = read_part(plan, number)
            num_failed += sum(row["error"] is not None for row in rows)
            yield rows

    with replacing(plan.out) as part:
        WRITERS[plan.out.suffix](part, plan, shards())
        found = Summary(len(plan.paths), num_failed)
        write_manifest(plan, finished=found)
    shutil.rmtree(plan.parts, ignore_errors=True)
    return found


def read_part(plan: Plan, number: int) -> list[Row]:
    """The rows of a shard with all columns. Raise ValueError unless they are those of its images."""
    path = plan.part(number)
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if [row["path"] for row in rows] != [printable(each) for each in plan.shard(number)]:
            raise ValueError("its rows are not those of its images")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and repeat the command") from None
    return [{name: row.get(name) for name in plan.columns} for row in rows]


def write_csv(path: Path, plan: Plan, shards: Iterator[list[Row]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, plan.columns)
        writer.writeheader()
        for rows in shards:
            writer.writerows(rows)


def write_jsonl(path: Path, plan: Plan, shards: Iterator[list[Row]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for rows in shards:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)


def write_parquet(path: Path, plan: Plan, shards: Iterator[list[Row]]) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    kinds = {name: pa.int64() if kind is int else pa.float64() for name, kind in NUMBERS.items()}
    kinds |= {name: pa.float64() for name in plan.columns if name.startswith("probability_")}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in plan.columns])
    with ParquetWriter(path, schema) as writer:
        for some in groups(shards, ROW_GROUP):
            writer.write_table(pa.Table.from_pylist([row for rows in some for row in rows], schema))


WRITERS = {".parquet": write_parquet, ".csv": write_csv, ".jsonl": write_jsonl}
