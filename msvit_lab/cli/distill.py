"""msvit distill: a model that learns, without labels, to answer as its dense self."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from msvit_lab.cli.app import AS_JSON, app, numbers, pairs, plain_errors, say
from msvit_lab.cli.recipes import resumable


@app.command()
@plain_errors
@resumable("the same command with --resume goes on from there")
def distill(
    model: str = typer.Argument(help="A run, a folder of msvit.save, or a timm model such as vit_base_patch16_224."),
    images: list[Path] = typer.Option(..., help="A folder of images, or a tar, without labels; may be repeated."),
    budget: float = typer.Option(..., help="Share of the dense multiply-adds, gate included, met on average."),
    out: Path = typer.Option(..., help="Folder for the model, for msvit.load."),
    steps: int = typer.Option(5000, min=1, help="Of the optimizer."),
    gate: str | None = typer.Option(None, help="default, disc, entropy, ...; the model's own, of a dense one default."),
    weights: Path | None = typer.Option(None, help="Of a timm model: a file of weights; timm's own otherwise."),
    size: int | None = typer.Option(None, help="Side of the images in px; the model's own by default."),
    num: int = typer.Option(100_000, min=1, help="So many images at most, drawn at random but always the same."),
    cache: bool = typer.Option(True, help="Decode images once and keep them on the device."),
    settings: list[str] = typer.Option(
        [], "--set", help="lr, batch_size, budgets=0.45,0.8, ema, seed ...; may be repeated."
    ),
    checkpoint_every: int = typer.Option(500, min=1, help="Steps from one checkpoint to the next."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the folder's last checkpoint, if there is one."),
    as_json: bool = AS_JSON,
) -> None:
    """Train a model of mixed scale to answer as it does with all cells fine, on images without labels.

    Budgets vary while it trains, so that msvit.set_budget may choose others later; --budget is the one that is set.
    The divergence from the dense model is measured before and after on images that are held back, at most 500. Several
    GPUs: accelerate launch -m msvit distill ... Ctrl-C, SIGTERM and SIGUSR1 end it after the step and a checkpoint,
    with exit code 75: go on with --resume.

    Example: msvit distill vit_base_patch16_224 --images photos --budget 0.6 --out models/vit-60
    """
    from accelerate import PartialState

    from msvit.budget.distillation import make_settings
    from msvit_lab.calibration import Prepared, find_model
    from msvit_lab.distilling import Job, distill_images

    given = {name: numbers(text, int if text.isdecimal() else float) for name, text in pairs(settings).items()}
    chosen = make_settings(**{name: values[0] if len(values) == 1 else values for name, values in given.items()})
    found = find_model(model, gate, weights)
    prepared = Prepared(found, images, size, num)
    job = Job(model, [str(each) for each in images], num, prepared.size, budget, steps, cache, chosen)

    def note(text: str) -> None:
        if not as_json:
            say(text)

    result = distill_images(found, prepared, job, out, checkpoint_every, resume, note)
    processes = PartialState()
    processes.destroy_process_group()
    if not processes.is_main_process:
        return
    if as_json:
        print(json.dumps(asdict(result) | {"out": str(out)}))
    else:
        note(f"divergence from the dense model: {result.before:.4g} before, {result.after:.4g} after")
        note(f"written to {out}")
