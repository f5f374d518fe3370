"""Which target is worth learning for a gate that serves dense models without training them, and gates that learn it.

    python benchmarks/gate_study.py oracle --dense pets=RUN,RUN cub=RUN --out oracle.json --minutes 4
    python benchmarks/gate_study.py train --dense pets=RUN cub=RUN --also voc=VOC --learn pets,voc \\
        --targets attention,delta_token --gates gates --out gates.json --minutes 4
    python benchmarks/gate_study.py evaluate --dense pets=RUN,RUN,RUN cub=RUN --gates gates --out seeds.json

gate_release.py evaluates such gates in Segmenters, and saves one as the gate that comes with msvit is saved.

`oracle` ranks the cells of validation images by the targets themselves (gate_targets.py): an upper bound for gates that
learn them. `train` computes targets of random crops once, trains a gate on each and evaluates it as `evaluate` does.
Sets that are learned from but have no labels (--also) get their targets from the first model of --dense. No weight of
a dense model changes. RUN is a run of `msvit train --gate none`, or a folder of `msvit.save` with --data pets=PATH.

Every row has a budget of multiply-adds, gate included, that is met in the mean over the validation images by a
threshold for all of them (`free`) or by as many tokens in every image (`per_image`). Beside them: the disc, random
cells, and the dense model on smaller images. `kl` and `agree` compare with the dense model's own output: they differ
by less between samples than top-1 does.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gate_photos import Photos, Row
from gate_photos import autocast as autocast  # other scripts import it from here
from gate_tables import BASELINES, SHIPPED, tables
from gate_targets import NUM_MASKS, NUM_PROBES, OUTPUTS, TARGETS, USUAL, Teacher
from gate_training import correlation, make_bank, photo_source, train_gate, with_level
from shared import Clock, pick_device, record, run_script, script_parser

from msvit.gates import DiscGate, Gate, RandomGate
from msvit.saving.folder import load_gate, save_gate
from msvit_lab.bench.results import shortened
from msvit_lab.data.cache import keep_decoded_in
from msvit_lab.json_values import write_json

BUDGETS = (0.72, 0.6, 0.49)  # the dense multiply-adds of 192, 176 and 160 px, of 224
SHRUNK = (192, 176, 160)
LESSON = "lesson.json"  # beside a trained gate: what it learned from


class Results:
    """Rows, written whenever there are new ones."""

    def __init__(self, out: Path, about: dict[str, Any], clock: Clock) -> None:
        self.out, self.about, self.clock, self.rows = out, about, clock, list[Row]()
        out.parent.mkdir(parents=True, exist_ok=True)

    def add(self, rows: list[Row], **about: Any) -> None:
        self.rows += rows
        self.about |= about
        write_json(self.out, self.written())
        for row in rows[:1]:
            shown = ", ".join(f"{r.budget} {100 * r.macs:.0f} %: {100 * r.top1:.2f}" for r in rows)
            self.clock.note(f"{row.set} {row.method}: {shown}")

    def written(self) -> dict[str, Any]:
        return self.about | {"rows": [asdict(row) | {"model": shortened(row.model)} for row in self.rows]}


def families(targets: list[str]) -> list[list[str]]:
    """Targets that share forwards, together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for target in targets:
        groups[target.rsplit("_", 1)[0] if target.endswith(OUTPUTS) else target].append(target)
    return list(groups.values())


def read_photos(args: argparse.Namespace, device: torch.device) -> Iterator[Photos]:
    for name, runs in args.dense.items():
        for run in runs.split(","):
            yield Photos.read(name, run, args.data.get(name), args.num, args.batch, device)


def compare_gates(photos: Photos, gates: dict[str, Gate], results: Results, args: argparse.Namespace) -> None:
    """Dense inputs, baselines and gates on the images of one model; what has been measured is not measured again."""
    known = {"disc": DiscGate(args.coarse), "random": RandomGate(args.coarse), SHIPPED: load_gate("default")}
    done = {row.method for row in results.rows if (row.set, row.model) == (photos.name, photos.run)}
    if not done:
        results.add(photos.dense_rows(args.sizes))
    for name, gate in {**{name: known[name] for name in args.beside}, **gates}.items():
        if name in done:
            continue
        own, scores = None if name in BASELINES else gate, photos.score(gate)
        for area in (0.0, *args.area) if own is not None else (0.0,):
            if results.clock.over():
                return
            method = f"{name}, area {area:g}" if area else name
            results.add(photos.measure(method, scores, args.budgets, own, area))


def oracle(args: argparse.Namespace, results: Results, device: torch.device) -> None:
    for photos in read_photos(args, device):
        compare_gates(photos, {}, results, args)
        teacher = Teacher(photos.model, args.masks, args.probes)
        for family in families(args.targets):
            if results.clock.over():
                return
            for target, scores in photos.oracle(family, teacher).items():
                for level in args.levels:
                    leveled = with_level(scores, level)
                    results.add(photos.measure(f"oracle {target}, level {level:g}", leveled, args.budgets))


def train(args: argparse.Namespace, results: Results, device: torch.device) -> None:
    first: dict[str, Photos] = {}
    for photos in read_photos(args, device):
        first.setdefault(photos.name, photos)
    teacher = next(iter(first.values()))
    banks = []
    for name in args.learn:
        photos = first.get(name, teacher)
        folder = args.also.get(name) or args.data.get(name) or str(photos.prepared.folder)
        banks.append(make_bank(photo_source(Path(folder), args.num_train), photos, args.targets, args, results.clock))
        results.clock.note(f"{name}: {len(banks[-1].image)} crops with {len(args.targets)} targets each")
    crops = {name: len(bank.image) for name, bank in zip(args.learn, banks, strict=True)}
    lesson = {"learned_from": crops, "steps": args.steps, "gate_batch": args.gate_batch, "seed": args.seed}
    results.about |= lesson
    for level in args.levels:
        for target in args.targets:
            if results.clock.over():
                return
            name = f"{target}-{level:g}{args.suffix}"
            gate = train_gate(banks, target, level, args, teacher.prepared.about)
            save_gate(gate, args.gates / name)
            write_json(args.gates / name / LESSON, results.about | {"target": target, "level": level})
            fit = correlation(gate(banks[0].image[:512].float()).logits.detach(), banks[0].scores[target][:512])
            results.clock.note(f"{name}: correlation with the target {fit:.3f} on crops of training")
            for photos in first.values():  # at once, so that a study that runs out of time has whole rows
                compare_gates(photos, {name: gate}, results, args)


def evaluate(args: argparse.Namespace, results: Results, device: torch.device) -> None:
    gates = read_gates(args.gates)
    for photos in read_photos(args, device):
        compare_gates(photos, gates, results, args)


def read_gates(folder: Path) -> dict[str, Gate]:
    """The gate of a folder, or all gates below it."""
    found = [path.parent for path in sorted(folder.rglob("gate.safetensors"))]
    if not found:
        raise ValueError(f"{folder} holds no gate; give --gates a folder that `train` wrote")
    return {path.name: load_gate(path, frozen=True) for path in found}


def names_and_folders(words: list[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise ValueError(f"{word!r} has no name; write NAME=FOLDER, such as pets=runs/dense")
    return dict(word.split("=", 1) for word in words)


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("commands", type=words, help="some of oracle, train and evaluate: oracle,train")
    parser.add_argument("--dense", nargs="*", default=[], help="NAME=RUN,RUN ...: dense models, by set")
    parser.add_argument("--data", nargs="*", default=[], help="NAME=FOLDER ...: if not where they were in training")
    parser.add_argument("--also", nargs="*", default=[], help="NAME=FOLDER ...: images without classes to learn from")
    parser.add_argument("--learn", type=words, default=["pets"], help="sets to learn from")
    parser.add_argument("--targets", type=words, default=list(USUAL))
    parser.add_argument(
        "--levels", type=numbers, default=(1.0, 0.3, 0.15, 0.0), help="share of an image's level that stays"
    )
    parser.add_argument("--budgets", type=numbers, default=BUDGETS)
    parser.add_argument("--sizes", type=sides, default=SHRUNK, help="px of smaller dense inputs")
    parser.add_argument("--area", type=numbers, default=(), help="powers of proportional attention, beside 0")
    parser.add_argument("--gates", type=Path, default=Path("gates"), help="folder of gates, to write or to read")
    parser.add_argument("--suffix", default="", help="of the names of trained gates")
    parser.add_argument("--decoded", type=Path, help="folder of decoded images, for several studies at once")
    parser.add_argument("--beside", type=words, default=[*BASELINES, SHIPPED], help="gates to compare with")
    parser.add_argument("--minutes", type=float, default=4.0, help="no new step begins after these")
    parser.add_argument("--num", type=int, default=10**9, help="validation images of a set")
    parser.add_argument("--num-train", type=int, default=10**9, help="images of a set to learn from")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--masks", type=int, default=NUM_MASKS, help="random masks per image, of the targets delta")
    parser.add_argument("--probes", type=int, default=NUM_PROBES, help="of the targets gradient")
    parser.add_argument("--crops", type=int, default=2, help="random crops per image")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--gate-batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coarse", type=int, default=32)
    parser.add_argument("--widths", type=sides, default=(32, 64, 128))
    parser.add_argument("--depth", type=int, default=2)
    args = parser.parse_args()
    if args.decoded:
        args.decoded.mkdir(parents=True, exist_ok=True)
    args.dense, args.data, args.also = map(names_and_folders, (args.dense, args.data, args.also))
    for what, given, known in (
        ("target", args.targets, TARGETS), ("command", args.commands, COMMANDS),
        ("gate", args.beside, (*BASELINES, SHIPPED)),
    ):  # fmt: skip
        for name in given:
            if name not in known:
                raise ValueError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return args


def words(text: str) -> list[str]:
    return text.split(",") if text else []


def numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def sides(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


COMMANDS = {"oracle": oracle, "train": train, "evaluate": evaluate}


def main() -> None:
    args = parse()
    device = pick_device()
    torch.set_float32_matmul_precision("high")
    results = Results(args.out, record(device, args.commit), Clock(args.minutes))
    with keep_decoded_in(args.decoded) if args.decoded else nullcontext():
        for command in args.commands:
            COMMANDS[command](args, results, device)
    results.add([])
    print(tables(results.written()))


if __name__ == "__main__":
    run_script(main)
