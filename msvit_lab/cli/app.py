"""The application: what all commands share."""

import traceback
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

import msvit

DEBUG = ContextVar("debug", default=False)  # whether errors are shown with their traceback


app = typer.Typer(
    help="Vision Transformers that spend tokens where the image needs them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(markup=False)  # what is printed holds names that users chose: brackets in them are no markup
errors = Console(markup=False, stderr=True)
AS_JSON = typer.Option(False, "--json", help="One line of JSON instead of the table.")
DEVICE = typer.Option(None, help="cuda or cpu; cuda where there is one.")


def plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: print an error that users can mend without its traceback, and exit with code 2, as for a wrong option.

    ImportError: of an optional package, with the pip line.
    """

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ValueError, OSError, ImportError) as error:
            show_error(error, Text.assemble(("error:", "red"), f" {error}"))
            raise typer.Exit(2) from None

    return run


def show_error(error: BaseException, words: Text) -> None:
    """The sentence of an error on stderr; with --debug its traceback first, and those of its causes."""
    if DEBUG.get():
        cause: BaseException | None = error
        while cause is not None:
            cause.__suppress_context__ = False  # `from None` hides it from users
            cause = cause.__cause__ or cause.__context__
        traceback.print_exception(error)
    say(words, errors)


def say(text: str | Text, where: Console = console) -> None:
    """Print a line as it is: a terminal wraps it, a file has it whole."""
    where.print(text, highlight=False, soft_wrap=True)


def check_rounds(rounds: int) -> int:
    if rounds != 0 and rounds < 2:
        raise typer.BadParameter(f"{rounds}, but must be 0 or at least 2, as quartiles are shown")
    return rounds


ROUNDS = typer.Option(20, callback=check_rounds, help="Rounds of timing in an evaluation; 0: it is not timed.")


def check_out(out: Path) -> str:
    """Raise ValueError unless a model can be written there. Returns what is said when it is."""
    from msvit.saving.file import check_writable
    from msvit.saving.folder import MODEL

    replaced = ", in the place of the model that was there" if (out / MODEL.weights).is_file() else ""
    check_writable(out, "choose another --out")
    return f"written to {out}{replaced}"


def choose_device(name: str | None) -> Any:
    import torch

    if name not in (None, "cuda", "cpu"):
        raise ValueError(f"--device is {name!r}, but must be cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no CUDA device here; leave it out, or give --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str, kind: Any = float) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        example = "0.5,0.25,0.1" if kind is float else "64,48"
        raise ValueError(f"{text!r} is no list of numbers of this kind; write for example {example}") from None


def pairs(settings: list[str]) -> dict[str, str]:
    found = {}
    for text in settings:
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"--set {text} has no value; write it as --set {text}=VALUE")
        found[name.strip()] = value.strip()
    return found


def show_version(wanted: bool | None) -> None:
    if wanted:
        print(f"msvit {msvit.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool | None = typer.Option(None, "--version", callback=show_version, is_eager=True, help="The version."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback behind an error."),
) -> None:
    DEBUG.set(debug)
