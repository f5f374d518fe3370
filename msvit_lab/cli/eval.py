"""msvit eval: a trained run, or a saved model, in numbers."""

from pathlib import Path

import typer

from msvit_lab.cli.app import AS_JSON, ROUNDS, app, plain_errors
from msvit_lab.cli.tables import show_evaluation


@app.command("eval")
@plain_errors
def evaluate(
    run: Path = typer.Argument(help="A folder written by msvit train, or by msvit.save."),
    data: str | None = typer.Option(None, help="Other data than the run was trained on; a saved model needs some."),
    reducer: str | None = typer.Option(None, help="Put on a reducer that needs no training: evit or tome."),
    rate: float | None = typer.Option(None, help="Share of the tokens that this reducer keeps."),
    size: int | None = typer.Option(None, help="Another side of the input in px, for a classifier."),
    rounds: int = ROUNDS,
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Skip and count images that cannot be read."),
    name: str | None = typer.Option(None, help="Of the evaluation; by default what differs from the run's own, val."),
    compile: bool = typer.Option(True, help="Run the compiled model where it is supported, else say why not."),
    as_json: bool = AS_JSON,
) -> None:
    """Accuracy, tokens, GMACs and measured time of a trained run, also in its folder: RUN/evaluations/NAME.json.

    The run's own evaluation, which report, sweep and bench show, is val. With other data, another reducer or
    size it has a name of its own, such as data-flowers or evit-0.7, and val stays.
    With --rounds 0 nothing is timed, and times that an earlier evaluation of that name measured stay.
    Of a saved model its accuracy is shown beside that of its host, all cells fine; nothing is timed (msvit bench does
    that) or written. Class folders have the names of its classes, their numbers from 0, or else their order.

    Example: msvit eval models/vit-60 --data photos/val
    """
    from msvit.reduction import make_reducer
    from msvit.saving.folder import MODEL
    from msvit_lab.evaluate import evaluate_run
    from msvit_lab.evaluate_saved import evaluate_saved

    if reducer == "none":
        raise ValueError("--reducer none would leave the run's own in place; train it without one to compare")
    if rate is not None and reducer is None:
        raise ValueError(f"--rate is {rate}, but there is no reducer to keep it; give one, such as --reducer evit")
    if (run / MODEL.weights).is_file():
        for option, value in (("reducer", reducer), ("size", size), ("name", name)):
            if value is not None:
                raise ValueError(f"--{option} is {value}, but {run} is a saved model, which is evaluated as it is")
        if data is None:
            raise ValueError(f"{run} is a saved model, without images; give --data, a folder with one for each class")
        show_evaluation(run, evaluate_saved(run, data, skip_bad=skip_bad, compile=compile), as_json)
        return
    found = evaluate_run(
        run, data=data, rounds=rounds, skip_bad=skip_bad, reducer=make_reducer(reducer or "none", rate=rate),
        size=size, name=name, compile=compile,
    )  # fmt: skip
    show_evaluation(run, found, as_json)
