"""msvit info: a model or a gate in numbers."""

import typer
from rich.table import Table
from rich.text import Text

from msvit_lab.cli.app import app, console, plain_errors


@app.command()
@plain_errors
def info(
    model: str = typer.Argument(help="A timm model, such as vit_small_patch16_224; or a gate: default, disc, a run."),
    coarse: int | None = typer.Option(None, help="Side of a cell in px; twice the patch size, of a Swin its block's."),
    size: int | None = typer.Option(None, help="Side of the image in px; the model's own by default."),
    merge_at: int | None = typer.Option(None, help="Of a Swin: the block at which coarse tokens enter, 3 by default."),
) -> None:
    """Tokens, parameters and GMACs of a model, from all coarse to all fine; of a gate its settings and what it costs.

    Example: msvit info vit_small_patch16_224 --coarse 32
    """
    from msvit_lab.gate_names import names_gate

    if names_gate(model):
        return show_gate(model, coarse, size)
    from msvit_lab.evaluation.info import describe

    about = describe(model, coarse=coarse, size=size, merge_at=merge_at)
    sizes = f"  {about.size} px, cells of {about.coarse} px, patches of {about.fine} px"
    console.print(Text.assemble((about.name, "bold"), sizes))
    console.print(f"{about.parameters / 1e6:.2f} M parameters, and {about.gate_parameters / 1e6:.2f} M in the gate")
    table = Table("fine cells", "tokens", "GMACs", "of dense")
    for row in about.rows:
        table.add_row(f"{row.share:.0%}", f"{row.tokens}", f"{row.gmacs:.3f}", f"{row.gmacs / about.dense_gmacs:.0%}")
    table.add_row("dense host", f"{about.rows[-1].tokens}", f"{about.dense_gmacs:.3f}", "100%")
    console.print(table)
    console.print(f"gate: {about.gate_gmacs:.4f} GMACs")


def show_gate(name: str, coarse: int | None, size: int | None) -> None:
    from msvit.types import check_divides
    from msvit_lab.gate_names import find_gate

    gate, _ = find_gate(name, coarse)
    side = size or 7 * gate.coarse
    check_divides(side, side, gate.coarse)
    cells = (side // gate.coarse) ** 2
    weights, gmacs = sum(p.numel() for p in gate.parameters()), gate.num_macs(cells) / 1e9
    console.print(Text.assemble((name, "bold"), f"  {type(gate).__name__}, cells of {gate.coarse} px"))
    console.print(f"{weights / 1e6:.2f} M parameters, {gmacs:.4f} GMACs for {side} px ({cells} cells)")
    console.print(", ".join(f"{key} {value}" for key, value in gate.config.items()), highlight=False, markup=False)
