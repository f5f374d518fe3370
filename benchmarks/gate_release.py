"""Gates of gate_study.py in dense-trained Segmenters, and one of them saved as the gate that comes with msvit is.

    python benchmarks/gate_release.py segment --segmenter RUN,RUN,RUN --gates gates --out voc.json --minutes 4
    python benchmarks/gate_release.py save --gates gates/delta_token-0.3 --photos PETS/val VOC/val --out NEW

`segment` measures mIoU with every gate and the disc at some budgets, beside the dense model and its smaller inputs,
and trains nothing; with --per-image the shipped gate also has as many tokens in every window, and with --area it has
proportional attention. `save` adds curves for several input sizes, a threshold and a card.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gate_photos import autocast
from gate_study import BUDGETS, LESSON, numbers, read_gates, sides
from gate_tables import SHIPPED, grouped, mean_of, shown_method
from gate_training import photo_source
from jaxtyping import Float
from shared import Clock, markdown, pick_device, record, run_script, script_parser, source_line, with_data
from torch import Tensor

from msvit.budget import calibrate
from msvit.conversion import convert
from msvit.gates import AllFine, DiscGate, Gate
from msvit.gates.base import check_share, setting
from msvit.gates.curve import Curve
from msvit.saving.folder import load_gate, save_gate
from msvit.segmenter import Segmenter
from msvit.types import GateOutput
from msvit_lab.bench.images import Pictures, short
from msvit_lab.bench.results import shortened
from msvit_lab.build import make_loader, open_val
from msvit_lab.data import Loader
from msvit_lab.data.cache import keep_decoded_in
from msvit_lab.evaluation.segmentation import evaluate_segmenter
from msvit_lab.evaluation.sliding import Slide, cut
from msvit_lab.hosts import read_run
from msvit_lab.json_values import write_json
from msvit_lab.runs import read_config
from msvit_lab.tasks import slide

CURVES = {160: 1000, 224: 1000, 384: 1000, 512: 700, 640: 100}  # px, and images of each folder
BATCH = 100


@dataclass(frozen=True)
class Scenes:
    """Validation images at one size, decoded once, and how windows are cut from them."""

    loader: Loader
    how: Slide

    @staticmethod
    def read(about: dict[str, Any], source: str | None, size: int, device: torch.device) -> "Scenes":
        own = about["config"].data
        side = round((own.short_side or own.img_size) * size / own.img_size)
        about = with_data(about, source=source or own.source, img_size=size, short_side=side, cache=True)
        config = about["config"]
        loader = make_loader(open_val(config, about["classes"]), config, train=False, device=device)
        return Scenes(loader, slide(config))

    def windows(self) -> Iterator[Float[Tensor, "n c s s"]]:
        """All of them, by which budgets are set, some images at a time."""
        for batch in self.loader.iterate(0):
            yield torch.cat([cut(image, self.how) for image in batch.images])


class EqualGate(Gate):
    """The cells that another gate ranks highest, the same share in every image: what `per_image` does, as a gate."""

    def __init__(self, gate: Gate, share: float = 0.3) -> None:
        super().__init__(gate.coarse)
        self.gate, self.share = gate, share

    share = setting("share", check_share)

    def scores(self, image: Tensor) -> Tensor:
        return self.gate.scores(image)

    def forward(self, image: Tensor) -> GateOutput:
        rows, columns = self.cells(image)
        return self.gate.decide_num(image, round(self.share * rows * columns))

    def num_macs(self, num_cells: int) -> int:
        return self.gate.num_macs(num_cells)


@dataclass(frozen=True)
class Method:
    """A gate at a budget of multiply-adds, or without one a dense model on windows of `size` px."""

    name: str
    size: int
    gate: Gate | None = None
    budget: float | None = None
    area: float = 0.0  # power of proportional attention
    per_image: bool = False  # as many tokens in every window

    def described(self) -> dict[str, Any]:
        kind = "dense" if self.gate is None else "per_image" if self.per_image else "free"
        return {
            "method": f"{self.name}, area {self.area:g}" if self.area else self.name, "budget": kind,
            "wanted": self.budget,
        }  # fmt: skip


def methods(side: int, gates: dict[str, Gate], args: argparse.Namespace) -> Iterator[Method]:
    """The dense model and its smaller inputs, then budget by budget the gates, and last variants of the shipped one."""
    for size in (side, *args.sizes):
        yield Method(f"dense, {size} px", size)
    for budget in args.budgets:
        for name, gate in gates.items():
            yield Method(name, side, gate, budget)
    for budget in args.budgets:
        shipped = Method(SHIPPED, side, gates[SHIPPED], budget)
        yield from [replace(shipped, per_image=True)] if args.per_image else []
        yield from (replace(shipped, area=area) for area in args.area)


def segment(args: argparse.Namespace) -> None:
    """Rows are written whenever there is a new one."""
    device, clock = pick_device(), Clock(args.minutes)
    gates: dict[str, Gate] = {"disc": DiscGate(coarse=32), SHIPPED: load_gate("default")}
    gates |= read_gates(args.gates) if args.gates else {}
    results: dict[str, Any] = record(device, args.commit) | {"rows": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    scenes: dict[int, Scenes] = {}
    for run in args.segmenter.split(","):
        dense, about = read_run(Path(run))[0].to(device).eval(), read_config(Path(run))
        for method in methods(about["config"].data.img_size, gates, args):
            if clock.over():
                break
            if method.size not in scenes:
                scenes[method.size] = Scenes.read(about, args.data, method.size, device)
            row = {"run": shortened(run), **method.described(), **measure(dense, method, scenes[method.size])}
            shown = f"{row['method']} {row['budget']} {method.budget or ''}"
            clock.note(f"{shown}: {100 * row['miou']:.2f} at {row['gmacs']:.2f} GMACs")
            results["rows"].append(row)
            write_json(args.out, results)
    print(table(results))


@torch.no_grad()
def measure(dense: Segmenter, method: Method, scenes: Scenes) -> dict[str, Any]:
    """mIoU, and per window tokens and multiply-adds of gate and encoder."""
    device = next(dense.parameters()).device
    if method.gate is None:
        gate: Gate = AllFine(coarse=dense.coarse if scenes.how.window % dense.coarse == 0 else dense.fine)
    else:
        gate = method.gate.for_cells(dense.coarse)
    encoder = convert(dense.host, gate=gate, coarse=gate.coarse, proportional_attention=method.area)
    if method.per_image:
        encoder = encoder.with_options(gate=EqualGate(encoder.gate))
    model = Segmenter(encoder, dense.decoder).to(device).eval()
    with autocast(device):
        model = model if method.budget is None else calibrate(model, scenes.windows(), method.budget)
        result = evaluate_segmenter(model, scenes.loader, scenes.how, num_samples=1)
    tokens, macs = result.costs.tokens.double(), result.costs.macs.double()
    return {
        "miou": result.scores["miou"], "tokens": tokens.mean().item(), "tokens_std": tokens.std().item(),
        "gmacs": macs.mean().item() / 1e9,
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """A line per method and budget, mean over Segmenters, and the mIoU of each of them."""
    lines, dense = [], results["rows"][0]["gmacs"]
    known = [{"budget": "free"} | row for row in results["rows"]]
    keys = ("method", "budget", "wanted")
    for rows in grouped(known, lambda row: str([row[key] for key in keys])).values():
        gmacs, tokens, std, miou = (mean_of(rows, key) for key in ("gmacs", "tokens", "tokens_std", "miou"))
        method = rows[0]["method"] if rows[0]["wanted"] is None else shown_method(rows[0])
        cells = [f"{gmacs:.2f}", f"{gmacs / dense:.0%}", f"{tokens:.0f} +- {std:.0f}", f"{100 * miou:.2f}"]
        lines.append([method, *cells, ", ".join(f"{100 * row['miou']:.2f}" for row in rows)])
    heads = ["VOC", "GMACs", "of dense", "tokens per window", "mIoU", "each model"]
    return markdown(heads, lines, source_line(results))


LICENCES = {
    "pets": "the training images of Oxford-IIIT Pets (CC BY-SA 4.0)",
    "voc": "the training images of Pascal VOC 2012 segmentation (from Flickr, under its terms of use)",
}
CARD = """# The gate that comes with msvit

`msvit.load_gate("default")`: a `ContextGate` for cells of {coarse} px and patches of 16 px (other cells by `coarse=`),
{weights:,} weights, {gmacs:.3f} GMACs for an image of 224 px.

- **Learned from**: {sets}; no labels of pixels. Its target, `{target}` with {level:g} of the
  level of each image, is described in benchmarks/gate_targets.py: what the fine tokens of a cell are worth to
  a dense model that was fine-tuned on Pets.
- **Command** ({machine}, commit {commit}): `{command}`
- **Images** it was trained with had the mean {mean} and std {std}, which is recorded with it:
  in a model or run of another normalisation they are mapped to these before it decides.
- **Threshold**: {threshold:.3f}, at which {share:.0f} % of the cells of {photos} are fine.
- **Budgets**: `msvit.convert(vit, gate="default", budget=0.6)` sets the threshold by curves that are stored with the
  gate. They were computed on centre squares of {photos}: {counts}; only these numbers are stored.
"""


@torch.no_grad()
def save(args: argparse.Namespace) -> None:
    """Write a trained gate to the folder `out`, with curves, a threshold and a card."""
    lesson = json.loads((args.gates / LESSON).read_text())
    sets = lesson["learned_from"]
    if foreign := [name for name in sets if name not in LICENCES]:
        raise ValueError(
            f"{args.gates} learned from {', '.join(foreign)}, which a gate that is passed on may not; "
            f"train one with gate_study.py train --learn {','.join(LICENCES)}"
        )
    device = pick_device()
    gate: Any = load_gate(args.gates).to(device).eval()
    about = gate.normalization
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (about.mean, about.std))
    pictures, curves = [Pictures(folder) for folder in args.photos], {}
    for each, folder in zip(pictures, args.photos, strict=True):
        each.source = photo_source(folder)
    for side, wanted in CURVES.items():
        images = torch.cat([each.squares(side, min(wanted, args.num), least=1) for each in pictures])
        parts = images.split(BATCH)
        scores = torch.cat([gate.scores((part.to(device) / 255 - mean) / std) for part in parts]).cpu()
        curves[side] = Curve.of(scores)
        if side == 224:
            gate.threshold = scores.flatten().double().quantile(1 - args.share).item()
    gate = gate.cpu().with_settings(curves=tuple(curves.values()), noise=0.0)
    save_gate(gate, args.out)
    card = CARD.format(
        coarse=gate.coarse, weights=sum(p.numel() for p in gate.parameters()), gmacs=gate.num_macs(49) / 1e9,
        sets=" and ".join(LICENCES[name] for name in sets), target=lesson["target"],
        level=lesson["level"],
        command=lesson["command"], commit=lesson["commit"], machine=lesson["machine"], mean=about.mean, std=about.std,
        threshold=gate.threshold, share=100 * args.share, photos=" and ".join(map(short, args.photos)),
        counts=", ".join(f"{curve.num_images} at {side} px" for side, curve in curves.items()),
    )  # fmt: skip
    (args.out / "README.md").write_text(card)
    print(card)


COMMANDS = {"segment": segment, "save": save}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "--gates", type=Path, help="a gate, or a folder of gates, of gate_study.py train; segment also runs without"
    )
    parser.add_argument("--decoded", type=Path, help="folder of decoded images, for several commands at once")
    parser.add_argument("--segmenter", help="RUN,RUN: dense Segmenters")
    parser.add_argument("--data", help="validation images, if not where they were in training")
    parser.add_argument("--sizes", type=sides, default=(304, 272, 240), help="px of smaller dense windows")
    parser.add_argument("--budgets", type=numbers, default=BUDGETS)
    parser.add_argument("--per-image", action="store_true", help="also the shipped gate with equal tokens per window")
    parser.add_argument("--area", type=numbers, default=(), help="also the shipped gate with proportional attention")
    parser.add_argument("--minutes", type=float, default=4.0, help="no new measurement begins after these")
    parser.add_argument("--photos", type=Path, nargs="*", default=[], help="folders whose images set the curves")
    parser.add_argument("--num", type=int, default=10**9, help="images of each folder, at most")
    parser.add_argument("--share", type=float, default=0.3, help="of fine cells at the saved threshold")
    args = parser.parse_args()
    if args.command == "save" and not args.gates:
        parser.error("save needs --gates, the folder of the gate to save")
    if args.decoded:
        args.decoded.mkdir(parents=True, exist_ok=True)
    with keep_decoded_in(args.decoded) if args.decoded else nullcontext():
        COMMANDS[args.command](args)


if __name__ == "__main__":
    run_script(main)
