"""msvit report: runs as one HTML page."""

import json
from pathlib import Path

import typer

from msvit_lab.cli.app import app, console, plain_errors
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

    folders = [folder for run in runs for folder in run_folders(run)]
    path = write_report(folders, out).resolve()
    if as_json:
        print(json.dumps({"report": str(path), **records(folders)}))
    else:
        console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)


def run_folders(folder: Path) -> list[Path]:
    """A run itself, or the runs in a sweep's folder."""
    if (folder / "config.json").is_file() or not folder.is_dir():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/config.json")) or [folder]
