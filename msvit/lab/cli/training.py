"""msvit train, msvit sweep."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table

from msvit.lab.cli.app import AS_JSON, ROUNDS, app, check_rounds, console, plain_errors
from msvit.lab.interrupts import RESUME_CODE, Stopped, ending_as_ctrl_c

RECIPE = typer.Argument(help="scenes (built in), imagenet_vit, _deit or _swin, pets, pets_swin, ade20k or voc.")
DATA = typer.Option(None, help="Folder with train/ and val/, wds/FOLDER or hfds/NAME; the recipe's own by default.")
SET = typer.Option([], "--set", help="Any setting of the recipe, such as optim.lr=3e-4; may be repeated.")


def resumable(remedy: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that was stopped says how to go on. If it was asked to end, by a signal, its exit code is 75."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(*args: Any, **kwargs: Any) -> None:
            with ending_as_ctrl_c() as interrupted:
                try:
                    command(*args, **kwargs)
                except BaseException as error:
                    if not isinstance(error, Stopped) and not interrupted():
                        raise
                    words = str(error) if isinstance(error, Stopped) else f"interrupted; {remedy}"
                    Console(stderr=True).print(words, highlight=False, markup=False, soft_wrap=True)
                    raise typer.Exit(1 if type(error) is Stopped else RESUME_CODE) from None

        return run

    return wrap


@app.command()
@plain_errors
@resumable("the same command with --resume goes on from there")
def train(
    recipe: str = RECIPE,
    data: str | None = DATA,
    model: str | None = typer.Option(None, help="A timm model."),
    target: float | None = typer.Option(None, help="Wanted share of fine cells."),
    gate_weight: float | None = typer.Option(None, help="Weight of the gate loss."),
    gate_loss: str | None = typer.Option(None, help="gbas, bas, bas-flat, l0 or attention; edges for segmentation."),
    gate: str | None = typer.Option(None, help="learned, context, none, default (trained), disc ...; a folder."),
    gate_from: str | None = typer.Option(None, help="A trained gate: a folder of msvit.save_gate, or a run."),
    freeze_gate: bool = typer.Option(False, "--freeze-gate", help="Do not train that gate further."),
    reducer: str | None = typer.Option(None, help="evit, dynamicvit or tome: fewer tokens from block to block."),
    rate: float | None = typer.Option(None, help="Share of the tokens that the reducer keeps."),
    img_size: int | None = typer.Option(None, help="Side of the input in px."),
    mode: str | None = typer.Option(None, help="packed, trimmed or masked, in training."),
    crops: str | None = typer.Option(None, help="inception, medium, light or none."),
    seed: int | None = typer.Option(None, help="Of weights, order and noise."),
    settings: list[str] = SET,
    out: Path | None = typer.Option(None, help="The run's folder; runs/NAME by default."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the folder's last checkpoint, if there is one."),
    force: bool = typer.Option(False, "--force", help="With --resume: go on with other settings too."),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Skip and count images that cannot be read."),
    smoke: bool = typer.Option(False, "--smoke", help="A tiny version: does it run at all?"),
    evaluate: bool = typer.Option(True, help="Evaluate at the end."),
    rounds: int = ROUNDS,
    as_json: bool = AS_JSON,
) -> None:
    """Train a model with mixed-scale tokens, or its dense baseline.

    Ctrl-C, SIGTERM and SIGUSR1 end it after the step and a checkpoint, with exit code 75: go on with --resume.

    Example: msvit train scenes --target 0.25 --out runs/scenes
    """
    from accelerate import PartialState

    from msvit.host_config import run_options
    from msvit.lab.cli.looking import show_evaluation
    from msvit.lab.evaluation.run import evaluate_run
    from msvit.lab.folder_lock import locked
    from msvit.lab.gate_names import is_trained
    from msvit.lab.recipes import recipe as find
    from msvit.lab.runs import is_evaluated
    from msvit.lab.training.build import random_teacher
    from msvit.lab.training.config import override
    from msvit.lab.training.loop import train as run
    from msvit.lab.training.run import read_config
    if force and not resume:
        raise ValueError("--force is for --resume: it accepts other settings than those the run began with")
    if gate is not None and gate_from is None and is_trained(gate):
        gate, gate_from = None, gate
    given = {
        "data.source": data, "data.img_size": img_size, "data.crops": crops, "model.name": model, "model.gate": gate,
        "model.mode": mode, "gate.target": target, "gate.weight": gate_weight, "gate.loss": gate_loss, "seed": seed,
        "data.skip_bad": "true" if skip_bad else None, "model.gate_from": gate_from,
        "model.freeze_gate": "true" if freeze_gate else None, "reducer.name": reducer, "reducer.rate": rate,
    }  # fmt: skip
    check_rounds(rounds)
    changes = {name: str(value) for name, value in given.items() if value is not None} | pairs(settings)
    config = override(find(recipe, smoke=smoke), changes)
    if crops is not None and config.task == "segment":
        raise ValueError("--crops is for classification; to segment set the range of scales: --set data.scales=0.5,2")
    out = out or Path("runs") / run_name(recipe, config)
    if resume and (out / "config.json").is_file():
        about = read_config(out)
        if about["recipe"] != recipe:
            raise ValueError(f"{out} is a run of {about['recipe']}, not of {recipe}; choose another --out")
        said = {name.removeprefix("model.options.") for name in changes}  # here, by the person who resumes
        run_options({key: v for key, v in about["config"].model.options.items() if key not in said})
        config = override(about["config"], changes)
    elif "data.source" not in changes:
        check_own_data(recipe, config)
    if not smoke and (reason := random_teacher(config)):
        raise ValueError(reason)
    run(config, out, recipe=recipe, resume=resume, force=force)
    processes = PartialState()
    processes.destroy_process_group()
    if evaluate and processes.is_main_process and not is_evaluated(out):
        with locked(out):  # of these weights, not of a next training's
            found = evaluate_run(out, data=config.data.source, rounds=rounds)
        show_evaluation(out, found, as_json)


def check_own_data(recipe: str, config: Any) -> None:
    """Raise ValueError unless the data that a recipe names by itself are there."""
    source = config.data.source
    if source == "scenes" or source.startswith("hfds/") or Path(source).exists():
        return
    what = "train/ and val/ in it, each with a folder of images for every class"
    what = what if config.task == "classify" else "images and label maps (docs/segmentation.md says how they may lie)"
    raise ValueError(f"--data is missing: give a folder with {what}, as in msvit train {recipe} --data FOLDER")


def pairs(settings: list[str]) -> dict[str, str]:
    found = {}
    for text in settings:
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"--set {text} has no value; write it as --set {text}=VALUE")
        found[name.strip()] = value.strip()
    return found


def run_name(recipe: str, config: object) -> str:
    from msvit.lab.training.config import Config

    assert isinstance(config, Config)
    size, end = config.data.img_size, f"-s{config.seed}" if config.seed else ""
    if (about := config.reducer).name != "none":
        amount = "" if about.rate is None else f"-{about.rate:g}"
        end = f"-{about.name}{amount if about.r is None else f'-r{about.r}'}{end}"
    if config.model.gate == "none":
        return f"{recipe}-dense-{size}{end}"
    if config.model.gate not in ("learned", "context"):
        return f"{recipe}-{config.model.gate}-{config.model.share:g}{end}"
    if config.model.freeze_gate:
        return f"{recipe}-gate-of-{Path(config.model.gate_from or '').name}{end}"
    return f"{recipe}-{config.gate.loss}-t{config.gate.target:g}-w{config.gate.weight:g}{end}"


@app.command()
@plain_errors
@resumable("the same command goes on from there")
def sweep(
    recipe: str = RECIPE,
    target: str = typer.Option("0.5,0.25,0.1", help="Targets, separated by commas."),
    gate_weight: str = typer.Option("1,4,20", help="Gate weights, separated by commas."),
    dense_sizes: str | None = typer.Option(None, help="Input sizes of the dense baselines; four by default."),
    seeds: str = typer.Option("0", help="Seeds, separated by commas."),
    gates: str = typer.Option("", help="Gates that do not learn, such as disc,entropy."),
    shares: str = typer.Option("0.3", help="Their shares of fine cells, separated by commas."),
    reducers: str = typer.Option("", help="All of these again with reducers, such as evit-0.7,tome-r8."),
    from_dense: bool = typer.Option(False, "--from-dense", help="Runs with a gate start from their seed's dense run."),
    at_once: int = typer.Option(1, min=1, help="Runs at once: a GPU may have room for several."),
    data: str | None = DATA,
    settings: list[str] = SET,
    out: Path | None = typer.Option(None, help="Folder of the runs; runs/RECIPE-sweep by default."),
    smoke: bool = typer.Option(False, "--smoke", help="Tiny versions: does it run at all?"),
    as_json: bool = AS_JSON,
) -> None:
    """Train the paper's grid of targets and weights beside dense baselines; finished runs are not done again.

    Ctrl-C, SIGTERM and SIGUSR1 end it after a checkpoint of each run, with exit code 75: the same command goes on.

    In settings {seed} stands for a run's seed, as in --set model.weights=runs/dense-s{seed}.

    Example: msvit sweep scenes --target 0.3 --gate-weight 50 --dense-sizes 128,96 --from-dense
    """
    from msvit.lab.recipes import recipe as find
    from msvit.lab.sweep import check_folders, grid, run_jobs
    from msvit.lab.sweep_progress import SweepProgress
    from msvit.lab.training.build import random_teacher
    from msvit.lab.training.config import override

    out = out or Path("runs") / f"{recipe}-sweep"
    changes = pairs(settings) | ({} if data is None else {"data.source": data})
    config = override(find(recipe, smoke=smoke), changes)
    if "data.source" not in changes:
        check_own_data(recipe, config)
    if not (smoke or from_dense) and (reason := random_teacher(config)):
        raise ValueError(reason)
    jobs = grid(
        recipe, targets=numbers(target), weights=numbers(gate_weight), seeds=numbers(seeds, int),
        sizes=None if dense_sizes is None else numbers(dense_sizes, int), smoke=smoke,
        gates=words(gates), shares=numbers(shares), reducers=words(reducers), out=out, from_dense=from_dense,
        changes=changes,
    )  # fmt: skip
    check_folders(recipe, jobs, out, smoke=smoke)

    with SweepProgress(jobs, out, Console(stderr=True, markup=False) if as_json else None) as progress:
        failed = run_jobs(recipe, jobs, out, watcher=progress, smoke=smoke, at_once=at_once)
    show_runs([out / job.name for job in jobs if job not in failed], as_json)
    if failed:
        names = ", ".join(job.name for job in failed)
        summary = f"{len(failed)} of {len(jobs)} runs failed ({names}); see their log.txt, then run it again"
        Console(stderr=as_json).print(summary, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1)


def words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str, kind: Any = float) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        example = "0.5,0.25,0.1" if kind is float else "64,48"
        raise ValueError(f"{text!r} is no list of numbers of this kind; write for example {example}") from None


def show_runs(folders: list[Path], as_json: bool = False) -> None:
    """What came of the runs of a sweep: one sentence and a table, or one line of JSON."""
    import json

    from msvit.lab.cli.looking import records

    if not folders:
        return
    found = records(folders)
    if as_json:
        print(json.dumps(found))
        return
    console.print(run_table(found["runs"], found["timed_with"]))
    for sentence in found["results"]:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def run_table(rows: list[dict[str, Any]], timed_with: tuple[str, str] | None) -> Table:
    """A line for each run. Speed-ups are over the dense host that was timed beside the run."""
    from msvit.lab.runs import METRICS
    from msvit.lab.viz.compare import NONE, percent, share_words, short

    metric = METRICS[rows[0]["task"]]  # a sweep has one task
    speeds = [
        {row["batch"]: row["speed_up"] for row in found["speed_ups"] if (row["device"], row["dtype"]) == timed_with}
        for found in rows
    ]
    batches = sorted({batch for each in speeds for batch in each}, reverse=True)
    objects = any(found["fine_on_object"] is not None for found in rows)
    heads = [metric.name, "tokens", "GMACs", "of dense", *(f"speed-up at batch {batch}" for batch in batches)]
    heads += ["fine on object, ground"] if objects else []
    caption = f"speed-up over the dense host, timed beside each run: {', '.join(timed_with)}" if timed_with else None
    table = Table(Column("run", no_wrap=True), *heads, caption=caption, caption_justify="left")
    for found, own in zip(rows, speeds, strict=True):
        cells = [found["run"], percent(found[metric.key])]
        cells += [f"{short(found['tokens']['mean'])} of {short(found['tokens']['dense'])}", short(found["gmacs"])]
        cells += [share_words(found), *(f"{own[batch]:.2f}x" if batch in own else NONE for batch in batches)]
        shares = (percent(found[f"fine_on_{what}"], 0) for what in ("object", "ground"))
        table.add_row(*cells, *([", ".join(shares)] if objects else []))
    return table
