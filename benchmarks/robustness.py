"""What becomes of accuracy and cost when the content of images is zoomed or moved (the paper's fig:robustness).

    python benchmarks/robustness.py runs/t0.3-w1-s* runs/disc-0.3-s* --out benchmarks/results/gates/robustness.json \\
        --plot benchmarks/results/gates/robustness.svg

Trained classifiers, such as one with a learned gate and one with a fixed disc, see every validation image in every
view: as it is, its content smaller or larger, moved along either side, and zoomed and moved at random. As in the paper,
a random view is drawn once and shown of all images. Where there is no content a view has the mean colour, which is 0
once normalised; the paper does not say. Images are decoded once, and all runs see the same pixels, in the precision
they were trained in.

The table goes to the terminal. In the file `views` lists the views, and every list of `runs` and `settings` has a value
for each: top1, gmacs and fine_share, means over the images. A setting is the mean of runs that differ in their seed
alone; its top1_change and gmacs_change are differences from the images as they are.
"""

import math
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import shared
import torch
import torch.nn.functional as F
from jaxtyping import Float
from shared import by_setting, readable
from torch import Tensor

from msvit.model import MSViT
from msvit_lab.bench.trained import unique_names
from msvit_lab.data import Loader
from msvit_lab.evaluation.shared import packed
from msvit_lab.hosts import read_run
from msvit_lab.viz.views import random_views

ZOOMS = (0.5, 0.7, 0.85, 1.2, 1.5, 2.0)
SHIFTS = (-0.375, -0.25, -0.125, 0.125, 0.25, 0.375)
NUM_RANDOM = 24
SEEN = ("img_size", "mean", "std", "interpolation", "eval_crop", "num_val")
PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEASURED = ("top1", "gmacs", "fine_share")
CHANGES = ("top1", "top1_change", "gmacs", "gmacs_change")


class View(NamedTuple):
    """The content `zoom` times as large about the centre, then moved by shares of the side."""

    kind: str  # as it is, zoom, right, down or random
    zoom: float = 1.0
    right: float = 0.0
    down: float = 0.0

    @property
    def words(self) -> str:
        if self.kind in ("as it is", "random"):
            return self.kind
        if self.kind == "zoom":
            return f"zoom {self.zoom:g}"
        moved = self.right + self.down
        way = self.kind if moved > 0 else {"right": "left", "down": "up"}[self.kind]
        return f"{way} {abs(moved):.1%}"


class Run(NamedTuple):
    name: str
    seed: int
    gate: str
    dtype: torch.dtype  # of autocast
    model: MSViT


def make_views(num_random: int = NUM_RANDOM) -> list[View]:
    """The first is the image as it is."""
    views = [View("as it is"), *(View("zoom", zoom=zoom) for zoom in ZOOMS)]
    views += [View("right", right=shift) for shift in SHIFTS] + [View("down", down=shift) for shift in SHIFTS]
    return views + [View("random", *view) for view in random_views(num_random)[1:]]


def show(image: Float[Tensor, "b c h w"], view: View) -> Float[Tensor, "b c h w"]:
    """Normalised images, in a view. Not under autocast, which would round where pixels come from."""
    if view[1:] == (1.0, 0.0, 0.0):
        return image
    back = image.new_tensor([[1.0, 0.0, -2 * view.right], [0.0, 1.0, -2 * view.down]]) / view.zoom
    grid = F.affine_grid(back[None], [1, *image.shape[1:]], align_corners=False)  # (1, h, w, 2), in -1 to 1
    if view.zoom < 1:  # grid_sample alone would skip pixels; places in the grid are the same at any size
        size = [round(side * view.zoom) for side in image.shape[2:]]
        image = F.interpolate(image, size=size, mode="bilinear", align_corners=False, antialias=True)
    return F.grid_sample(image, grid.expand(len(image), -1, -1, -1), padding_mode="zeros", align_corners=False)


@torch.inference_mode()
def measure(runs: list[Run], loader: Loader, views: list[View], device: torch.device) -> tuple[Tensor, int]:
    """(runs, views, measured) means over the images, and how many there were."""
    sums = torch.zeros(len(runs), len(views), len(MEASURED), dtype=torch.float64, device=device)
    num = 0
    models = [packed(run.model) for run in runs]
    for batch in loader.iterate(0):
        num += len(batch.label)
        for v, view in enumerate(views):
            image = show(batch.image, view)
            for r, (run, model) in enumerate(zip(runs, models, strict=True)):
                with torch.autocast(device.type, run.dtype, enabled=run.dtype is not torch.float32):
                    output = model(image)
                right, macs = output.logits.argmax(1) == batch.label, model.macs_of(output)
                found = (right, macs.double() / 1e9, output.gate.mask.mean((1, 2)))
                sums[r, v] += torch.stack([each.double().sum() for each in found])
    if num == 0:
        raise ValueError("0 images were evaluated: there are none, or none that can be read; give other --data")
    return sums.cpu() / num, num


def collect(folders: list[Path], views: list[View], source: str | None, commit: str | None) -> dict[str, Any]:
    """The whole record, as it is written."""
    device, abouts = shared.pick_device(), shared.read_abouts(folders, source)
    shared.check_same(folders, abouts, SEEN, "all runs must see the same pixels; leave one out")
    if len({tuple(about["classes"]) for about in abouts}) > 1:
        raise ValueError("the runs know different classes, but are asked about the same images; leave some out")
    runs = []
    for folder, about, name in zip(folders, abouts, unique_names(folders), strict=True):
        config, model = about["config"], read_run(folder)[0].to(device)
        runs.append(Run(name, config.seed, config.model.gate, PRECISIONS[config.optim.precision], model))
    found, num = measure(runs, shared.val_loader(abouts[0], device), views, device)
    data = abouts[0]["config"].data
    rows = [
        {"name": run.name, "seed": run.seed, "gate": run.gate, "precision": str(run.dtype).removeprefix("torch.")}
        | dict(zip(MEASURED, own.T.tolist(), strict=True))
        for run, own in zip(runs, found, strict=True)
    ]  # fmt: skip
    return {
        **shared.record(device, commit, data.source), "img_size": data.img_size, "num_images": num,
        "views": [view._asdict() for view in views], "runs": rows, "settings": settings(rows),
    }  # fmt: skip


def settings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs that differ in their seed alone as one, in the order they were given."""
    found = []
    for name, own in by_setting(rows).items():
        means: dict[str, Any] = {
            key: [mean(values) for values in zip(*(row[key] for row in own), strict=True)] for key in MEASURED
        }
        for key in ("top1", "gmacs"):
            means[f"{key}_change"] = [value - means[key][0] for value in means[key]]
        found.append({"name": name, "num_runs": len(own), **means})
    return found


def table(results: dict[str, Any]) -> str:
    """Markdown: a line per view, the random ones as their mean; the first setting is held against each other one."""
    views, found = [View(**view) for view in results["views"]], results["settings"]
    heads = ["content", *(f"{readable(each['name'])}, {what}" for each in found for what in ("top-1", "GMACs"))]
    heads += [f"top-1 over {readable(other['name'])}" for other in found[1:]]
    rows = []
    for words in dict.fromkeys(view.words for view in views):
        places = [place for place, view in enumerate(views) if view.words == words]
        means = [{key: mean(each[key][place] for place in places) for key in CHANGES} for each in found]
        cells = [words if len(places) == 1 else f"{words}, mean of {len(places)}"]
        for own in means:
            cells.append(f"{100 * own['top1']:.1f} ({100 * own['top1_change']:+.1f})")
            cells.append(f"{own['gmacs']:.2f} ({own['gmacs_change']:+.2f})")
        cells += [f"{100 * (means[0]['top1'] - other['top1']):+.1f}" for other in means[1:]]
        rows.append(cells)
    return shared.markdown(heads, rows, shared.source_line(results))


def plot(results: dict[str, Any], out: Path) -> None:
    """Accuracy above, cost below: by zoom, by shift, and at random the first setting against each other one."""
    views, (first, *others) = [View(**view) for view in results["views"]], results["settings"]
    drawn = [place for place, view in enumerate(views) if view.kind == "random"]
    others = others if drawn else []
    figure, panels = plt.subplots(2, 3 + len(others), figsize=(4 * (3 + len(others)), 7), squeeze=False)
    kinds = (("top1", "top-1, %", 100, "RdBu"), ("gmacs", "GMACs", 1, "RdBu_r"))  # blue is better
    for row, (key, name, scale, colours) in enumerate(kinds):
        for axes, kind in zip(panels[row], ("zoom", "right", "down"), strict=False):
            if kind != "zoom":
                axes.sharey(panels[row][0])
            places = [(getattr(view, kind), i) for i, view in enumerate(views) if view.kind in (kind, "as it is")]
            draw(axes, results, sorted(places), key, scale)
            axes.set_xlabel("zoom" if kind == "zoom" else f"moved {kind}, share of the side")
            axes.grid(alpha=0.3)
        panels[row][0].set_ylabel(name)
        for axes, other in zip(panels[row][3:], others, strict=True):
            gaps = [scale * (first[key][place] - other[key][place]) for place in drawn]
            reach = max(map(abs, gaps)) or 1.0
            far = [math.hypot(views[place].right, views[place].down) for place in drawn]
            how = {"c": gaps, "cmap": colours, "vmin": -reach, "vmax": reach, "edgecolors": "grey"}
            dots = axes.scatter(far, [views[place].zoom for place in drawn], **how)
            figure.colorbar(dots, label=f"{name}, over {readable(other['name'])}")
            axes.set_xlabel("distance moved, share of the side")
            axes.set_ylabel("zoom")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def draw(axes: Any, results: dict[str, Any], places: list[tuple[float, int]], key: str, scale: float) -> None:
    """Of every setting a curve of means over seeds; bars go from the lowest to the highest."""
    where = [place for place, _ in places]
    for name, own in by_setting(results["runs"]).items():
        scores = scale * np.array([[row[key][i] for _, i in places] for row in own])  # (seeds, views)
        middle = scores.mean(0)
        bars = (middle - scores.min(0), scores.max(0) - middle)
        axes.errorbar(where, middle, yerr=bars, elinewidth=0.6, marker="o", markersize=4, label=name)


def main() -> None:
    parser = shared.script_parser(__doc__, data=True)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--random", type=int, default=NUM_RANDOM, help="how many random views")
    given = parser.parse_args()
    views = make_views(given.random)
    results = shared.write(given.out, table, lambda: collect(given.runs, views, given.data, given.commit))
    if given.plot is not None:
        plot(results, given.plot)


if __name__ == "__main__":
    shared.run_script(main)
