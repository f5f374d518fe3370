"""msvit speed-up: a faster model by a folder of images, and what that costs."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from msvit_lab.cli.app import AS_JSON, DEVICE, app, check_out, choose_device, plain_errors, say


@app.command("speed-up")
@plain_errors
def speed_up(
    model: str = typer.Argument(help="A timm model such as vit_small_patch16_224, a run, or a folder of msvit.save."),
    images: Path = typer.Option(..., help="A folder of images; a few hundred will do, without labels."),
    out: Path = typer.Option(..., help="Folder for the model, for msvit.load."),
    budget: float = typer.Option(0.6, help="Share of the dense multiply-adds."),
    weights: Path | None = typer.Option(None, help="Of a timm model: a file of weights; timm's own otherwise."),
    device: str | None = DEVICE,
    as_json: bool = AS_JSON,
) -> None:
    """Make a model faster by fewer tokens, and print how often it agrees with the dense one, and the times of both.

    At most three quarters of the images choose how many tokens each block merges; on the others both models are
    compared and timed: the dense one as it is, the faster one compiled by msvit.compile. What is written is not
    compiled: msvit.compile(msvit.load(FOLDER)).
    Of a run or a saved model its host is taken, without its gate and reducer.

    Example: msvit speed-up vit_small_patch16_224 --images photos --out models/vit-60
    """
    import msvit
    from msvit.budget.thresholds import check_budget
    from msvit.checks import check_number
    from msvit.segmenter import Segmenter
    from msvit_lab.hosts import create_host, read_model

    check_budget(budget, "macs")
    check_number("budget", budget, below=1, example=0.6)
    given = None
    if Path(model).is_dir():
        if weights is not None:
            raise ValueError(f"{model} has weights of its own; leave out --weights")
        given = read_model(Path(model))[0]
        if isinstance(given, Segmenter):
            raise ValueError(f"{model} is a Segmenter, whose decoder needs all tokens; give a classifier")
        host = given.host
    else:
        host = create_host(model, weights, pretrained=weights is None)
    host = host.to(choose_device(device)).eval()
    own = None if given is None else given.preprocessing
    written = check_out(out)
    fast = msvit.speed_up(host, images, budget, preprocessing=own, verbose=not as_json)
    if given is not None:
        fast.classes, fast.preprocessing = given.classes, given._preprocessing
    msvit.save(fast, out)
    if as_json:
        print(json.dumps(asdict(fast.speed_report) | {"out": str(out)}))
    else:
        say(written)
