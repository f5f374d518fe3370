"""msvit viz: where tokens go."""

from pathlib import Path

import typer

from msvit_lab.cli.app import app, plain_errors, say


@app.command()
@plain_errors
def viz(
    images: list[str] = typer.Argument(help="Image files, or folders of them."),
    run: Path | None = typer.Option(None, help="A run, or a folder of msvit.save, whose gate decides."),
    gate: str = typer.Option("default", help="default (trained), entropy, gradient, disc, random, ... or a folder."),
    share: float | None = typer.Option(None, help="The share of fine cells, where the gate shall not decide itself."),
    size: int | None = typer.Option(None, help="Side of a square image in px; others get as many cells, about."),
    zoom: int | None = typer.Option(
        None, min=1, help="So many random zooms and shifts of each image, with their masks; 6 is usual."
    ),
    out: Path | None = typer.Option(
        None, help="Folder for the pictures, or a file for one; by default each lies beside its image."
    ),
) -> None:
    """Show where tokens go: the photograph with its fine and coarse tokens drawn over it, as PNG.

    Of a run with a reducer also what is left at the end: each token in the mean colour of all that it covers. An image
    that cannot be read does not stop the others; the exit code is then 1. --zoom writes NAME.zoom.png.

    Example: msvit viz photo.jpg
    """
    from msvit_lab.viz.files import draw_files

    failed = False
    for drawn in draw_files(images, run=run, gate=gate, share=share, size=size, out=out, zoom=zoom):
        say(str(drawn))
        failed = failed or isinstance(drawn, ValueError)
    if failed:
        raise typer.Exit(1)
