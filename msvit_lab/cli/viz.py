"""msvit viz: where tokens go."""

from pathlib import Path

import typer

from msvit_lab.cli.app import app, console, plain_errors


@app.command()
@plain_errors
def viz(
    images: list[str] = typer.Argument(help="Image files, or folders of them; with --priors, runs."),
    run: Path | None = typer.Option(None, help="A trained run whose gate decides."),
    model: str | None = typer.Option(None, help="A timm model, for its cells and size; patches of 16 px by default."),
    gate: str = typer.Option("default", help="default (trained), entropy, gradient, disc, random, ... or a folder."),
    share: float | None = typer.Option(None, help="The share of fine cells, where the gate shall not decide itself."),
    size: int | None = typer.Option(None, help="Side of a square image in px; others get as many cells, about."),
    zoom: int | None = typer.Option(None, help="So many random zooms and shifts of each image, with their masks."),
    against: Path | None = typer.Option(
        None, help="With --run, both of segmentation: image, mask and the predictions of both, such as a dense run."
    ),
    priors: bool = typer.Option(False, "--priors", help="Of runs: maps of theta over training, initial ones first."),
    out: Path | None = typer.Option(
        None, help="Folder for the pictures, or a file for one; by default each lies beside its image."
    ),
) -> None:
    """Show where tokens go: the photograph with its fine and coarse tokens drawn over it, as PNG.

    Of a run with a reducer also what is left at the end: each token in the mean colour of all that it covers. An image
    that cannot be read does not stop the others; the exit code is then 1. --zoom writes NAME.zoom.png, --against
    NAME.segmentation.png, --priors priors.png, here or in --out, with a row for each run.

    Example: msvit viz photo.jpg
    """
    if priors:
        given = {"--run": run, "--model": model, "--share": share, "--size": size, "--zoom": zoom, "--against": against}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{wrong[0]} is for images, but --priors draws what runs have recorded; leave it out")
        console.print(str(draw_runs(images, out or Path())), highlight=False, markup=False, soft_wrap=True)
        return
    from msvit_lab.viz.files import draw_files

    failed = False
    for drawn in draw_files(
        images, run=run, model=model, gate=gate, share=share, size=size, out=out, zoom=zoom, against=against
    ):
        console.print(str(drawn), highlight=False, markup=False, soft_wrap=True)
        failed = failed or isinstance(drawn, ValueError)
    if failed:
        raise typer.Exit(1)


def draw_runs(folders: list[str], out: Path) -> Path:
    """The priors of some runs, as one PNG."""
    from msvit_lab.runs import read_runs
    from msvit_lab.viz.compare import labels
    from msvit_lab.viz.figures import draw_priors

    path = out if out.suffix and not out.is_dir() else out / "priors.png"
    if path.suffix.lower() != ".png":
        raise ValueError(f"--out is {out}, but the picture is written as PNG; call it {out.with_suffix('.png')}")
    runs = read_runs(folders)
    return draw_priors(runs, list(labels(runs).values()), path)
