"""Calibrate a model on a folder of images, and what each budget gives: tokens and multiply-adds.

    model = find_model("runs/pets", gate=None)                     # a run, a folder of msvit.save, or a timm name
    images = Prepared(model, [Path("photos")], size=224, num=512)  # as the model wants them
    rows = budget_rows(model, images.batches(images.size), (0.4, 0.6, 0.8))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.data import resolve_model_data_config

from msvit.budget.thresholds import Cost, Scored, cost_setting, score_images
from msvit.conversion import convert
from msvit.gates import AllFine
from msvit.segmenter import Segmenter
from msvit_lab.bench.images import list_places
from msvit_lab.data import Batch, Loader, batches
from msvit_lab.data.loader import usable_cores
from msvit_lab.data.sources import FileSource
from msvit_lab.data.transforms import shuffled
from msvit_lab.hosts import create_host, read_model

BATCH = 64


@dataclass(frozen=True)
class Row:
    """What a setting of the gate gives on average."""

    name: str
    value: float  # the gate's threshold or share
    fine_share: float
    tokens: float
    gmacs: float  # gate included


def find_model(name: str, gate: str | None, weights: Path | None = None) -> Any:
    """A run's model, a saved one, or a timm model of timm's weights or a file's; with its own gate or that named."""
    folder = Path(name)
    if folder.is_dir():
        if weights is not None:
            raise ValueError(f"{folder} has weights of its own; leave out --weights")
        model, _ = read_model(folder)
    else:
        model = convert(create_host(name, weights, pretrained=weights is None), gate=gate or "default")
        gate = None
    if gate is None and not isinstance(model.gate, AllFine):
        return model.eval()
    if gate is None and model.reducer is not None:  # all fine, and tokens are merged: the budget is the reducer's
        cost_setting(model.gate)
    other: Any = convert(
        model.host, gate=gate or "default", merge_at=model.backbone.merge_at, reducer=model.reducer
    )
    if isinstance(model, Segmenter):
        other = Segmenter(other, model.decoder)
    other.take_metadata(model)
    return other.eval()


class Prepared:
    """Images of a folder as the model wants them, in an order that is shuffled once, always in the same way."""

    def __init__(self, model: Any, folders: Sequence[Path], size: int | None, num: int) -> None:
        self.about, self.folder, self.num_bad = resolve_model_data_config(model), folders[0], 0
        own = size or max(model.coarse, self.about["input_size"][-1] // model.coarse * model.coarse)
        if own % model.coarse:
            raise ValueError(f"--size is {own}, but cells of {model.coarse}px need a multiple of {model.coarse}")
        self.size = own
        places = [place for folder in folders for place in list_places(folder)]
        order = shuffled(len(places), seed=0, epoch=0)[:num]
        self.source = FileSource([places[i] for i in order], [0] * len(order), ["image"])

    def batches(self, size: int, source: FileSource | None = None, **options: Any) -> list[Batch]:
        """All that can be read, as squares of this side; `options` are those of a loader, such as `device`."""
        source = self.source if source is None else source
        loader = self.loader(source, size, workers=0 if len(source) <= BATCH else usable_cores(), **options)
        try:
            found = list(loader.iterate(0))
        except ValueError as error:  # not one of them is good
            raise ValueError(
                f"none of the {len(source)} images of {self.folder} can be read; give --images others, or copy "
                f"them again"
            ) from error
        self.num_bad = len(loader.skipped)
        return found

    def part(self, first: int, last: int) -> FileSource:
        """Some of the images, by their place in the order."""
        source = self.source
        return FileSource(source.places[first:last], source.labels[first:last], source.classes)

    def loader(self, source: FileSource, size: int, **options: Any) -> Loader:
        """Of some of the images, those that can be read, by default for evaluation."""
        about = self.about
        usual = {
            "train": False, "batch_size": BATCH, "skip_bad": True,
            "mean": tuple(about["mean"]), "std": tuple(about["std"]),
            "interpolation": about["interpolation"] if about["interpolation"] == "bilinear" else "bicubic",
            "eval_crop": 1.0 if about["crop_mode"] == "squash" else about["crop_pct"],
        }  # fmt: skip
        return batches(source, img_size=size, **{**usual, **options})


def measure(model: Any, scored: Scored, name: str, value: float) -> Row:
    """Mean tokens and multiply-adds of the images with this threshold or share."""
    fine = scored.fine(value, cost_setting(model.gate))
    macs, tokens = (Cost(model, scored.grid, unit) for unit in ("macs", "tokens"))
    tokens_mean, macs_mean = (float(cost(fine).mean()) * cost.dense for cost in (tokens, macs))
    return Row(name, value, float(fine.double().mean()), tokens_mean, macs_mean / 1e9)


def budget_rows(model: Any, images: list[Batch], budgets: Sequence[float]) -> list[Row]:
    """A row for each budget that can be met, and one for the model as it is."""
    scored, setting = score_images(model, [batch.image for batch in images]), cost_setting(model.gate)
    ends = Cost(model, scored.grid, "macs").by_count()[[0, -1]]
    possible = [budget for budget in sorted({*budgets}) if ends[0] <= budget <= min(ends[1], 1)]
    rows = [measure(model, scored, f"{each:g}", scored.solve(model, each, "macs", setting)) for each in possible]
    return [*rows, measure(model, scored, "chosen", model.gate.config[setting])]
