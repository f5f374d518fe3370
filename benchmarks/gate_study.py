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
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gate_tables import BASELINES, SHIPPED, tables
from gate_targets import NUM_MASKS, NUM_PROBES, OUTPUTS, TARGETS, USUAL, Teacher, target_scores
from jaxtyping import Float
from shared import pick_device, record, run_script, script_parser
from torch import Tensor

from msvit.budget import Cost, Scored
from msvit.gates import ContextGate, DiscGate, Gate, Normalization, RandomGate
from msvit.lab.bench.images import list_places
from msvit.lab.bench.results import shortened
from msvit.lab.build import fit_dense
from msvit.lab.calibration import Prepared, find_model, split_of
from msvit.lab.data import batches
from msvit.lab.data.cache import keeping
from msvit.lab.data.sources import FileSource
from msvit.lab.data.transforms import shuffled
from msvit.lab.json_values import write_json
from msvit.lab.runs import read_config
from msvit.saved_folder import load_gate, save_gate

BUDGETS = (0.72, 0.6, 0.49)  # the dense multiply-adds of 192, 176 and 160 px, of 224
SHRUNK = (192, 176, 160)
LOWEST = 0.01  # quantile of a target below which values count as this
EXACT = "one_"  # targets of one cell: their differences drown in the rounding of bfloat16
LESSON = "lesson.json"  # beside a trained gate: what it learned from


class Clock:
    """Whether the minutes are over."""

    def __init__(self, minutes: float) -> None:
        self.begin, self.limit = time.perf_counter(), 60 * minutes

    def over(self) -> bool:
        return time.perf_counter() - self.begin > self.limit

    def note(self, words: str) -> None:
        print(f"{time.perf_counter() - self.begin:6.1f} s  {words}", flush=True)


@dataclass(frozen=True)
class Row:
    """A way to choose cells, or a smaller dense input, for one model and set."""

    set: str
    model: str
    method: str
    budget: str  # free, per_image or dense
    wanted: float | None
    macs: float  # share of the dense multiply-adds, gate included
    tokens: float
    tokens_std: float
    top1: float
    agree: float
    kl: float


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


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def precise_scores(targets: list[str], teacher: Teacher, image: Tensor) -> dict[str, Tensor]:
    """Scores of targets, in bfloat16 where that is precise enough."""
    exact = [target for target in targets if target.startswith(EXACT)]
    found = target_scores(exact, teacher, image)
    with autocast(image.device):
        return found | target_scores([target for target in targets if target not in exact], teacher, image)


def families(targets: list[str]) -> list[list[str]]:
    """Targets that share forwards, together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for target in targets:
        groups[target.rsplit("_", 1)[0] if target.endswith(OUTPUTS) else target].append(target)
    return list(groups.values())


@dataclass
class Photos:
    """The validation images of one dense model, on the device, and what it says of them."""

    name: str
    run: str
    model: Any
    prepared: Prepared
    image: Float[Tensor, "n c h w"]
    label: Tensor
    logits: Tensor
    batch: int

    @staticmethod
    @cache
    def read(name: str, run: str, data: str | None, num: int, batch: int, device: torch.device) -> "Photos":
        dense = find_model(run, gate="all-fine").to(device).eval()
        source = data or read_config(Path(run))["config"].data.source
        if split_of(Path(source)) != "val":
            raise ValueError(f"{source} has no folder val, so that training images would count too; name it so")
        prepared = Prepared(dense, Path(source), None, num, labels=True)
        image, label = on_device(prepared, prepared.size, device)
        found = Photos(name, run, dense, prepared, image, label, label, batch)
        found.logits = found.predict(dense)
        return found

    @torch.no_grad()
    def predict(self, model: Any, mask: Tensor | None = None, image: Tensor | None = None) -> Tensor:
        image = self.image if image is None else image
        masks = [None] * len(image) if mask is None else mask.to(image.device).float().split(self.batch)
        with autocast(image.device):
            parts = [model(x, mask=m).logits.float() for x, m in zip(image.split(self.batch), masks, strict=False)]
        return torch.cat(parts)

    def row(self, method: str, budget: str, wanted: float | None, logits: Tensor, macs: Tensor, tokens: Tensor) -> Row:
        dense = self.logits.log_softmax(1)
        kl = F.kl_div(logits.log_softmax(1), dense, log_target=True, reduction="batchmean")
        right, same = (logits.argmax(1) == other for other in (self.label, self.logits.argmax(1)))
        return Row(
            self.name, self.run, method, budget, wanted, macs.double().mean().item(), tokens.double().mean().item(),
            tokens.double().std(correction=0).item(), right.double().mean().item(), same.double().mean().item(),
            kl.item(),
        )  # fmt: skip

    def score(self, gate: Gate) -> Tensor:
        model = self.model.with_options(gate=gate.for_cells(self.model.coarse).to(self.image.device).eval())
        with torch.no_grad():
            return torch.cat([model.gate.scores(part) for part in self.image.split(self.batch)])

    def oracle(self, targets: list[str], teacher: Teacher) -> dict[str, Tensor]:
        found = [precise_scores(targets, teacher, part) for part in self.image.split(self.batch)]
        return {target: torch.cat([part[target] for part in found]) for target in targets}

    def measure(
        self, method: str, scores: Tensor, budgets: tuple[float, ...], gate: Gate | None = None, area: float = 0.0
    ) -> list[Row]:
        """Rows of cells chosen by their scores: one threshold for all images, and as many tokens in each."""
        model = self.model if gate is None else self.model.with_options(gate=gate.for_cells(self.model.coarse))
        grid = model.grid(self.image[:1])
        macs, tokens = (Cost(model, grid, unit) for unit in ("macs", "tokens"))
        runs = self.model.with_options(proportional_attention=area)
        rows = []
        for budget, values in (("free", scores), ("per_image", ranks(scores))):
            if method in BASELINES and budget == "free":
                continue
            scored = Scored(grid, values.float().cpu(), self.image[:1])
            for wanted in budgets:
                fine = scored.fine(scored.solve(model, wanted, "macs", "threshold"), "threshold")
                logits = self.predict(runs, fine)
                rows.append(self.row(method, budget, wanted, logits, macs(fine), tokens(fine) * tokens.dense))
        return rows

    def dense_rows(self, sizes: tuple[int, ...]) -> list[Row]:
        full = self.model.backbone.dense_macs(self.model.grid(self.image[:1]))
        rows = []
        for size in (self.prepared.size, *sizes):
            model = fit_dense(self.model, size)
            image = self.image if size == self.prepared.size else on_device(self.prepared, size, self.image.device)[0]
            grid = model.grid(image[:1])
            macs, tokens = torch.tensor([model.backbone.dense_macs(grid) / full]), torch.tensor([grid.num_patches])
            logits = self.predict(model, image=image)
            rows.append(self.row(f"dense, {size} px", "dense", None, logits, macs, tokens))
        return rows


DECODED: dict[Any, tuple[Tensor, Tensor]] = {}


def on_device(prepared: Prepared, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images and labels; models that want the same images share them."""
    source = prepared.source
    key = (size, str(prepared.about), tuple(source.classes), tuple(place.name for place in source.places))
    if key not in DECODED:
        found = prepared.batches(size, cache=True, device=device)
        DECODED[key] = torch.cat([b.image for b in found]), torch.cat([b.label for b in found])
        found.clear()
        free_unused(device)
    return DECODED[key]


def free_unused(device: torch.device) -> None:
    """Memory back to the device, for other processes on it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ranks(scores: Float[Tensor, "n hc wc"]) -> Float[Tensor, "n hc wc"]:
    """Scores by which a threshold makes the same number of cells fine in every image, or one more in some of them."""
    order = scores.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    part = torch.arange(len(scores), device=scores.device) * 0.6180339887 % 1  # spread evenly over images
    return -(order + part[:, None]).view_as(scores)


def read_photos(args: argparse.Namespace, device: torch.device) -> Iterator[Photos]:
    for name, runs in args.dense.items():
        for run in runs.split(","):
            yield Photos.read(name, run, args.data.get(name), args.num, args.batch, device)


# Gates that learn


@dataclass(frozen=True)
class Bank:
    """Random crops and the scores that targets give their cells, of one set."""

    image: Float[Tensor, "n c h w"]  # float16, normalised
    scores: dict[str, Float[Tensor, "n hc wc"]]


def photo_source(folder: Path, num: int | None = None) -> FileSource:
    """The images of a folder, or of its part `train`, without label maps and classes; `num` of them, drawn once."""
    path = folder / "train" if (folder / "train").exists() else folder
    places = list_places(path)
    order = shuffled(len(places), seed=0, epoch=0)[:num]
    return FileSource([places[i] for i in order], [0] * len(order), ["image"])


def make_bank(source: FileSource, photos: Photos, targets: list[str], args: argparse.Namespace, clock: Clock) -> Bank:
    """Crops as in training, `args.crops` of every image; targets are those of the photos' model."""
    about, device, teacher = photos.prepared.about, photos.image.device, Teacher(photos.model, args.masks, args.probes)
    loader = batches(
        source, img_size=photos.prepared.size, train=True, crops="medium", interpolation="bilinear", cache=True,
        batch_size=min(args.batch, len(source)), mean=tuple(about["mean"]), std=tuple(about["std"]), device=device,
        drop_last=False, skip_bad=True,
    )  # fmt: skip
    image, scores = [], defaultdict(list)
    for epoch in range(args.crops):
        for batch in loader.iterate(epoch):
            image.append(batch.image.half())
            for target, found in precise_scores(targets, teacher, batch.image).items():
                scores[target].append(found)
            if clock.over():
                break
    bank = Bank(torch.cat(image), {target: torch.cat(parts) for target, parts in scores.items()})
    del loader, image
    free_unused(device)
    return bank


def with_level(scores: Float[Tensor, "n hc wc"], level: float) -> Float[Tensor, "n hc wc"]:
    """Scores of which a share of each image's level stays: 1 compares images as they are, 0 makes them alike."""
    return scores - (1 - level) * scores.flatten(1).logsumexp(1)[:, None, None]


def goal(scores: Float[Tensor, "n hc wc"], level: float) -> Float[Tensor, "n hc wc"]:
    """What a gate learns: scores with a share of their image's level, in units of their deviation over the set."""
    lowest = scores.flatten().kthvalue(max(1, int(LOWEST * scores.numel()))).values
    scores = with_level(scores.clamp(min=lowest), level)
    return (scores - scores.mean()) / scores.std()


def train_gate(banks: list[Bank], target: str, level: float, args: argparse.Namespace, about: dict[str, Any]) -> Gate:
    """A ContextGate that predicts a target's scores, by their squared distance."""
    torch.manual_seed(args.seed)
    image = torch.cat([bank.image for bank in banks])
    wanted = torch.cat([goal(bank.scores[target], level) for bank in banks])
    gate = ContextGate(coarse=args.coarse, grid=tuple(wanted.shape[1:]), widths=args.widths, depth=args.depth)
    gate = gate.to(image.device).set_normalization(Normalization(about["mean"], about["std"])).train()
    torch.nn.init.zeros_(gate.head.bias)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=args.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.2)
    for _ in range(args.steps):
        pick = torch.randint(len(image), (args.gate_batch,), device=image.device)
        x, y = image[pick].float(), wanted[pick]
        if torch.rand(()) < 0.5:
            x, y = x.flip(3), y.flip(2)
        loss = F.mse_loss(gate(x).logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return gate.eval()


def correlation(one: Tensor, other: Tensor) -> float:
    return torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()


# What the commands do


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
    with keeping(args.decoded) if args.decoded else nullcontext():
        for command in args.commands:
            COMMANDS[command](args, results, device)
    results.add([])
    print(tables(results.written()))


if __name__ == "__main__":
    run_script(main)
