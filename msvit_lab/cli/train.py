"""msvit train: one run of a recipe."""

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from msvit_lab.cli.app import AS_JSON, DEVICE, ROUNDS, app, choose_device, pairs, plain_errors, say
from msvit_lab.cli.recipes import DATA, RECIPE, SET, check_own_data, resumable
from msvit_lab.cli.tables import show_evaluation

if TYPE_CHECKING:
    from msvit_lab.config import Config


@app.command()
@plain_errors
@resumable("the same command with --resume goes on from there")
def train(
    recipe: str = RECIPE,
    data: str | None = DATA,
    model: str | None = typer.Option(None, help="A timm model."),
    pretrained: bool = typer.Option(False, "--pretrained", help="Start from timm's weights, which it downloads."),
    weights: str | None = typer.Option(None, help="Start from a file of weights of that model, or from a run."),
    target: float | None = typer.Option(None, help="Wanted share of fine cells."),
    gate_weight: float | None = typer.Option(None, help="Weight of the gate loss."),
    gate_loss: str | None = typer.Option(None, help="gbas, bas, bas-flat, l0 or attention; edges for segmentation."),
    gate: str | None = typer.Option(None, help="learned, context, none, default (trained), disc ...; a folder."),
    gate_from: str | None = typer.Option(None, help="A trained gate: a folder of msvit.save_gate, or a run."),
    freeze_gate: bool = typer.Option(False, "--freeze-gate", help="Do not train that gate further."),
    reducer: str | None = typer.Option(None, help="evit, dynamicvit or tome: fewer tokens from block to block."),
    rate: float | None = typer.Option(None, help="Share of the tokens that the reducer keeps."),
    img_size: int | None = typer.Option(None, help="Side of the input in px."),
    epochs: float | None = typer.Option(None, help="Passes over the training images."),
    batch_size: int | None = typer.Option(None, help="Images of a step, over all processes."),
    device: str | None = DEVICE,
    mode: str | None = typer.Option(None, help="packed, trimmed or masked, in training."),
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

    from msvit.saving.host import run_options
    from msvit_lab.auto_settings import random_teacher_error
    from msvit_lab.config import override
    from msvit_lab.evaluate import evaluate_run
    from msvit_lab.fitting import fit_to_data
    from msvit_lab.folder_lock import locked
    from msvit_lab.gate_names import is_trained
    from msvit_lab.recipes import recipe as find
    from msvit_lab.runs import is_evaluated, read_config
    from msvit_lab.training.loop import train as run
    if force and not resume:
        raise ValueError("--force is for --resume: it accepts other settings than those the run began with")
    if gate is not None and gate_from is None and is_trained(gate):
        gate, gate_from = None, gate
    given = {
        "data.source": data, "data.img_size": img_size, "model.name": model, "model.gate": gate,
        "model.mode": mode, "gate.target": target, "gate.weight": gate_weight, "gate.loss": gate_loss, "seed": seed,
        "data.skip_bad": "true" if skip_bad else None, "model.pretrained": "true" if pretrained else None,
        "model.gate_from": gate_from, "model.weights": weights,
        "model.freeze_gate": "true" if freeze_gate else None, "reducer.name": reducer, "reducer.rate": rate,
        "optim.epochs": epochs, "optim.batch_size": batch_size,
    }  # fmt: skip
    where = choose_device(device)
    changes = {name: str(value) for name, value in given.items() if value is not None} | pairs(settings)
    config = override(find(recipe, smoke=smoke), changes)
    out = out or Path("runs") / run_name(recipe, config)
    if resume and (out / "config.json").is_file():
        about = read_config(out)
        if about["recipe"] != recipe:
            raise ValueError(f"{out} is a run of {about['recipe']}, not of {recipe}; choose another --out")
        said = {name.removeprefix("model.options.") for name in changes}  # here, by the person who resumes
        run_options({key: v for key, v in about["config"].model.options.items() if key not in said})
        config = override(about["config"], changes)
    else:
        if "data.source" not in changes:
            check_own_data(recipe, config)
        if recipe == "folder" and not smoke:
            fitted = fit_to_data(config, set(changes))
            config = override(config, fitted.changes)
            for note in fitted.notes if os.environ.get("RANK", "0") == "0" else ():
                say(note)
    if not smoke and (reason := random_teacher_error(config)):
        raise ValueError(reason)
    run(config, out, recipe=recipe, resume=resume, force=force, device=where)
    processes = PartialState()
    processes.destroy_process_group()
    if processes.device.type == "cuda":
        gc.collect()  # CUDA graphs of the training hold memory
    if evaluate and processes.is_main_process and not is_evaluated(out):
        with locked(out):  # of these weights, not of a next training's
            found = evaluate_run(out, data=config.data.source, rounds=rounds, device=where)
        show_evaluation(out, found, as_json)


def run_name(recipe: str, config: "Config") -> str:
    from msvit_lab.config import TRAINED_GATES

    size, end = config.data.img_size, f"-s{config.seed}" if config.seed else ""
    if (about := config.reducer).name != "none":
        amount = "" if about.rate is None else f"-{about.rate:g}"
        end = f"-{about.name}{amount if about.r is None else f'-r{about.r}'}{end}"
    if recipe == "folder":  # what is fitted to the images is in no name
        return f"{Path(config.data.source).resolve().name}{'-dense' if config.model.gate == 'none' else ''}{end}"
    if config.model.gate == "none":
        return f"{recipe}-dense-{size}{end}"
    if config.model.gate not in TRAINED_GATES:
        return f"{recipe}-{config.model.gate}-{config.model.share:g}{end}"
    if config.model.freeze_gate:
        return f"{recipe}-gate-of-{Path(config.model.gate_from or '').name}{end}"
    return f"{recipe}-{config.gate.loss}-t{config.gate.target:g}-w{config.gate.weight:g}{end}"
