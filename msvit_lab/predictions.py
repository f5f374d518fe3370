"""Predictions of a folder of images as one table: one row per image, in the order of their paths.

    found = write_predictions(Path("runs/photos"), predictor, Path("photos"), Path("predictions.parquet"), top=5)
    found.num_images, found.num_failed       # a file that cannot be read is a row with its error

    path, label_1, probability_1, label_2, ..., tokens, max_tokens, gmacs, error

Until all rows are there they lie in OUT.parts, beside a manifest of everything that they depend on. The same call after
an interruption predicts only what is missing; another call for the same OUT is a ValueError.
"""

import csv
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from msvit.prediction import Prediction, groups
from msvit.saving.file import check_writable, replacing
from msvit_lab.folder_lock import locked
from msvit_lab.json_values import write_json
from msvit_lab.predict import Predictor, predict_paths
from msvit_lab.runs import is_run
from msvit_lab.viz.files import list_files

FORMAT = 1
SHARD = 256  # images whose rows are written at once: seconds of work
ROW_GROUP = 1 << 16  # rows that are one group in Parquet
MANIFEST, ROWS = "manifest.json", "rows.jsonl"
NUMBERS = {"tokens": int, "max_tokens": int, "gmacs": float}  # columns behind the classes
Row = dict[str, Any]


class Summary(NamedTuple):
    num_images: int
    num_failed: int


def write_predictions(
    run: Path, predictor: Predictor, images: Path, out: Path, top: int = 5, quiet: bool = True,
) -> Summary:  # fmt: skip
    """Predict every image below a folder that has no row yet, and join all rows. `predictor` is that of `run`."""
    check_out(out)
    paths = sorted(below.as_posix() for _, below in list_files([images], command="predict"))
    manifest = {"format": FORMAT, "run": str(run.resolve()), "model": fingerprint(run), "images": str(images.resolve())}
    parts = out.with_name(f"{out.name}.parts")
    if out.exists() and not (parts / MANIFEST).is_file():
        raise ValueError(f"{out} exists; delete it, or choose another --out")
    parts.mkdir(exist_ok=True)
    with locked(parts):
        check_manifest(parts, {**manifest, "top": top, "paths": paths})
        num_done = whole_rows(parts / ROWS)
        joined = out.exists() and num_done == len(paths)  # and killed before the parts were removed
        if out.exists() and not joined:
            raise ValueError(f"{out} exists, but {num_done} of {len(paths)} images have rows; choose another --out")
        bar = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True, quiet=quiet))
        with bar, (parts / ROWS).open("a") as file:
            task = bar.add_task("images", total=len(paths), completed=num_done)
            for group in groups(paths[num_done:], SHARD):
                rows = predict_rows(predictor, images, group, top)
                file.write("".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows))
                file.flush()
                bar.advance(task, len(rows))
        classes = [f"{kind}_{place}" for place in range(1, top + 1) for kind in ("label", "probability")]
        columns = ["path", *classes, *NUMBERS, "error"]
        if not joined:
            with replacing(out) as part:
                WRITERS[out.suffix](part, columns, read_rows(parts, columns, paths))
        num_failed = sum(row["error"] is not None for row in read_rows(parts, columns, paths))
        shutil.rmtree(parts, ignore_errors=True)
    return Summary(len(paths), num_failed)


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


def fingerprint(folder: Path) -> str:
    """SHA-256 of the files that a run's model, or a saved one, is read from."""
    files = [folder / "config.json", *sorted((folder / "model").glob("*"))]
    if not is_run(folder):
        files = sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def check_manifest(parts: Path, manifest: dict[str, Any]) -> None:
    """Write it, if the table is begun here. Raise ValueError if it was begun with another one."""
    path, remedy = parts / MANIFEST, f"repeat the command that began it, or delete {parts} to begin anew"
    if not path.is_file():
        return write_json(path, manifest)
    try:
        before = json.loads(path.read_text())
        old, new = set(before["paths"]), set(manifest["paths"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); delete {parts} to begin anew") from None
    for name, value in manifest.items():
        if name != "paths" and before.get(name) != value:
            raise ValueError(f"{parts} was begun with {name} {before.get(name)}, but now it is {value}; {remedy}")
    if old != new:
        first = min(old ^ new)
        raise ValueError(
            f"{manifest['images']} had {len(old)} images when {parts} was begun and has {len(new)} now; {first} was "
            f"{'added' if first in new else 'removed'}; {remedy}"
        )


def whole_rows(path: Path) -> int:
    """How many rows there are. What a killed process has half written is cut off."""
    num = end = 0
    with path.open("a+b") as file:
        file.seek(0)
        for line in file:
            if line.endswith(b"\n"):
                num, end = num + 1, end + len(line)
        file.truncate(end)
    return num


def predict_rows(predictor: Predictor, images: Path, paths: Sequence[str], top: int) -> list[Row]:
    """A row for each image, in order."""
    found = predict_paths(predictor, [images / path for path in paths], top, predictor.window)
    return [
        failed_row(path, str(each)) if isinstance(each, ValueError) else make_row(path, each)
        for path, (_, each) in zip(paths, found, strict=True)
    ]


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


def read_rows(parts: Path, columns: list[str], paths: list[str]) -> Iterator[Row]:
    """All rows with all columns. Raise ValueError unless they are those of these images."""
    try:
        with (parts / ROWS).open() as file:
            for line, path in zip(file, paths, strict=True):
                row = json.loads(line)
                if row["path"] != printable(path):
                    raise ValueError(f"a row is of {row['path']}, but must be of {path}")
                yield {name: row.get(name) for name in columns}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{parts / ROWS} is damaged ({error}); delete {parts} to begin anew") from None


def write_csv(path: Path, columns: list[str], rows: Iterator[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_jsonl(path: Path, columns: list[str], rows: Iterator[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def write_parquet(path: Path, columns: list[str], rows: Iterator[Row]) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    kinds = {name: pa.int64() if kind is int else pa.float64() for name, kind in NUMBERS.items()}
    kinds |= {name: pa.float64() for name in columns if name.startswith("probability_")}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in columns])
    with ParquetWriter(path, schema) as writer:
        for some in groups(rows, ROW_GROUP):
            writer.write_table(pa.Table.from_pylist(some, schema))


WRITERS = {".parquet": write_parquet, ".csv": write_csv, ".jsonl": write_jsonl}
