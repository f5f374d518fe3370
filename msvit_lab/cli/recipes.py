"""What train and sweep share: options of recipes, and how a command that was stopped ends."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from msvit_lab.cli.app import show_error
from msvit_lab.interrupts import RESUME_CODE, Stopped, ending_as_ctrl_c

RECIPE = typer.Argument(
    help="folder (your own class folders), scenes (built in), imagenet_vit (_deit, _evit, _dynamicvit, _swin), "
    "pets, pets_swin, cub, ade20k or voc."
)
DATA = typer.Option(None, help="Folder with train/ and val/; the recipe's own by default.")
SET = typer.Option([], "--set", help="Any setting of the recipe, such as optim.lr=3e-4; may be repeated.")


def resumable(remedy: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: for a stopped command print how to resume it, and exit with 75 if a signal stopped it, else with 1."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(*args: Any, **kwargs: Any) -> None:
            seen: list[int] = []
            try:
                with ending_as_ctrl_c(seen):  # inside, as a signal may come while handlers are set or put back
                    command(*args, **kwargs)
            except BaseException as error:
                if not isinstance(error, Stopped) and not seen:
                    raise
                words = str(error) if isinstance(error, Stopped) else f"interrupted; {remedy}"
                show_error(error, Text(words))
                raise typer.Exit(1 if type(error) is Stopped else RESUME_CODE) from None

        return run

    return wrap


def check_own_data(recipe: str, config: Any) -> None:
    """Raise ValueError unless the data that a recipe names by itself are there."""
    source = config.data.source
    if source == "scenes" or Path(source).exists():
        return
    what = "a folder of images for every class in it, or train/ and val/ with such folders"
    what = what if config.data.holdout else "train/ and val/ in it, each with a folder of images for every class"
    what = what if config.task == "classify" else "images and label maps (docs/segmentation.md says how they may lie)"
    raise ValueError(f"--data is missing: give a folder with {what}, as in msvit train {recipe} --data FOLDER")
