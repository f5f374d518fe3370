"""msvit info, msvit eval, msvit report, msvit viz."""

import json
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from msvit.lab.cli.app import AS_JSON, ROUNDS, app, check_rounds, console, plain_errors


@app.command()
@plain_errors
def info(
    model: str = typer.Argument(help="A timm model, such as vit_small_patch16_224; or a gate: default, disc, a run."),
    coarse: int | None = typer.Option(None, help="Side of a cell in px; twice the patch size, of a Swin its block's."),
    size: int | None = typer.Option(None, help="Side of the image in px; the model's own by default."),
    merge_at: int | None = typer.Option(None, help="Of a Swin: the block at which coarse tokens enter, 3 by default."),
) -> None:
    """Tokens, parameters and GMACs of a model, from all coarse to all fine; of a gate its settings and what it costs.

    Example: msvit info vit_small_patch16_224 --coarse 32
    """
    from msvit.lab.gate_names import names_gate

    if names_gate(model):
        return show_gate(model, coarse, size)
    from msvit.lab.evaluation.info import describe

    about = describe(model, coarse=coarse, size=size, merge_at=merge_at)
    sizes = f"  {about.size} px, cells of {about.coarse} px, patches of {about.fine} px"
    console.print(Text.assemble((about.name, "bold"), sizes))
    console.print(f"{about.parameters / 1e6:.2f} M parameters, and {about.gate_parameters / 1e6:.2f} M in the gate")
    table = Table("fine cells", "tokens", "GMACs", "of dense")
    for row in about.rows:
        table.add_row(f"{row.share:.0%}", f"{row.tokens}", f"{row.gmacs:.3f}", f"{row.gmacs / about.dense_gmacs:.0%}")
    table.add_row("dense host", f"{about.rows[-1].tokens}", f"{about.dense_gmacs:.3f}", "100%")
    console.print(table)
    console.print(f"gate: {about.gate_gmacs:.4f} GMACs")


def show_gate(name: str, coarse: int | None, size: int | None) -> None:
    from msvit.lab.gate_names import find_gate
    from msvit.types import check_divides

    gate, _ = find_gate(name, coarse)
    side = size or 7 * gate.coarse
    check_divides(side, side, gate.coarse)
    cells = (side // gate.coarse) ** 2
    weights, gmacs = sum(p.numel() for p in gate.parameters()), gate.num_macs(cells) / 1e9
    console.print(Text.assemble((name, "bold"), f"  {type(gate).__name__}, cells of {gate.coarse} px"))
    console.print(f"{weights / 1e6:.2f} M parameters, {gmacs:.4f} GMACs for {side} px ({cells} cells)")
    console.print(", ".join(f"{key} {value}" for key, value in gate.config.items()), highlight=False, markup=False)


@app.command("eval")
@plain_errors
def evaluate(
    run: Path = typer.Argument(help="A folder written by msvit train."),
    data: str | None = typer.Option(None, help="Other data than the run was trained on."),
    reducer: str | None = typer.Option(None, help="Put on a reducer that needs no training: evit or tome."),
    rate: float | None = typer.Option(None, help="Share of the tokens that this reducer keeps."),
    size: int | None = typer.Option(None, help="Another side of the input in px, for a classifier."),
    rounds: int = ROUNDS,
    objects: str | None = typer.Option(None, help="Masks of what is labelled, a tar or folder; {split} for val."),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Skip and count images that cannot be read."),
    flip: bool = typer.Option(False, "--flip", help="Segmentation: look at mirrored images too."),
    scales: str = typer.Option("1", help="Segmentation: sizes at which images are looked at, separated by commas."),
    name: str | None = typer.Option(None, help="Of the evaluation; by default what differs from the run's own, val."),
    as_json: bool = AS_JSON,
) -> None:
    """Accuracy, tokens, GMACs and measured time of a trained run, also in its folder: RUN/evaluations/NAME.json.

    The run's own evaluation, which report, sweep and bench show, is val. With other data, another reducer, size or
    masks of objects, with flips or scales, it has a name of its own, such as data-flowers or evit-0.7, and val stays.
    With --rounds 0 nothing is timed, and times that an earlier evaluation of that name measured stay.

    Example: msvit eval runs/scenes
    """
    from msvit.lab.cli.training import numbers
    from msvit.lab.evaluation.run import evaluate_run
    from msvit.reduction import make_reducer

    if reducer == "none":
        raise ValueError("--reducer none would leave the run's own in place; train it without one to compare")
    if rate is not None and reducer is None:
        raise ValueError(f"--rate is {rate}, but there is no reducer to keep it; give one, such as --reducer evit")
    chosen, sizes = make_reducer(reducer or "none", rate=rate), tuple(numbers(scales))
    how: dict[str, Any] = {"reducer": chosen, "flip": flip, "scales": sizes, "objects": objects, "size": size}
    check_rounds(rounds)
    show_evaluation(run, evaluate_run(run, data=data, rounds=rounds, skip_bad=skip_bad, name=name, **how), as_json)


def show_evaluation(run: Path, found: dict[str, Any], as_json: bool = False) -> None:
    """A table and where it was written; or one line of JSON, without what is one number per cell."""
    from msvit.lab.runs import Evaluations

    path = Evaluations(run).path(found["name"])
    if as_json:
        shown = {key: value for key, value in found.items() if key not in ("mask_mean", "mask_var")}
        print(json.dumps(shown | {"path": str(path)}))
        return
    tokens, gmacs, segments = found["tokens"], found["gmacs"], found["task"] == "segment"
    unit, per = ("window", "a window") if segments else ("image", "an image")
    sizes = f"images, windows of {found['img_size']} px" if segments else f"images of {found['img_size']} px"
    table = Table(title=f"{run}, {found['num_images']} {sizes}", show_header=False)
    if segments:
        table.add_row("mIoU", share(found["miou"]))
        pixels, classes = share(found["pixel_accuracy"]), share(found["class_accuracy"])
        table.add_row("accuracy", f"{pixels} of pixels, {classes} mean of classes")
        if found["miou"] is None:
            table.add_row("", "no pixel is labelled")
        if found["flip"] or found["scales"] != [1.0]:
            scales = ", ".join(f"{scale:g}" for scale in found["scales"])
            flipped = ", each also flipped" if found["flip"] else ""
            table.add_row("mean over", f"scales {scales}{flipped}; what follows is of one pass at scale 1")
    else:
        table.add_row("top-1, top-5", f"{found['top1']:.2%}, {found['top5']:.2%}")
    if found["reducer"] is not None:
        table.add_row("reducer", found["reducer"])
    spread = f"{tokens['mean']:.1f} ± {tokens['std']:.1f} of {tokens['dense']}"
    table.add_row("tokens a window" if segments else "tokens", spread)
    what = "GMACs a window, gate and encoder" if segments else "GMACs"
    table.add_row(what, f"{gmacs['mean']:.4f} ± {gmacs['std']:.4f}, {gmacs['mean'] / gmacs['dense']:.0%} of dense")
    if found["fine_on_object"] is not None:
        on_object, on_ground = found["fine_on_object"], found["fine_on_ground"]
        table.add_row("fine cells", f"{on_object:.0%} of those on objects, {on_ground:.0%} of those on ground")
    for row in found.get("latency", []):
        what = row["what"]
        if segments:
            what += ", encoder" if what == "dense host" else ", gate and encoder"
        low, high = row["quartiles"]
        time = f"{row['ms_per_image']:.3f} ms {per} (quartiles {low:.3f} to {high:.3f})"
        speed = f"{row['images_per_second']:.0f} {unit}s/s on {row['device']}"
        faster = row.get("speed_up")
        speed += "" if faster is None else f", {faster:.2f}x the dense host's speed"
        table.add_row(f"{what}, batch {row['batch']}, {row['dtype']}", f"{time}, {speed}")
    console.print(table)
    console.print(f"written to {path}", highlight=False, markup=False, soft_wrap=True)


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"  # noqa: RUF001  (a dash in a table: no number)


@app.command()
@plain_errors
def report(
    runs: list[Path] = typer.Argument(help="Folders written by msvit train, or a folder of such folders."),
    out: Path = typer.Option(Path("report.html"), help="The page to write."),
    as_json: bool = typer.Option(False, "--json", help="One line of JSON: the page, its result, and the runs."),
) -> None:
    """One self-contained HTML page: the result in a sentence and a picture, then accuracy against cost, masks, losses.

    Example: msvit report runs/scenes-sweep --out report.html
    """
    from msvit.lab.report import write_report

    folders = [folder for run in runs for folder in run_folders(run)]
    path = write_report(folders, out).resolve()
    if as_json:
        print(json.dumps({"report": str(path), **records(folders)}))
    else:
        console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)


def records(folders: list[Path]) -> dict[str, Any]:
    """What came of some runs, in one sentence for each task, and each run in a few numbers."""
    from msvit.lab.runs import read_runs
    from msvit.lab.viz.compare import by_metric, common_setting, labels, record, result

    runs = read_runs(folders)
    names = labels(runs)
    groups = by_metric(runs).values()
    rows = [record(run, group, names[run]) for group in groups for run in group]
    return {"results": [result(group).sentence for group in groups], "timed_with": common_setting(runs), "runs": rows}


def run_folders(folder: Path) -> list[Path]:
    """A run itself, or the runs in a sweep's folder."""
    if (folder / "config.json").is_file() or not folder.is_dir():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/config.json")) or [folder]


@app.command()
@plain_errors
def viz(
    images: list[str] = typer.Argument(help="Image files, or folders of them."),
    run: Path | None = typer.Option(None, help="A trained run whose gate decides."),
    model: str | None = typer.Option(None, help="A timm model, for its cells and size; patches of 16 px by default."),
    gate: str = typer.Option("default", help="default (trained), entropy, gradient, disc, random, ... or a folder."),
    share: float | None = typer.Option(None, help="The share of fine cells, where the gate shall not decide itself."),
    size: int | None = typer.Option(None, help="Side of a square image in px; others get as many cells, about."),
    out: Path = typer.Option(Path(), help="Folder for the pictures; for one image also a file, such as tokens.png."),
) -> None:
    """Show where tokens go: the photograph with its fine and coarse tokens drawn over it, as PNG.

    Of a run with a reducer also what is left at the end: each token in the mean colour of all that it covers. An image
    that cannot be read does not stop the others; the exit code is then 1.

    Example: msvit viz photo.jpg
    """
    from msvit.lab.viz.files import Failed, draw_files

    failed = False
    for drawn in draw_files(images, run=run, model=model, gate=gate, share=share, size=size, out=out):
        text = drawn.why if isinstance(drawn, Failed) else str(drawn)
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        failed = failed or isinstance(drawn, Failed)
    if failed:
        raise typer.Exit(1)
