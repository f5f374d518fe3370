"""msvit predict: what a trained model sees in image files."""

import json
from pathlib import Path
from typing import Any

import typer

from msvit_lab.cli.app import app, plain_errors, say
from msvit_lab.cli.recipes import resumable


@app.command()
@plain_errors
def predict(
    run: Path = typer.Argument(help="A folder written by msvit train, or by msvit.save."),
    images: list[str] = typer.Argument(help="Image files, or folders of them."),
    top: int = typer.Option(5, min=1, help="So many classes of each image, the most probable first."),
    as_json: bool = typer.Option(False, "--json", help="One line of JSON for each image; with --out one for all."),
    overlay: Path | None = typer.Option(None, help="Folder for pictures of the images with their tokens and classes."),
    out: Path | None = typer.Option(None, help="Table of all images of one folder: .parquet, .csv or .jsonl."),
) -> None:
    """The most probable classes of each image, and the tokens it took.

    Of a segmentation run: the shares of its classes in the pixels; --overlay writes NAME.labels.png, a byte for the
    class of each pixel, and NAME.segmentation.png. Of a classifier it writes NAME.tokens.png. An image that cannot be
    read does not stop the others; the exit code is then 1.

    With --out finished rows lie in OUT.parts until all are there: after an interruption (exit code 75) or a kill the
    same command goes on.

    Example: msvit predict runs/photos photo.jpg --top 3
    """
    from msvit_lab.predict import predict_files, read_predictor

    if out is not None:
        return predict_folder(run, images, out, top, overlay, as_json)
    predictor = read_predictor(run)
    warn_of_numbers(run, predictor)
    failed = False
    for found in predict_files(predictor, images, top=top, overlays=overlay):
        if as_json:
            print(json.dumps(found.record()))
        else:
            say(str(found))
        failed = failed or found.error is not None
    if failed:
        raise typer.Exit(1)


def warn_of_numbers(run: Path, predictor: Any) -> None:
    from msvit.prediction import class_names

    if class_names(predictor.model)[0] == "class 0":
        typer.echo(
            f"{run} has no names of classes, so their numbers are shown; set model.classes and save it again", err=True
        )


@resumable("the same command goes on from there")
def predict_folder(run: Path, images: list[str], out: Path, top: int, overlay: Path | None, as_json: bool) -> None:
    """Write the table."""
    from msvit_lab.predict import read_predictor
    from msvit_lab.predictions import write_predictions

    if overlay is not None:
        raise ValueError(f"--overlay is {overlay}, but with --out nothing is drawn; leave out one of them")
    if len(images) != 1 or not Path(images[0]).is_dir():
        raise ValueError(f"--out is for all images of one folder, but {', '.join(images)} is given; give one folder")
    predictor = read_predictor(run)  # an error in it comes before anything else
    warn_of_numbers(run, predictor)
    found = write_predictions(run, predictor, Path(images[0]), out, top, quiet=as_json)
    if as_json:
        print(json.dumps({"out": str(out), "images": found.num_images, "failed": found.num_failed}))
    else:
        failed = f"; {found.num_failed} could not be read, their rows have the error" if found.num_failed else ""
        say(f"{out}: {found.num_images} images{failed}")
    if found.num_failed:
        raise typer.Exit(1)
