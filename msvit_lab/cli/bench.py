"""msvit bench."""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from msvit_lab.cli.app import DEVICE, app, choose_device, console, errors, numbers, pairs, plain_errors, say, words

USUAL = "vit_small_patch16_224"
WIDTH = 120  # of the table, also where the output is no terminal


@app.command()
@plain_errors
def bench(
    models: list[str] = typer.Argument(
        None, metavar="[MODEL_OR_FOLDER]...",
        help="timm models (vit_small_patch16_224 by default), or folders of msvit.save and runs: as they are.",
    ),
    model: list[str] = typer.Option([], help="The same; repeated, or separated by commas."),
    size: str | None = typer.Option(
        None, help="Sides of the input in px, separated by commas; 224, or a folder's own, by default."
    ),
    batch: str = typer.Option("1", help="Batch sizes, separated by commas."),
    train: bool = typer.Option(False, "--train", help="Time a training step instead of inference."),
    runs: str | None = typer.Option(None, help="Trained runs instead: a folder of them, or 'runs/sweep/*-s0'."),
    compile: bool = typer.Option(True, help="With --runs: compile each; if not, CUDA graphs only, in seconds."),
    suite: str | None = typer.Option(None, help="readme or cpu: a list of workloads instead."),
    rows: str | None = typer.Option(None, help="What is timed, separated by commas; by default what suits the device."),
    images: Path | None = typer.Option(None, help="A folder of images or a tar; drawn scenes by default."),
    gate: str | None = typer.Option(
        None, help="default (trained; the default), learned (untrained; that of suites), disc, ... or a folder."
    ),
    share: float | None = typer.Option(
        None, help="Mean share of fine cells, 0.33 by default; a trained gate decides by itself."
    ),
    reducer: str = typer.Option("", help="Rows of evit, dynamicvit, tome too, separated by commas: plain and gated."),
    rate: float | None = typer.Option(None, help="Of tokens reducers keep; by default what makes them cost as much."),
    device: str | None = DEVICE,
    dtype: str | None = typer.Option(None, help="float32, bfloat16 or float16; bfloat16 on a GPU, float32 on a CPU."),
    rounds: int = typer.Option(40, min=2, help="Rounds; in each every row is timed once."),
    seconds: float = typer.Option(60.0, help="Per workload: no further round begins after that many."),
    minutes: float | None = typer.Option(None, help="No further workload begins after that many."),
    settings: list[str] = typer.Option([], "--set", help="A setting of the model as in msvit train; may be repeated."),
    out: Path | None = typer.Option(None, help="JSON file for the results; other workloads in it are kept."),
    commit: str | None = typer.Option(None, help="For the record, where the source is no clean git checkout."),
    as_json: bool = typer.Option(False, "--json", help="One line of JSON per workload instead of its table."),
) -> None:
    """Do fewer tokens take less time? All ways to run a model, timed in turn; gate and tokenizer are inside.

    Speed-ups are over the compiled dense host if it is among the rows, else over the eager one. The share says how much
    of the saved multiply-adds became time: speed-up / ratio of multiply-adds, from calls back to back for batches on a
    GPU, else from single calls. Reducers take tokens away between the blocks, in the plain rows from all tokens, in the
    gated ones from those a gate has left; without a rate all do as many multiply-adds as the gate alone leaves.

    Of a folder its own gate and reducer are timed, beside its dense host. With --runs every run is timed on its own
    validation images, of a segmentation run encoder and decoder on windows.

    Example: msvit bench vit_small_patch16_224 --size 224 --batch 1,8 --images photos --out bench.json
    """
    from msvit.reduction import REDUCERS
    from msvit_lab.bench.images import Pictures
    from msvit_lab.bench.machine import measure_rates
    from msvit_lab.bench.results import make_record, read_results, write_result
    from msvit_lab.bench.rows import check_known, check_rows
    from msvit_lab.bench.trained import find_runs, measure_runs
    from msvit_lab.bench.workload import SUITES, Options, Workload, measure
    from msvit_lab.json_values import write_json

    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    record, sizes = make_record(where, sys.argv[1:], commit), numbers(batch, int)
    names = [*(models or ()), *(name for text in model for name in words(text))] or [USUAL]
    if runs is not None:
        folders = find_runs(runs)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)  # before hours of timing
        for num in sizes:
            found = measure_runs(
                folders, device=where, dtype=kind, batch=num, rounds=rounds, seconds=seconds, compile=compile
            ) | {"record": record}
            show(found, show_runs, as_json)
            if out is not None:
                write_json(out if len(sizes) == 1 else out.with_stem(f"{out.stem}-b{num}"), found)
        return
    chosen, reducers = None if rows is None else check_rows(words(rows)), words(reducer)
    check_known("reducer", reducers, REDUCERS)
    check_known("suite", [] if suite is None else [suite], SUITES)
    works = SUITES[suite] if suite is not None else [
        Workload(name, side, num, train=train)
        for name in names for side in (own_sizes(name) if size is None else numbers(size, int)) for num in sizes
    ]  # fmt: skip
    check_works(works)
    if gate and (own := [work.model for work in works if Path(work.model).is_dir()]):
        raise ValueError(f"--gate is for timm models, but {own[0]} has a gate of its own; leave it out")
    gate = gate or ("default" if suite is None else "learned")
    if out is not None and out.exists():
        read_results(out)  # before hours of timing: is it such a file?
    options = Options(
        device=where, dtype=kind, rows=chosen, gate=gate, share=share, rounds=rounds, seconds=seconds,
        settings=pairs(settings), reducers=reducers, rate=rate,
    )  # fmt: skip
    pictures, rates, start = Pictures(images), measure_rates(where), time.perf_counter()
    for work in works:
        if minutes is not None and time.perf_counter() - start > 60 * minutes:
            say(f"left out: {work}; {minutes:g} minutes are over", errors if as_json else console)
            continue
        found = measure(work, options, pictures, rates) | {"record": record}
        show(found, partial(show_workload, title=str(work)), as_json)
        if out is not None:
            write_result(out, found)


def show(found: dict[str, Any], table: Callable[[dict[str, Any]], None], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found), flush=True)
    else:
        table(found)


def choose_dtype(name: str | None, device: Any) -> Any:
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is not None and name not in known:
        raise ValueError(f"--dtype is {name!r}, but must be one of {', '.join(known)}")
    return known[name or ("bfloat16" if device.type == "cuda" else "float32")]


def own_sizes(name: str) -> list[int]:
    """The size that a folder's model was made for; of a timm model 224 px."""
    if not Path(name).is_dir():
        return [224]
    from msvit_lab.hosts import read_model

    preprocessing = read_model(Path(name))[0].preprocessing
    if preprocessing is None:
        raise ValueError(f"{name} does not say what size its images have; give --size 224")
    return [preprocessing.size]


def check_works(works: list[Any]) -> None:
    from msvit.saving.host import check_name

    if not works:
        raise ValueError("there is nothing to time: --model, --size and --batch each need at least one value")
    for work in works:
        if not Path(work.model).is_dir():
            check_name(work.model)
        if work.size < 1 or work.batch < 1:
            raise ValueError(f"--size is {work.size} and --batch is {work.batch}, but both must be at least 1")


def show_workload(found: dict[str, Any], title: str) -> None:
    tokens, ratio = found["tokens"], found["mac_ratio"]
    about = (
        f": {tokens['mean']:.1f} ± {tokens['std']:.1f} of {tokens['dense']} tokens before the first block, "
        f"{ratio:.2f}x fewer multiply-adds, gate included ({found['gate']}); "
        f"{found['images']['num']} images of {found['images']['from']}; {found['rounds']} rounds"
    )
    say(Text.assemble((title, "bold"), about))
    show_table([row for row in found["rows"] if row["trouble"] is None], {
        "row": lambda row: row["name"],
        "ms a call": lambda row: median_and_spread(row["ms"]),
        "back to back": lambda row: row["burst_ms"] and median_and_spread(row["burst_ms"]),
        "images/s": lambda row: f"{row['images_per_second']:,.0f}",
        "speed-up": lambda row: row["speed_up"] and f"{row['speed_up']['median']:.2f}x",
        "MACs": lambda row: f"1/{row['mac_ratio']:.2f}",
        "share": lambda row: row["share"] and f"{row['share']:.2f}",
        "tokens' share": lambda row: row["tokens_share"] and f"{row['tokens_share']:.2f}",
        "peak memory": lambda row: row["memory"] and f"{row['memory']['peak_mb']:,.0f} MB",
    })  # fmt: skip
    say(
        "speed-up: over dense, the host as it is; share: speed-up over the ratio of multiply-adds (1: all that is "
        "saved becomes time); compiled: by torch.compile (dense) and msvit.compile"
    )
    for row in found["rows"]:
        if row["trouble"] is not None:
            say(f"{row['name']} failed: {row['trouble']}")


def show_runs(found: dict[str, Any]) -> None:
    segments = found["task"] == "segment"
    name, key = ("mIoU", "miou") if segments else ("top-1", "top1")
    show_table(found["rows"], {
        "run": lambda row: row["name"],
        name: lambda row: None if row[key] is None else f"{row[key]:.1%}",
        "tokens": lambda row: f"{row['tokens']:.1f}",
        "encoder GMACs" if segments else "GMACs": lambda row: f"{row['gmacs']:.3f}",
        "ms a batch": lambda row: median_and_spread(row["ms"]),
        "windows/s" if segments else "images/s": lambda row: f"{row['images_per_second']:,.0f}",
        "speed-up": lambda row: f"{row['speed_up']['median']:.2f}x",
    }, title=f"batch {found['batch']}{' of windows, decoder included' if segments else ''}")  # fmt: skip


def show_table(
    rows: list[dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], str | None]], title: str | None = None
) -> None:
    """Without columns that no row has a value for, such as those that only a GPU has."""
    cells = {head: [cell(row) or "-" for row in rows] for head, cell in columns.items()}
    cells = {head: column for head, column in cells.items() if set(column) - {"-"}}
    table = Table(*(Column(head, no_wrap=True) for head in cells), title=title)
    for line in zip(*cells.values(), strict=True):
        table.add_row(*line)
    Console(width=max(console.width, WIDTH), markup=False).print(table)


def median_and_spread(values: dict[str, float]) -> str:
    """The median, and half the distance of the quartiles."""
    return f"{values['median']:.3f} ±{(values['high'] - values['low']) / 2:.3f}"
