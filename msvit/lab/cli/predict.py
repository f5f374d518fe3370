"""msvit predict: what a trained model sees in image files."""

import json
from pathlib import Path

import typer

from msvit.lab.cli.app import app, console, plain_errors


@app.command()
@plain_errors
def predict(
    run: Path = typer.Argument(help="A folder written by msvit train, or by msvit.save."),
    images: list[str] = typer.Argument(help="Image files, folders of them, or patterns such as 'photos/*.jpg'."),
    top: int = typer.Option(5, min=1, help="So many classes of each image, the most probable first."),
    as_json: bool = typer.Option(False, "--json", help="One line of JSON for each image."),
    overlay: Path | None = typer.Option(None, help="Folder for pictures of the images with their tokens and classes."),
) -> None:
    """The most probable classes of each image, and the tokens it took.

    Of a segmentation run: the shares of its classes in the pixels; --overlay writes NAME.labels.png, a byte for the
    class of each pixel, and NAME.segmentation.png. Of a classifier it writes NAME.tokens.png. An image that cannot be
    read does not stop the others; the exit code is then 1.

    Example: msvit predict runs/photos photo.jpg --top 3
    """
    from msvit.lab.predict import predict_files, read_predictor

    predictor = read_predictor(run)
    if predictor.model.classes is None:
        typer.echo(
            f"{run} has no names of classes, so their numbers are shown; set model.classes and save it again", err=True
        )
    failed = False
    for found in predict_files(predictor, images, top=top, overlays=overlay):
        if as_json:
            print(json.dumps(found.record()))
        else:
            console.print(str(found), highlight=False, soft_wrap=True)
        failed = failed or found.error is not None
    if failed:
        raise typer.Exit(1)
