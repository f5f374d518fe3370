"""msvit calibrate: a model with a budget, set by images."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from msvit_lab.cli.app import AS_JSON, app, check_out, console, numbers, plain_errors, say


@app.command()
@plain_errors
def calibrate(
    model: str = typer.Argument(help="A run, a folder of msvit.save, or a timm model such as vit_small_patch16_224."),
    images: Path = typer.Option(..., help="A folder of images, or a tar; a few hundred will do, without labels."),
    budget: float = typer.Option(..., help="Share of the dense multiply-adds, gate included, met on average."),
    out: Path = typer.Option(..., help="Folder for the model, for msvit.load."),
    gate: str | None = typer.Option(None, help="default, disc, entropy, ...; the model's own, of a dense one default."),
    weights: Path | None = typer.Option(None, help="Of a timm model: a file of weights; timm's own otherwise."),
    fit_gate: bool = typer.Option(False, "--fit-gate", help="First train the gate on these images, without labels."),
    steps: int | None = typer.Option(None, help="Of --fit-gate, for each target; 1000 on a GPU, 100 on a CPU."),
    size: int | None = typer.Option(None, help="Side of the images in px; the model's own by default."),
    num: int = typer.Option(512, min=1, help="So many images at most, drawn at random but always the same."),
    budgets: str = typer.Option("0.3,0.4,0.5,0.6,0.7,0.8,0.9", help="Other budgets to show, separated by commas."),
    as_json: bool = AS_JSON,
) -> None:
    """Set a model's budget by a folder of images, without training, and write the model to a folder for msvit.load.

    The table shows what other budgets would give on these images; msvit.set_budget(model, 0.45) sets them later, and
    needs no images. Images that cannot be read are left out and counted.

    With --fit-gate the gate is first trained on what the dense model does with these images, without labels, in several
    ways; it is replaced only if one of them brings the model nearer to the dense one on images that were held back, as
    a second table shows. Take a thousand images or more (--num). The model's own weights stay as they are.

    Example: msvit calibrate runs/pets --images photos --budget 0.6 --out models/pets-60
    """
    from msvit.budget.gate_fitting import fit_gate as fit_to_images
    from msvit.budget.thresholds import calibrate as set_by_images
    from msvit.budget.thresholds import check_budget
    from msvit.saving.model import save
    from msvit_lab.calibration import Prepared, budget_rows, find_model

    check_budget(budget, "macs")
    others = numbers(budgets)
    found = find_model(model, gate, weights)
    prepared = Prepared(found, [images], size, num)
    seen = prepared.batches(prepared.size)
    pictures = [batch.image for batch in seen]
    written = check_out(out)
    if fit_gate:
        found = calibrated = fit_to_images(found, pictures, budget, "macs", steps, progress=True)
    else:
        calibrated = set_by_images(found, pictures, budget)
    rows = budget_rows(calibrated, seen, others)
    save(calibrated, out)
    num_images = sum(len(batch.image) for batch in seen)
    if as_json:
        about = {"images": num_images, "skipped": prepared.num_bad, "size": prepared.size, "out": str(out)}
        fit = {"fit": asdict(calibrated.gate.fit_record)} if fit_gate else {}
        print(json.dumps(about | fit | {"rows": [*map(asdict, rows)]}))
        return
    cost_setting = "threshold" if found.gate.config.get("threshold") is not None else "share"
    say(f"{model}: {num_images} images of {prepared.size} px")
    table = Table("budget", cost_setting, "fine cells", "tokens", "GMACs")
    for row in rows:
        name = f"{budget:g}, chosen" if row.name == "chosen" else row.name
        table.add_row(name, f"{row.value:.4f}", f"{row.fine_share:.1%}", f"{row.tokens:.1f}", f"{row.gmacs:.4f}")
    console.print(table)
    if fit_gate:
        show_fit(calibrated.gate.fit_record)
    if prepared.num_bad:
        console.print(f"images left out that could not be read: {prepared.num_bad}")
    say(written)


def show_fit(record: Any) -> None:
    """The divergence from the dense model of each gate that was tried."""
    table = Table("gate", "divergence", "against the given", "")
    given = record.divergences["given"]
    for name, value in sorted(record.divergences.items(), key=lambda item: item[1]):
        difference = "" if name == "given" else f"{value - given:+.4g} +- {record.errors[name]:.2g}"
        table.add_row(name, f"{value:.4g}", difference, "kept" if name == record.kept else "")
    console.print(table)
    say(f"{record}, at the budget")
