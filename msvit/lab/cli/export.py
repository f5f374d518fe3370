"""msvit export: a trained model as a file for other engines."""

from pathlib import Path
from typing import Any

import typer

from msvit.lab.cli.app import app, console, plain_errors


@app.command()
@plain_errors
def export(
    run: Path = typer.Argument(help="A folder written by msvit train, or by msvit.save."),
    out: Path = typer.Option(..., help="The file, NAME.onnx or NAME.pt2."),
    split: bool = typer.Option(False, "--split", help="Two files: NAME.gate.onnx and NAME.trunk.onnx."),
    int8: bool = typer.Option(False, "--int8", help="Weights in 8 bits, by onnxruntime's quantizer."),
    format: str | None = typer.Option(None, help="onnx or pt2; by default the suffix of --out."),
    batch: str = typer.Option("1", help="Images at once: a number, or dynamic."),
    max_tokens: int | None = typer.Option(None, help="Slots of each image, prefix included: all shapes are static."),
    features: bool = typer.Option(False, "--features", help="The map of features in place of logits."),
    opset: int = typer.Option(20, help="Of ONNX, 18 or later."),
    mode: str | None = typer.Option(None, help="packed or trimmed, for several images; the model's own by default."),
    size: int | None = typer.Option(None, help="Side of the images in px; the run's own by default."),
) -> None:
    """Write a model to a file that runs without msvit, with its classes and preprocessing as metadata.

    Example: msvit export runs/photos --out photos.onnx --batch dynamic
    """
    from msvit.exporting import export as write

    model, own_size = read_model(run)
    paths = write(
        model if mode is None else model.with_options(mode=mode), out, format=format, split=split,
        batch=int(batch) if batch.isdecimal() else batch, max_tokens=max_tokens, int8=int8, features=features,
        opset=opset, size=size or own_size,
    )  # fmt: skip
    for path in paths:
        console.print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", highlight=False, soft_wrap=True)


def read_model(folder: Path) -> tuple[Any, int | None]:
    """The model of a run or of `msvit.save`, and the side of a run's images."""
    from msvit.checkpoint import load
    from msvit.lab.build import fit_dense, read_run
    from msvit.segmenter import Segmenter

    if not (folder / "config.json").is_file():
        return load(folder), None
    model, config = read_run(folder)
    side = config.data.img_size
    return model if isinstance(model, Segmenter) else fit_dense(model, side), side
