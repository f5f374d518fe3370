"""The commands, one function each. What they do stands in the library; here it is called and shown."""

import typer
from rich.console import Console
from rich.table import Table

import msvit

app = typer.Typer(
    help="Vision Transformers that spend tokens where the image needs them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def show_version(wanted: bool | None) -> None:
    if wanted:
        print(f"msvit {msvit.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool | None = typer.Option(None, "--version", callback=show_version, is_eager=True, help="The version."),
) -> None:
    pass


@app.command()
def info(
    model: str = typer.Argument(help="A timm model, such as vit_small_patch16_224."),
    coarse: int | None = typer.Option(None, help="Side of a cell in px; twice the patch size by default."),
    size: int | None = typer.Option(None, help="Side of the image in px; the model's own by default."),
) -> None:
    """Tokens, parameters and GMACs of a model, from all coarse to all fine.

    Example: msvit info vit_small_patch16_224 --coarse 32
    """
    from msvit.evaluation.info import describe

    try:
        about = describe(model, coarse=coarse, size=size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console()
    console.print(f"[bold]{about.name}[/bold]  {about.size} px, cells of {about.coarse} px, patches of {about.fine} px")
    console.print(f"{about.parameters / 1e6:.2f} M parameters, and {about.gate_parameters / 1e6:.2f} M in the gate")
    table = Table("fine cells", "tokens", "GMACs", "of dense")
    for row in about.rows:
        table.add_row(f"{row.share:.0%}", f"{row.tokens}", f"{row.gmacs:.3f}", f"{row.gmacs / about.dense_gmacs:.0%}")
    table.add_row("dense host", f"{about.rows[-1].tokens}", f"{about.dense_gmacs:.3f}", "100%")
    console.print(table)
    console.print(f"gate: {about.gate_gmacs:.4f} GMACs")
