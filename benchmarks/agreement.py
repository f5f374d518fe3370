"""How often two gates decide alike on the validation images.

    python benchmarks/agreement.py runs/px224 runs/px192 default --match --out benchmarks/results/gates/alike.json

The paper has 78.4 % of the cells for two backbones and 87.1 % for two input sizes. A gate is that of a run, a folder of
msvit.save_gate, or the word default. A run's gate sees images as the run does, at its own size; a saved gate sees them
as the first run does, in that run's cells. Where grids differ, decisions are compared on the finer one: each of its
cells takes the decision of the other grid's cell that its centre lies in.

Of every pair: `agreement`, the share of cells decided alike; `chance`, what two gates that decide at random would have
with their shares of fine cells, p q + (1 - p)(1 - q); `chance_by_place`, the same with p and q of each cell of the grid
on its own: what two gates would have that know where fine cells usually lie, and do not look. With --match every gate
gets the threshold at which its share of fine cells is the mean of all gates' own shares.

Of every gate `changed`: the share of cells that it decides otherwise in a copy of the image that is a negative, darker,
or grey, by its own threshold. A gate that follows content changes few.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from shared import (
    check_same,
    markdown,
    pick_device,
    read_abouts,
    record,
    run_script,
    source_line,
    val_loader,
    with_data,
)
from torch import Tensor

from msvit.gates import Gate, LogitGate
from msvit.lab.bench.trained import unique_names
from msvit.lab.config import Data
from msvit.lab.gate_names import read_gate
from msvit.lab.run_files import write_json
from msvit.losses import ThresholdController

COPIES: dict[str, Callable[[Tensor], Tensor]] = {  # of an image in [0, 1]
    "negative": lambda image: 1 - image,
    "dark": lambda image: 0.4 * image,
    "gamma 2": lambda image: image.square(),
    "grey": lambda image: image.mean(1, keepdim=True).expand_as(image),
}


class Known(NamedTuple):
    name: str
    gate: Gate
    data: Data  # how it sees images


class Decisions(NamedTuple):
    logits: Float[Tensor, "n hc wc"]
    mask: Float[Tensor, "n hc wc"]
    threshold: float | None
    changed: dict[str, float]  # in a copy of the images: the share of cells


def read_gates(words: list[Path], abouts: dict[Path, dict[str, Any]]) -> list[Known]:
    """`abouts` of those that are runs: all look at the images of the first, each as its own run does."""
    own = {run: read_gate(run) for run in abouts}
    first = next(iter(abouts))
    coarse, source = own[first][0].coarse, abouts[first]["config"].data
    found = []
    for word, name in zip(words, unique_names(words), strict=True):
        gate, data = own[word] if word in own else read_gate(word, coarse)
        data = data or source
        way = {key: getattr(data, key) for key in ("img_size", "mean", "std", "interpolation")}
        found.append(Known(name, gate, replace(source, **way)))
    return found


@torch.inference_mode()
def decide(gates: list[Known], about: dict[str, Any], device: torch.device) -> list[Decisions]:
    """What every gate says of every image, in float32. Images are decoded once for each way to see them."""
    ways = list(dict.fromkeys(known.data for known in gates))
    loaders = [val_loader(with_data(about, **vars(way)), device) for way in ways]
    for known in gates:
        known.gate.to(device).eval()
    outputs: list[list[Any]] = [[] for _ in gates]
    changed: list[list[Tensor]] = [[] for _ in gates]
    for batches in zip(*(loader.iterate(0) for loader in loaders), strict=True):
        assert all(torch.equal(batch.label, batches[0].label) for batch in batches), "the same images in every size"
        for known, own, other in zip(gates, outputs, changed, strict=True):
            image = batches[ways.index(known.data)].image
            own.append(known.gate(image))
            other.append(changes(known, image, own[-1].mask))
    if not outputs[0]:
        raise ValueError("0 images were seen: there are none, or none that can be read; give other --data")
    return [
        Decisions(
            logits=torch.cat([output.logits for output in own]),
            mask=torch.cat([output.mask for output in own]),
            threshold=known.gate.threshold if isinstance(known.gate, LogitGate) else None,
            changed=dict(zip(COPIES, torch.cat(other).mean(0).tolist(), strict=True)),
        )
        for known, own, other in zip(gates, outputs, changed, strict=True)
    ]


def changes(known: Known, image: Tensor, mask: Tensor) -> Float[Tensor, "b copies"]:
    """The share of an image's cells that are decided otherwise in each copy of it."""
    colours = torch.tensor([known.data.mean, known.data.std], device=image.device)
    mean, std = colours[:, :, None, None].unbind(0)
    pixels = (image * std + mean).clamp(0, 1)  # resampling may leave the range
    masks = [known.gate((copy(pixels) - mean) / std).mask for copy in COPIES.values()]
    return torch.stack([(other != mask).float().mean((1, 2)) for other in masks], 1)


def match(gates: list[Known], found: list[Decisions]) -> list[Decisions]:
    """With thresholds at which all have the same share of fine cells, the mean of their own."""
    fixed = [f"{known.name} ({type(known.gate).__name__})" for known in gates if not isinstance(known.gate, LogitGate)]
    if fixed:
        raise ValueError(f"--match moves thresholds, but {', '.join(fixed)} has none; leave out one or the other")
    share = sum(share_of(own.mask) for own in found) / len(found)
    if not 0 < share < 1:
        raise ValueError(
            f"the gates make {share:.0%} of the cells fine, which no threshold can match; leave out --match"
        )
    matched = []
    for own in found:
        threshold = ThresholdController(target=share).to(own.logits.device).update(own.logits)
        mask = (own.logits > threshold).to(own.mask.dtype)
        matched.append(own._replace(mask=mask, threshold=threshold))
    return matched


def compare(one: Float[Tensor, "n h1 w1"], other: Float[Tensor, "n h2 w2"]) -> dict[str, Any]:
    """Two gates' masks of the same images."""
    cells = [max(sides) for sides in zip(one.shape[1:], other.shape[1:], strict=True)]
    a, b = (F.interpolate(mask[:, None].double(), size=cells, mode="nearest-exact")[:, 0] for mask in (one, other))
    return {
        "cells": cells,
        "agreement": (a == b).double().mean().item(),
        "chance": alike(a.mean(), b.mean()).item(),
        "chance_by_place": alike(a.mean(0), b.mean(0)).mean().item(),
        "fine_share": [a.mean().item(), b.mean().item()],
    }


def alike(p: Tensor, q: Tensor) -> Tensor:
    return p * q + (1 - p) * (1 - q)


def share_of(mask: Tensor) -> float:
    return mask.double().mean().item()


def collect(words: list[Path], data: str | None, matched: bool, commit: str | None) -> dict[str, Any]:
    """The whole record, as it is written."""
    if len(words) < 2:
        raise ValueError(f"{len(words)} gate was given, but two decide alike or not; give another run, or default")
    device = pick_device()
    runs = [word for word in dict.fromkeys(words) if (word / "config.json").is_file()]
    if not runs:
        names = ", ".join(map(str, words))
        raise ValueError(f"none of {names} is a run, so nobody says which images to look at; add one")
    abouts = dict(zip(runs, read_abouts(runs, data), strict=True))
    check_same(runs, list(abouts.values()), ("eval_crop",), "their cells show different places; leave one out")
    about = abouts[runs[0]]
    gates = read_gates(words, abouts)
    found = decide(gates, about, device)
    found = match(gates, found) if matched else found
    rows = [
        {
            "name": known.name, "gate": type(known.gate).__name__, "img_size": known.data.img_size,
            "coarse": known.gate.coarse, "threshold": own.threshold, "fine_share": share_of(own.mask),
            "changed": own.changed,
        }
        for known, own in zip(gates, found, strict=True)
    ]  # fmt: skip
    pairs = [
        {"gates": [gates[i].name, gates[j].name], **compare(found[i].mask, found[j].mask)}
        for i, j in combinations(range(len(gates)), 2)
    ]
    num = len(found[0].mask)
    return {**record(about, device, commit), "num_images": num, "matched": matched, "gates": rows, "pairs": pairs}


def table(results: dict[str, Any]) -> str:
    """Markdown: a line a pair, then what each gate changes in copies of the images."""
    heads = ["gates", "cells", "fine cells", "decided alike", "by chance", "by chance, each place on its own"]
    pairs = [
        [
            " and ".join(pair["gates"]), "x".join(map(str, pair["cells"])),
            " and ".join(f"{share:.1%}" for share in pair["fine_share"]),
            f"**{pair['agreement']:.1%}**", f"{pair['chance']:.1%}", f"{pair['chance_by_place']:.1%}",
        ]
        for pair in results["pairs"]
    ]  # fmt: skip
    gates = [[row["name"], *(f"{share:.1%}" for share in row["changed"].values())] for row in results["gates"]]
    return f"{markdown(heads, pairs)}\n\n{markdown(['gate', *COPIES], gates)}\n\n{source_line(results)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gates", type=Path, nargs="+", metavar="RUN", help="runs, folders of save_gate, default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--match", action="store_true", help="give all gates the same share of fine cells")
    parser.add_argument("--data", help="validation images, if not where they were in training")
    parser.add_argument("--commit", help="where the source is from, if it is no git checkout")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    results = collect(given.gates, given.data, given.match, given.commit)
    write_json(given.out, results)
    print(table(results))


if __name__ == "__main__":
    run_script(main)
