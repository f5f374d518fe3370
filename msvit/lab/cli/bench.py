"""msvit bench."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from msvit.lab.cli.app import app, console, numbers, pairs, plain_errors, words

WIDTH = 120  # of the table, also where the output is no terminal


@app.command()
@plain_errors
def bench(
    model: list[str] = typer.Option(["vit_small_patch16_224"], help="timm models; repeated, or separated by commas."),
    size: str = typer.Option("224", help="Sides of the input in px, separated by commas."),
    batch: str = typer.Option("1", help="Batch sizes, separated by commas."),
    train: bool = typer.Option(False, "--train", help="Time a training step instead of inference."),
    runs: str | None = typer.Option(None, help="Trained runs instead: a folder of them, or 'runs/sweep/*-s0'."),
    compile: bool = typer.Option(True, help="With --runs: compile each; if not, CUDA graphs only, in seconds."),
    suite: str | None = typer.Option(None, help="readme, h200 or cpu: a list of workloads instead."),
    rows: str | None = typer.Option(None, help="What is timed, separated by commas; by default what suits the device."),
    images: Path | None = typer.Option(None, help="A folder of images or a tar; drawn scenes by default."),
    gate: str = typer.Option("learned", help="default (trained), learned (untrained), entropy, disc, ... or a folder."),
    gate_from: Path | None = typer.Option(None, help="A trained gate: a folder of msvit.save_gate, or a run."),
    share: float | None = typer.Option(
        None, help="Mean share of fine cells, 0.33 by default; a trained gate decides by itself."
    ),
    reducer: str = typer.Option("", help="Rows of evit, dynamicvit, tome too, separated by commas: plain and gated."),
    rate: float | None = typer.Option(None, help="Of tokens reducers keep; by default what makes them cost as much."),
    device: str | None = typer.Option(None, help="cuda or cpu; cuda where there is one."),
    dtype: str | None = typer.Option(None, help="float32, bfloat16 or float16; bfloat16 on a GPU, float32 on a CPU."),
    rounds: int = typer.Option(40, min=2, help="Rounds; in each every row is timed once."),
    seconds: float = typer.Option(60.0, help="Per workload: no further round begins after that many."),
    minutes: float | None = typer.Option(None, help="No further workload begins after that many."),
    settings: list[str] = typer.Option([], "--set", help="A setting of the model as in msvit train; may be repeated."),
    out: Path | None = typer.Option(None, help="JSON file for the results; other workloads in it are kept."),
    resume: bool = typer.Option(False, "--resume", help="Leave out workloads that --out already has."),
    commit: str | None = typer.Option(None, help="For the record, where the source is no clean git checkout."),
    as_json: bool = typer.Option(False, "--json", help="Print one line of JSON for each workload, too."),
) -> None:
    """Do fewer tokens take less time? All ways to run a model, timed in turn; gate and tokenizer are inside.

    Speed-ups are over the compiled dense host if it is among the rows, else over the eager one. The share says how much
    of the saved multiply-adds became time: speed-up / ratio of multiply-adds, from calls back to back for batches on a
    GPU, else from single calls. Reducers take tokens away between the blocks, in the plain rows from all tokens, in the
    gated ones from those a gate has left; without a rate all do as many multiply-adds as the gate alone leaves.

    Example: msvit bench --model vit_small_patch16_224 --size 224 --batch 1,8 --images photos --out bench.json
    """
    import torch

    from msvit.lab.bench.images import Pictures
    from msvit.lab.bench.record import make_record
    from msvit.lab.bench.results import key, read_results, write_result
    from msvit.lab.bench.roofline import measure_rates
    from msvit.lab.bench.rows import check_rows, reducer_rows
    from msvit.lab.bench.suites import suite as find_suite
    from msvit.lab.bench.workload import Options, Workload, describe, measure

    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    if runs is not None:
        record = make_record(where, sys.argv[1:], commit)
        time_runs(runs, where, kind, numbers(batch, int), rounds, seconds, compile, record, out, as_json)
        return
    names = None if rows is None else check_rows(words(rows))
    reducers = words(reducer)
    reducer_rows(reducers)  # are they known?
    works = find_suite(suite) if suite is not None else [
        Workload(name, side, num, train=train)
        for name in (name for text in model for name in words(text))
        for side in numbers(size, int)
        for num in numbers(batch, int)
    ]  # fmt: skip
    check_works(works)
    done = {key(found) for found in read_results(out)} if out is not None and out.exists() else set()
    options = Options(
        device=where, dtype=kind, rows=names, gate=gate, gate_from=gate_from, share=share, rounds=rounds,
        seconds=seconds, settings=pairs(settings), reducers=reducers, rate=rate,
    )  # fmt: skip
    pictures = Pictures(images)
    record = make_record(where, sys.argv[1:], commit)
    rates = measure_rates(where)
    start = time.perf_counter()
    for work in works:
        late = minutes is not None and time.perf_counter() - start > 60 * minutes
        if late or (resume and key(describe(work, options, pictures)) in done):
            why = f"{minutes:g} minutes are over" if late else f"{out} has it"
            console.print(f"left out: {work}; {why}", highlight=False, markup=False, soft_wrap=True)
            continue
        found = measure(work, options, pictures, rates) | {"record": record}
        show(found, str(work))
        if as_json:
            print(json.dumps(found), flush=True)
        if out is not None:
            write_result(out, found)
    if where.type == "cuda":
        torch.cuda.synchronize()


def time_runs(
    runs: str, device: Any, dtype: Any, batches: list[int], rounds: int, seconds: float, compile: bool,
    record: dict[str, Any], out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Trained runs side by side."""
    from msvit.lab.bench.trained import find_runs, measure_runs
    from msvit.lab.runs import write_json

    folders = find_runs(runs)
    for batch in batches:
        found = measure_runs(
            folders, device=device, dtype=dtype, batch=batch, rounds=rounds, seconds=seconds, compile=compile
        )
        table = Table("run", "top-1", "tokens", "GMACs", "ms a batch", "images/s", "speed-up", title=f"batch {batch}")
        for row in found["rows"]:
            table.add_row(
                row["name"], f"{row['top1']:.1%}", f"{row['tokens']:.1f}", f"{row['gmacs']:.3f}",
                spread_words(row["ms"]), f"{row['images_per_second']:,.0f}", f"{row['speed_up']['median']:.2f}x",
            )  # fmt: skip
        Console(width=max(console.width, WIDTH), markup=False).print(table)
        found |= {"record": record}
        if as_json:
            print(json.dumps(found), flush=True)
        if out is not None:
            write_json(out if len(batches) == 1 else out.with_stem(f"{out.stem}-b{batch}"), found)


def choose_device(name: str | None) -> Any:
    import torch

    if name not in (None, "cuda", "cpu"):
        raise ValueError(f"--device is {name!r}, but must be cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no CUDA device here; leave it out, or give --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def choose_dtype(name: str | None, device: Any) -> Any:
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is not None and name not in known:
        raise ValueError(f"--dtype is {name!r}, but must be one of {', '.join(known)}")
    return known[name or ("bfloat16" if device.type == "cuda" else "float32")]


def check_works(works: list[Any]) -> None:
    from msvit.host_config import check_name

    if not works:
        raise ValueError("there is nothing to time: --model, --size and --batch each need at least one value")
    for work in works:
        check_name(work.model)
        if work.size < 1 or work.batch < 1:
            raise ValueError(f"--size is {work.size} and --batch is {work.batch}, but both must be at least 1")


def show(found: dict[str, Any], title: str) -> None:
    """The table of a workload."""
    tokens, ratio = found["tokens"], found["mac_ratio"]
    words = (
        f": {tokens['mean']:.1f} ± {tokens['std']:.1f} of {tokens['dense']} tokens, "
        f"{ratio:.2f}x fewer multiply-adds, gate included ({found['gate']}); "
        f"{found['images']['num']} images of {found['images']['from']}; {found['rounds']} rounds"
    )
    console.print(Text.assemble((title, "bold"), words), highlight=False, soft_wrap=True)
    rows = [row for row in found["rows"] if row["trouble"] is None]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "row": lambda row: row["name"],
        "ms a call": lambda row: spread_words(row["ms"]),
        "back to back": lambda row: "-" if row["burst_ms"] is None else spread_words(row["burst_ms"]),
        "images/s": lambda row: f"{row['images_per_second']:,.0f}",
        "speed-up": lambda row: "-" if row["speed_up"] is None else f"{row['speed_up']['median']:.2f}x",
        "MACs": lambda row: f"1/{row['mac_ratio']:.2f}",
        "share": lambda row: "-" if row["share"] is None else f"{row['share']:.2f}",
        "tokens' share": lambda row: "-" if row["tokens_share"] is None else f"{row['tokens_share']:.2f}",
        "peak memory": lambda row: "-" if row["memory"] is None else f"{row['memory']['peak_mb']:,.0f} MB",
    }
    cells = {head: [cell(row) for row in rows] for head, cell in columns.items()}
    cells = {head: column for head, column in cells.items() if set(column) - {"-"}}  # a GPU has what a CPU has not
    table = Table(*(Column(head, no_wrap=True) for head in cells))
    for line in zip(*cells.values(), strict=True):
        table.add_row(*line)
    Console(width=max(console.width, WIDTH), markup=False).print(table)
    for row in found["rows"]:
        if row["trouble"] is not None:
            console.print(f"{row['name']} failed: {row['trouble']}", highlight=False, markup=False, soft_wrap=True)


def spread_words(values: dict[str, float]) -> str:
    """The median, and half the distance of the quartiles."""
    return f"{values['median']:.3f} ±{(values['high'] - values['low']) / 2:.3f}"
