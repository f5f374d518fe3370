"""msvit export: a trained model as a file for other engines, or as a page for browsers."""

from pathlib import Path

import typer

from msvit_lab.cli.app import app, plain_errors, say
from msvit_lab.cli.demo import RUNTIME, write_run_page


@app.command()
@plain_errors
def export(
    run: Path | None = typer.Argument(None, help="A folder written by msvit train, or by msvit.save."),
    out: Path | None = typer.Option(None, help="The file, NAME.onnx or NAME.pt2."),
    web: Path | None = typer.Option(None, help="Instead of a file, the folder of a page; without RUN: the gate alone."),
    split: bool = typer.Option(False, "--split", help="Two files: NAME.gate.onnx and NAME.trunk.onnx."),
    int8: bool = typer.Option(False, "--int8", help="Weights in 8 bits, by onnxruntime's quantizer."),
    batch: str = typer.Option("1", help="Images at once: a number, or dynamic."),
    size: int | None = typer.Option(None, help="Side of the images in px; the run's own by default."),
    runtime: Path | None = RUNTIME,
) -> None:
    """Write a model to a file that runs without msvit, with its classes and preprocessing as metadata.

    msvit.export has more options. With --web a static folder is written that runs the model beside its dense host in
    any browser.

    Example: msvit export runs/photos --out photos.onnx --batch dynamic
    """
    from msvit.integrations.export import check_target
    from msvit.integrations.export import export as write
    from msvit_lab.hosts import read_model

    if (out is None) == (web is None):
        raise ValueError("give either --out NAME.onnx, for a file, or --web DIR, for a page")
    if web is not None:
        folder = write_run_page(web, run, runtime)
        say(f"page: {folder}; any web server can serve it")
        return
    if run is None or out is None:
        raise ValueError("give a run to export, such as msvit export runs/photos --out photos.onnx")
    model, config = read_model(run)
    own_size = None if config is None else config.data.img_size
    num = int(batch) if batch.isdecimal() else batch
    check_target(out, None)
    typer.echo(f"writing {out}, which takes up to a minute or two", err=True)
    for path in write(model, out, split=split, batch=num, int8=int8, size=size or own_size):
        say(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
