"""The application: what all commands share."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

import msvit

app = typer.Typer(
    help="Vision Transformers that spend tokens where the image needs them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(markup=False)  # what is printed holds names that users chose: brackets in them are no markup
ROUNDS = typer.Option(20, help="Rounds of timing in an evaluation; 0: it is not timed.")
AS_JSON = typer.Option(False, "--json", help="One line of JSON instead of the table.")


def plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A user's mistake is answered with its sentence, not with a traceback, and exit code 2, as a wrong option is."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ValueError, OSError) as error:
            words = Text.assemble(("error:", "red"), f" {error}")
            Console(stderr=True).print(words, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None

    return run


def check_rounds(rounds: int) -> None:
    if rounds != 0 and rounds < 2:
        raise ValueError(f"--rounds is {rounds}, but must be 0 or at least 2, as quartiles are shown")


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
) -> None:
    pass
