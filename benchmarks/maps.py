"""Where cells are fine: mean and variance of the masks of a sweep, and what gate losses came to expect.

    python benchmarks/maps.py benchmarks/results/sweeps/pets_losses.json --only 0.25 --out docs/images/losses.svg

A column a run; the masks' mean over the validation images, their variance and, where the gate loss has priors, these
whenever they were looked at. The file is of benchmarks/collect.py with --maps.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from curves import setting

Map = list[list[float]] | None


def maps(runs: list[dict[str, Any]]) -> dict[str, tuple[float, list[Map]]]:
    """Rows of the plot: their names, the highest value each can have, and the map of each run that has one."""
    found: dict[str, tuple[float, list[Map]]] = {
        "mean of masks": (1.0, [run["mask_mean"] for run in runs]),
        "variance": (0.25, [run["mask_var"] for run in runs]),
    }
    known = [{look["step"]: look["theta"] for look in run["priors"]} for run in runs]
    for step in sorted({step for looks in known for step in looks}):
        found[f"prior, step {step}"] = (1.0, [looks.get(step) for looks in known])
    return found


def plot(runs: list[dict[str, Any]], out: Path) -> None:
    rows = maps(runs)
    figure, all_axes = plt.subplots(len(rows), len(runs), figsize=(1.5 * len(runs), 1.6 * len(rows)), squeeze=False)
    for column, run in enumerate(runs):
        for axes, (name, (top, own)) in zip(all_axes[:, column], rows.items(), strict=True):
            axes.set_xticks([])
            axes.set_yticks([])
            if own[column] is None:
                axes.set_frame_on(False)
            else:
                values = np.array(own[column])
                axes.imshow(values, vmin=0, vmax=top, cmap="viridis")
                axes.set_xlabel(f"{values.min():.2f} to {values.max():.2f}", fontsize=7)
            if column == 0:
                axes.set_ylabel(name, fontsize=8)
        all_axes[0][column].set_title(setting(run["name"]).replace("-", " "), fontsize=7)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


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
