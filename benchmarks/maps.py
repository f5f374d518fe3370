"""Where cells are fine: mean and variance of the masks of a sweep, and what gate losses came to expect.

    python benchmarks/maps.py results/sweeps/imagenet_vit_losses.json --only 0.25 --out figures/maps.svg

One column per run: the masks' mean over the validation images, their variance and, where the gate loss has priors,
these at every step they were logged. The file is of benchmarks/collect.py with --maps.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from curves import readable
from matplotlib.figure import Figure

Map = list[list[float]] | None


def maps(runs: list[dict[str, Any]]) -> dict[str, tuple[float, list[Map]]]:
    """Rows of the plot: their names, the highest value each can have, and the map of each run that has one."""
    found: dict[str, tuple[float, list[Map]]] = {
        "mean of masks": (1.0, [run["mask_mean"] for run in runs]),
        "variance": (0.25, [run["mask_var"] for run in runs]),
    }
    known = [{prior["step"]: prior["theta"] for prior in run["priors"]} for run in runs]
    for step in sorted({step for priors in known for step in priors}):
        found[f"prior, step {step}"] = (1.0, [priors.get(step) for priors in known])
    return found


def plot(runs: list[dict[str, Any]], out: Path) -> None:
    rows = maps(runs)
    figure = Figure(figsize=(1.5 * len(runs), 1.6 * len(rows)), layout="tight")
    all_axes = figure.subplots(len(rows), len(runs), squeeze=False)
    for (name, (top, found)), line in zip(rows.items(), all_axes, strict=True):
        line[0].set_ylabel(name, fontsize=8)
        for axes, values in zip(line, found, strict=True):
            axes.set(xticks=[], yticks=[], frame_on=values is not None)
            if values is not None:
                axes.imshow(values, vmin=0, vmax=top, cmap="viridis")
                axes.set_xlabel(f"{np.min(values):.2f} to {np.max(values):.2f}", fontsize=7)
    for axes, run in zip(all_axes[0], runs, strict=True):
        axes.set_title(readable(run["name"]), fontsize=7)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--only", default="", help="of runs with this in their name")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    runs = [run for run in json.loads(given.sweep.read_text())["runs"] if given.only in run["name"]]
    if not runs or "mask_mean" not in runs[0]:
        raise SystemExit(f"{given.sweep} has no maps of such runs; collect them with benchmarks/collect.py --maps")
    plot(runs, given.out)


if __name__ == "__main__":
    main()
