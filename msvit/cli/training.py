"""msvit train, msvit sweep."""

from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from msvit.cli.app import ROUNDS, app, check_rounds, console, plain_errors

RECIPE = typer.Argument(help="scenes (built in), imagenet_vit, _deit or _swin, pets, pets_swin, ade20k or voc.")
DATA = typer.Option(None, help="Folder with train/ and val/, wds/FOLDER or hfds/NAME; the recipe's own by default.")
SET = typer.Option([], "--set", help="Any setting of the recipe, such as optim.lr=3e-4; may be repeated.")


@app.command()
@plain_errors
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
    resume: bool = typer.Option(False, "--resume", help="Go on from the folder's last checkpoint."),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Skip and count images that cannot be read."),
    smoke: bool = typer.Option(False, "--smoke", help="A tiny version: does it run at all?"),
    evaluate: bool = typer.Option(True, help="Evaluate at the end."),
    rounds: int = ROUNDS,
) -> None:
    """Train a model with mixed-scale tokens, or its dense baseline.

    Example: msvit train scenes --target 0.25 --out runs/scenes
    """
    from accelerate import PartialState

    from msvit.cli.looking import show_evaluation
    from msvit.evaluation.run import evaluate_run
    from msvit.gate_names import is_trained
    from msvit.recipes import recipe as find
    from msvit.training.config import override
    from msvit.training.loop import train as run
    from msvit.training.run import read_config
    from msvit.training.trouble import Stopped

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
        config = override(about["config"], changes)
    try:
        run(config, out, recipe=recipe, resume=resume)
    except Stopped as stopped:
        console.print(str(stopped), highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    processes = PartialState()
    processes.destroy_process_group()
    if evaluate and processes.is_main_process and not (out / "eval.json").is_file():
        show_evaluation(out, evaluate_run(out, rounds=rounds))


def pairs(settings: list[str]) -> dict[str, str]:
    found = {}
    for text in settings:
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"--set {text} has no value; write it as --set {text}=VALUE")
        found[name.strip()] = value.strip()
    return found


def run_name(recipe: str, config: object) -> str:
    from msvit.training.config import Config

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
) -> None:
    """Train the paper's grid of targets and weights beside dense baselines; finished runs are not done again.

    In settings {seed} stands for a run's seed, as in --set model.weights=runs/dense-s{seed}.

    Example: msvit sweep scenes --target 0.3 --gate-weight 50 --dense-sizes 128,96 --from-dense
    """
    from msvit.sweep import Job, check_folders, grid, run_jobs

    out = out or Path("runs") / f"{recipe}-sweep"
    jobs = grid(
        recipe, targets=numbers(target), weights=numbers(gate_weight), seeds=numbers(seeds, int),
        sizes=None if dense_sizes is None else numbers(dense_sizes, int), smoke=smoke,
        gates=words(gates), shares=numbers(shares), reducers=words(reducers), out=out, from_dense=from_dense,
        changes=pairs(settings) | ({} if data is None else {"data.source": data}),
    )  # fmt: skip
    check_folders(recipe, jobs, out, smoke=smoke)

    def say(job: Job, what: str) -> None:
        console.print(f"[bold]{job.name}[/bold]: {escape(what)}", highlight=False, soft_wrap=True)

    failed = run_jobs(recipe, jobs, out, say=say, smoke=smoke, at_once=at_once)
    show_runs([out / job.name for job in jobs if job not in failed])
    if failed:
        names = ", ".join(job.name for job in failed)
        console.print(f"{len(failed)} of {len(jobs)} runs failed ({names}); see their log.txt, then run it again")
        raise typer.Exit(1)


def words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str, kind: Any = float) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        example = "0.5,0.25,0.1" if kind is float else "64,48"
        raise ValueError(f"{text!r} is no list of numbers of this kind; write for example {example}") from None


def show_runs(folders: list[Path]) -> None:
    import json

    from msvit.viz.compare import NONE
    from msvit.viz.runs import METRICS

    results = {folder.name: json.loads((folder / "eval.json").read_text()) for folder in folders}
    full = max((found["gmacs"]["dense"] for found in results.values()), default=1.0)  # the dense host, largest input
    tasks = [found.get("task", "classify") for found in results.values()]
    metric = METRICS[tasks[0] if tasks else "classify"]  # a sweep has one task
    run = Column("run", no_wrap=True)
    table = Table(run, "input", metric.name, "tokens", "GMACs", "of dense", "fine on object", "on ground")
    for name, found in results.items():
        on_object, on_ground = found["fine_on_object"], found["fine_on_ground"]
        table.add_row(
            name, f"{found['img_size']} px", NONE if found[metric.key] is None else f"{found[metric.key]:.1%}",
            f"{found['tokens']['mean']:.1f} of {found['tokens']['dense']}", f"{found['gmacs']['mean']:.4f}",
            f"{found['gmacs']['mean'] / full:.0%}",
            "-" if on_object is None else f"{on_object:.0%}", "-" if on_ground is None else f"{on_ground:.0%}",
        )  # fmt: skip
    console.print(table)
