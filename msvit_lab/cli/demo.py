"""msvit demo: the page, served on this machine."""

import tempfile
import webbrowser
from pathlib import Path

import typer

from msvit_lab.cli.app import app, console, plain_errors, say

DEMO = Path("runs/demo")  # what `make demo` trains
RUNTIME = typer.Option(None, help="onnxruntime-web: the archive of npm pack, or its unpacked folder.")


@app.command()
@plain_errors
def demo(
    run: Path | None = typer.Option(None, help="A folder written by msvit train; by default that of make demo."),
    folder: Path | None = typer.Option(None, help="Write the page here and keep it; by default a temporary folder."),
    host: str = typer.Option("127.0.0.1", help="The address to serve at; 0.0.0.0 for other machines, too."),
    port: int = typer.Option(8000, min=0, max=65535, help="0: any that is free."),
    open_page: bool = typer.Option(False, "--open", help="Open the page in the browser."),
    runtime: Path | None = RUNTIME,
) -> None:
    """A page on this machine: photographs, their cells, a budget, and the model beside the dense one, in the browser.

    Photographs stay in the browser. Without a run the gate alone is shown. Ctrl+C ends it.

    Example: msvit demo --run runs/photos --open
    """
    if run is None:
        run = trained_demo(DEMO)
        shown = f"showing {run}" if run else f"there is no trained run in {DEMO} (make demo): the gate alone is shown"
        typer.echo(shown, err=True)
    with tempfile.TemporaryDirectory() as temporary:
        page = write_run_page(Path(temporary) / "page" if folder is None else folder, run, runtime)
        from msvit_lab.web import PageServer

        with PageServer(page, host, port) as server:
            say(f"page: {server.address} (Ctrl+C ends it)")
            if open_page:
                webbrowser.open(server.address)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                console.print("ended")


def trained_demo(folder: Path) -> Path | None:
    """The run of the best score with a trained gate in a sweep's folder, or None."""
    from msvit_lab.config import TRAINED_GATES
    from msvit_lab.runs import Run, run_folders

    runs = [Run(path) for path in run_folders(folder) if (path / "config.json").is_file()]
    gated = [run for run in runs if run.model.is_dir() and run.config.model.gate in TRAINED_GATES]
    return max(gated, key=lambda run: run.score or 0.0).folder if gated else None


def write_run_page(folder: Path, run: Path | None, runtime: Path | None) -> Path:
    """The page of a run, or of the gate alone."""
    typer.echo("loading torch and timm", err=True)
    from msvit_lab.runs import Run, is_run
    from msvit_lab.web import find_runtime, load_for_page, write_page

    typer.echo("looking for onnxruntime-web, which npm fetches the first time", err=True)
    found = find_runtime(runtime)
    what = "the gate" if run is None else f"{run}, its gate and its dense host"
    typer.echo(f"writing {what} as ONNX files for the browser; that takes up to a minute", err=True)
    if run is None:
        return write_page(folder, runtime=found)
    model = load_for_page(run)
    scenes = is_run(run) and Run(run).config.data.source == "scenes"
    return write_page(folder, model, name=run.resolve().name, runtime=found, scenes=scenes)
