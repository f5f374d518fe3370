"""Calibrate a model on a folder of images, and what each budget gives: tokens, multiply-adds, accuracy.

    model = find_model("runs/pets", gate=None)                     # a run, a folder of msvit.save, or a timm name
    images = Prepared(model, Path("photos"), size=224, num=512)    # as the model wants them; labels by folder, if asked
    rows = budget_rows(model, images, (0.4, 0.6, 0.8))
    dense_rows(model, images)                                      # the dense host at smaller inputs, to compare
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor

from msvit.budget.thresholds import Cost, Scored, cost_setting, score_images
from msvit.conversion import convert
from msvit.gates import AllFine
from msvit.saving.host import check_name
from msvit.segmenter import Segmenter
from msvit_lab.bench.images import list_places
from msvit_lab.build import dense_unit, fit_dense
from msvit_lab.data import Batch, Loader, batches, open_source
from msvit_lab.data.loader import usable_cores
from msvit_lab.data.sources import FileSource
from msvit_lab.data.transforms import shuffled
from msvit_lab.hosts import check_download, read_model
from msvit_lab.viz.pictures import save_figure

BATCH = 64
FILTERS = ("bilinear", "bicubic")
SMALLER = (1.0, 0.875, 0.75, 0.625, 0.5)  # inputs of the dense model, as shares of the side
COLOURS = {"gate": "#0072B2", "dense": "#E69F00"}


@dataclass(frozen=True)
class Row:
    """What a setting of the gate, or the dense model at some input size, gives on average."""

    name: str
    budget: float | None
    value: float | None  # the gate's threshold or share
    fine_share: float
    tokens: float
    gmacs: float  # gate included
    top1: float | None = None


def find_model(
    name: str, gate: str | None, weights: Path | None = None, pretrained: bool = False,
    proportional_attention: float | None = None,
) -> Any:  # fmt: skip
    """A run's model, a saved one, or a timm model of this name, with its own gate or the one named.

    The same holds for `proportional_attention`, which is 0 for a timm model.
    """
    folder, power = Path(name), proportional_attention
    if folder.is_dir():
        if weights is not None or pretrained:
            raise ValueError(f"{folder} has weights of its own; leave out --weights and --pretrained")
        model, _ = read_model(folder)
    else:
        model = convert(make_host(name, weights, pretrained), gate=gate or "default")
        gate = None
    if gate is None and not isinstance(model.gate, AllFine):
        return (model if power is None else model.with_options(proportional_attention=power)).eval()
    power = model.proportional_attention if power is None else power
    options: dict[str, Any] = {"merge_at": model.backbone.merge_at, "reducer": model.reducer}
    other: Any = convert(model.host, gate=gate or "default", proportional_attention=power, **options)
    if isinstance(model, Segmenter):
        other = Segmenter(other, model.decoder)
    other.take_metadata(model)
    return other.eval()


def make_host(name: str, weights: Path | None, pretrained: bool) -> Any:
    """A timm model: with random weights, with those of a file, or with timm's own."""
    check_name(name)
    options: dict[str, Any] = {"pretrained": pretrained or weights is not None}
    if weights is not None:
        if not weights.is_file():
            raise ValueError(f"--weights is {weights}, but there is no such file; give a file of weights")
        options["pretrained_cfg_overlay"] = {"file": str(weights)}
    elif pretrained:
        check_download(name)
    try:
        return timm.create_model(name, **options)
    except Exception as error:  # whatever a hub, a file of weights or a constructor may raise
        what = weights or ("its pretrained weights" if pretrained else "random weights")
        raise ValueError(f"timm cannot build {name} from {what} ({type(error).__name__}: {error})") from None


class Prepared:
    """Images of a folder as the model wants them, in an order that is shuffled once, always in the same way."""

    def __init__(
        self, model: Any, folder: Path, size: int | None, num: int, labels: bool = False, more: Sequence[Path] = ()
    ) -> None:
        """`more`: further folders, of images without labels."""
        if num < 1:
            raise ValueError(f"--num is {num}, but must be at least 1")
        self.about, self.folder, self.num_bad = resolve_model_data_config(model), folder, 0
        own = size or max(model.coarse, self.about["input_size"][-1] // model.coarse * model.coarse)
        if own % model.coarse:
            raise ValueError(f"--size is {own}, but cells of {model.coarse}px need a multiple of {model.coarse}")
        self.size = own
        if labels:
            if isinstance(model, Segmenter) or model.classes is None:
                raise ValueError("--labels needs a classifier with names of classes, such as a run of msvit train")
            found = open_source(str(folder), split_of(folder), classes=list(model.classes))
            assert isinstance(found, FileSource), "a folder"
        else:
            places = [place for each in (folder, *more) for place in list_places(each)]
            found = FileSource(places, [0] * len(places), ["image"])
        order = shuffled(len(found), seed=0, epoch=0)[:num]
        self.source = FileSource([found.places[i] for i in order], [found.labels[i] for i in order], found.classes)

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
        self.num_bad = loader.num_skipped
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
            "interpolation": about["interpolation"] if about["interpolation"] in FILTERS else "bicubic",
            "eval_crop": 1.0 if about["crop_mode"] == "squash" else about["crop_pct"],
        }  # fmt: skip
        return batches(source, img_size=size, **{**usual, **options})


def split_of(folder: Path) -> str:
    """"val" where the folder has such a part, else all of it."""
    return "val" if any((folder / name).exists() for name in ("val", "val.tar")) else "all"


def measure(model: Any, images: list[Batch], scored: Scored, name: str, value: float, budget: float | None) -> Row:
    """Mean tokens and multiply-adds of the images with this threshold or share."""
    fine = scored.fine(value, cost_setting(model.gate))
    macs, tokens = (Cost(model, scored.grid, unit) for unit in ("macs", "tokens"))
    tokens_mean, macs_mean = (float(cost(fine).mean()) * cost.dense for cost in (tokens, macs))
    return Row(name, budget, value, float(fine.double().mean()), tokens_mean, macs_mean / 1e9)


def budget_rows(
    model: Any, images: list[Batch], budgets: Sequence[float], unit: str = "macs", labels: bool = False
) -> list[Row]:
    """A row for each budget that can be met, and how many images have the right class, if asked."""
    scored = score_images(model, [batch.image for batch in images])
    ends = Cost(model, scored.grid, unit).by_count()[[0, -1]]
    rows = []
    for budget in sorted({*budgets}):
        if ends[0] <= budget <= min(ends[1], 1):
            value = scored.solve(model, budget, unit, cost_setting(model.gate))
            row = measure(model, images, scored, f"{budget:g}", value, budget)
            rows.append(replace(row, top1=top1(with_value(model, value), images)) if labels else row)
    return rows


def chosen_row(model: Any, images: list[Batch], budget: float, labels: bool = False) -> Row:
    """The model as it is calibrated."""
    scored = score_images(model, [batch.image for batch in images])
    row = measure(model, images, scored, "chosen", model.gate.config[cost_setting(model.gate)], budget)
    return replace(row, top1=top1(model, images)) if labels else row


def dense_rows(model: Any, prepared: Prepared) -> list[Row]:
    """The dense model at the size of the images and at smaller ones."""
    dense = convert(model.host, gate="all-fine", merge_at=model.backbone.merge_at).eval()
    unit, rows = dense_unit(dense.backbone), []
    for size in sorted({max(unit, round(prepared.size * part / unit) * unit) for part in SMALLER}):
        images, fitted = prepared.batches(size), fit_dense(dense, size)
        grid = fitted.grid(images[0].image)
        gmacs = fitted.backbone.dense_macs(grid) / 1e9
        rows.append(Row(f"dense, {size} px", None, None, 1.0, float(grid.num_patches), gmacs, top1(fitted, images)))
    return rows


def with_value(model: Any, value: float) -> Any:
    return model.with_options(gate=model.gate.with_settings(**{cost_setting(model.gate): value}))


@torch.inference_mode()
def top1(model: Any, images: list[Batch]) -> float:
    """The share of images with the right class."""
    right: list[Tensor] = [model(batch.image).logits.argmax(1) == batch.label for batch in images]
    return torch.cat(right).double().mean().item()


def plot_rows(gated: list[Row], dense: list[Row], path: Path) -> Path:
    """Accuracy over GMACs, one line for the gate at several budgets and one for the dense model, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, words, rows in (("gate", "gate, by budget", gated), ("dense", "dense, by input size", dense)):
        ordered = sorted(rows, key=lambda row: row.gmacs)
        x, y = [row.gmacs for row in ordered], [100 * (row.top1 or 0) for row in ordered]
        axes.plot(x, y, "-o", color=COLOURS[name], label=words, markersize=4)
    axes.set(xlabel="GMACs per image", ylabel="top-1, %", xlim=(0, None))
    axes.grid(alpha=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return save_figure(figure, path)
