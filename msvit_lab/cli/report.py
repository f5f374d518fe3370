"""msvit report: runs as one HTML page."""

import json
from pathlib import Path

import typer

from msvit_lab.cli.app import app, plain_errors, say
from msvit_lab.cli.tables import records


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
    from msvit_lab.report import write_report
    from msvit_lab.runs import run_folders

    folders = [folder for run in runs for folder in run_folders(run)]
    path = write_report(folders, out).resolve()
    if as_json:
        print(json.dumps({"report": str(path), **records(folders)}))
    else:
        say(f"report: {path}")
