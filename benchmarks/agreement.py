"""How often two gates decide alike on the validation images.

    python benchmarks/agreement.py runs/px224 runs/px192 default --match --out benchmarks/results/gates/alike.json

The paper has 78.4 % of the cells for two backbones and 87.1 % for two input sizes. A gate is that of a run, a folder of
msvit.save_gate, or the word default. A run's gate sees images as the run does, at its own size; a saved gate sees them
as the first run does, in that run's cells. Where grids differ, decisions are compared on the finer one: each of its
cells takes the decision of the other grid's cell that its centre lies in.

Of every pair: `agreement`, the share of cells decided alike; `chance`, what two gates that decide at random would have
with their shares of fine cells, p q + (1 - p)(1 - q); `chance_by_place`, the same with p and q of each cell of the grid
on its own: what two gates would have that know only where fine cells usually lie. With --match every gate
gets the threshold at which its share of fine cells is the mean of all gates' own shares.

Of every gate `changed`: the share of cells that it decides otherwise in a copy of the image that is a negative, darker,
or grey, by its own threshold. A gate that follows content changes few.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import shared
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from msvit.gates import Gate, LogitGate
from msvit.losses import ThresholdController
from msvit_lab.bench.trained import unique_names
from msvit_lab.config import Data
from msvit_lab.gate_names import read_gate

COPIES: dict[str, Callable[[Tensor], Tensor]] = {  # of an image in [0, 1]
    "negative": lambda image: 1 - image,
    "dark": lambda image: 0.4 * image,
    "gamma 2": lambda image: image.square(),
    "grey": lambda image: image.mean(1, keepdim=True).expand_as(image),
}


class Named(NamedTuple):
    name: str
    gate: Gate
    data: Data  # how images are prepared for it


class Decisions(NamedTuple):
    logits: Float[Tensor, "n hc wc"]
    mask: Float[Tensor, "n hc wc"]
    threshold: float | None
    changed: dict[str, float]  # share of cells, by copy of the images

    @property
    def fine_share(self) -> float:
        return self.mask.double().mean().item()


def read_gates(words: list[Path], abouts: dict[Path, dict[str, Any]]) -> list[Named]:
    """`abouts`: of those that are runs. All see the images of the first, each prepared as in its own run."""
    own = {run: read_gate(run) for run in abouts}
    first = next(iter(abouts))
    coarse, source = own[first][0].coarse, abouts[first]["config"].data
    found = []
    for word, name in zip(words, unique_names(words), strict=True):
        gate, data = own[word] if word in own else read_gate(word, coarse)
        data = data or source
        if gate.normalization is not None:
            gate = gate.for_normalization(data.mean, data.std)
        way = {key: getattr(data, key) for key in ("img_size", "mean", "std", "interpolation")}
        found.append(Named(name, gate, replace(source, **way)))
    return found


@torch.inference_mode()
def decide(gates: list[Named], about: dict[str, Any], device: torch.device) -> list[Decisions]:
    """The decisions of every gate for every image, in float32. Images are decoded once for each way to prepare them."""
    ways = list(dict.fromkeys(known.data for known in gates))
    loaders = [shared.val_loader(shared.with_data(about, **vars(way)), device) for way in ways]
    found: list[list[Any]] = [[] for _ in gates]
    for batches in zip(*(loader.iterate(0) for loader in loaders), strict=True):
        assert all(torch.equal(batch.label, batches[0].label) for batch in batches), "the same images in every size"
        for known, own in zip(gates, found, strict=True):
            image = batches[ways.index(known.data)].image
            output = known.gate.to(device).eval()(image)
            own.append((output.logits, output.mask, changes(known, image, output.mask)))
    if not found[0]:
        raise ValueError("0 images were seen: there are none, or none that can be read; give other --data")
    decisions = []
    for known, own in zip(gates, found, strict=True):
        logits, mask, changed = (torch.cat(parts) for parts in zip(*own, strict=True))
        threshold = known.gate.threshold if isinstance(known.gate, LogitGate) else None
        shares = dict(zip(COPIES, changed.mean(0).tolist(), strict=True))
        decisions.append(Decisions(logits, mask, threshold, shares))
    return decisions


def changes(known: Named, image: Tensor, mask: Tensor) -> Float[Tensor, "b copies"]:
    """The share of an image's cells that are decided otherwise in each copy of it."""
    colours = torch.tensor([known.data.mean, known.data.std], device=image.device)
    mean, std = colours[:, :, None, None].unbind(0)
    pixels = (image * std + mean).clamp(0, 1)  # resampling may leave the range
    masks = [known.gate((copy(pixels) - mean) / std).mask for copy in COPIES.values()]
    return torch.stack([(other != mask).float().mean((1, 2)) for other in masks], 1)


def match(gates: list[Named], found: list[Decisions]) -> list[Decisions]:
    """With thresholds at which all have the same share of fine cells, the mean of their own."""
    fixed = [f"{known.name} ({type(known.gate).__name__})" for known in gates if not isinstance(known.gate, LogitGate)]
    if fixed:
        raise ValueError(f"--match moves thresholds, but {', '.join(fixed)} has none; leave out one or the other")
    share = sum(own.fine_share for own in found) / len(found)
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


def collect(words: list[Path], data: str | None, matched: bool, commit: str | None) -> dict[str, Any]:
    """The whole record, as it is written."""
    if len(words) < 2:
        raise ValueError(f"{len(words)} gate was given, but two decide alike or not; give another run, or default")
    runs = [word for word in dict.fromkeys(words) if (word / "config.json").is_file()]
    if not runs:
        names = ", ".join(map(str, words))
        raise ValueError(f"none of {names} is a run, which would say what images to decide for; add one")
    abouts = dict(zip(runs, shared.read_abouts(runs, data), strict=True))
    shared.check_same(runs, list(abouts.values()), ("eval_crop",), "their cells show different places; leave one out")
    about, device = abouts[runs[0]], shared.pick_device()
    gates = read_gates(words, abouts)
    found = decide(gates, about, device)
    found = match(gates, found) if matched else found
    rows = [
        {
            "name": known.name, "gate": type(known.gate).__name__, "img_size": known.data.img_size,
            "coarse": known.gate.coarse, "threshold": own.threshold, "fine_share": own.fine_share,
            "changed": own.changed,
        }
        for known, own in zip(gates, found, strict=True)
    ]  # fmt: skip
    pairs = [
        {"gates": [gates[i].name, gates[j].name], **compare(found[i].mask, found[j].mask)}
        for i, j in combinations(range(len(gates)), 2)
    ]
    made = shared.record(device, commit, about["config"].data.source)
    return {**made, "num_images": len(found[0].mask), "matched": matched, "gates": rows, "pairs": pairs}


def table(results: dict[str, Any]) -> str:
    """Markdown: a line per pair, then what each gate changes in copies of the images."""
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
    return shared.markdown(heads, pairs, shared.markdown(["gate", *COPIES], gates, shared.source_line(results)))


def main() -> None:
    parser = shared.script_parser(__doc__, data=True)
    parser.add_argument("gates", type=Path, nargs="+", metavar="RUN", help="runs, folders of save_gate, default")
    parser.add_argument("--match", action="store_true", help="give all gates the same share of fine cells")
    given = parser.parse_args()
    shared.write(given.out, table, lambda: collect(given.gates, given.data, given.match, given.commit))


if __name__ == "__main__":
    shared.run_script(main)
