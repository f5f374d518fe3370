"""Where cells are fine: mean and variance of the masks of a sweep, and what gate losses came to expect.

    python benchmarks/maps.py benchmarks/results/sweeps/pets_losses.json --only 0.25 --out docs/images/losses.svg

A column a run; the masks' mean over the validation images, their variance and, where the gate loss has priors, the last
of these. The file is of benchmarks/collect.py with --maps.
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

ROWS = {"mean of masks": 1.0, "variance": 0.25, "prior at the end": 1.0}  # and the highest value each can have


def maps(run: dict[str, Any]) -> list[np.ndarray | None]:
    last = run["priors"][-1]["theta"] if run["priors"] else None
    return [None if rows is None else np.array(rows) for rows in (run["mask_mean"], run["mask_var"], last)]


def plot(runs: list[dict[str, Any]], out: Path) -> None:
    figure, all_axes = plt.subplots(len(ROWS), len(runs), figsize=(1.5 * len(runs), 1.6 * len(ROWS)), squeeze=False)
    for column, run in enumerate(runs):
        for axes, (name, top), values in zip(all_axes[:, column], ROWS.items(), maps(run), strict=True):
            axes.set_xticks([])
            axes.set_yticks([])
            if values is None:
                axes.set_frame_on(False)
            else:
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
