"""The experiments of docs/results.md and the paper's own, each one command; what is finished is not done again.

    python benchmarks/experiments.py curves --data PETS --weights FILE --runs runs/pets --at-once 8 --commit 1a2b3c4
    python benchmarks/experiments.py paper --recipe imagenet_vit --data IMAGENET --seeds 0
    python benchmarks/experiments.py paper --recipe cub --data CUB --weights FILE --at-once 8
    python benchmarks/experiments.py half --recipe cub --data CUB --weights FILE --at-once 8

Any recipe and data will do; the default is `pets`. Everything starts from a dense model that was fine-tuned on the same
images, one per seed (`base`), and is trained a few more epochs in the same way; in `paper` with the recipe `cub`, and
where a recipe has pretrained weights of its own, all runs start from the weights, as in the paper. `--set` is passed on
to every run and precedes the schedule of an experiment, but not what tells its runs apart (gates, targets, sizes).

`paper` trains the paper's gate as the paper does, with adaptive trimming and one clipping for all weights, beside dense
models of several sizes and discs with the gates' shares of fine cells, all for as many steps. In the others one gate
per seed learns where the class token of the base model looks (`gates`), and its threshold follows the wanted share.
Each group of runs is a folder, and a file of results as benchmarks/collect.py writes it, sweeps/NAME_GROUP.json; some
experiments end with a script that evaluates the trained models (`analysis`). `times` wants the machine for itself.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from collect import collect
from safetensors.torch import load_file, save_file
from shared import ROOT, run_script, script_parser

from msvit.backbones import adapt
from msvit.host_config import without_weights
from msvit.lab.build import dense_unit
from msvit.lab.cli.app import numbers, pairs
from msvit.lab.config import Config, override
from msvit.lab.evaluation_files import OWN
from msvit.lab.hosts import make_host
from msvit.lab.json_values import write_json
from msvit.lab.recipes import RECIPES
from msvit.lab.recipes import recipe as find
from msvit.lab.runs import Run, is_evaluated
from msvit.lab.sweep import Job, check_folders, grid, in_order, run_jobs
from msvit.lab.sweep_progress import SweepProgress

SEEDS = (0, 1, 2)
TARGETS = (0.3, 0.4, 0.5, 0.65)  # shares of fine cells: 46 to 73 % of the dense multiply-adds
PAPER_TARGETS = (0.5, 0.25, 0.1)
SIZES, LARGE_SIZES = (224, 192, 160, 128), (384, 320, 256)  # of dense inputs, for a recipe of 224 px
HALF_TARGET, HALF_SIZES = 0.3, (224, 160, 144, 128)  # 46 % of the multiply-adds; dense inputs of more and of less
OTHER_SIZES = (160, 384)  # at which gates learn too, to be compared
GATE = "gates/t0.3-w1"  # the gate that other runs take, before the seed
REDUCERS = ("evit-0.7", "evit-0.5", "dynamicvit-0.7", "dynamicvit-0.5", "tome-r8", "tome-r13")

Settings = dict[str, str]
ATTENTION: Settings = {  # a gate that learns where a dense model looks
    "model.gate": "context", "gate.loss": "attention", "gate.target": "0.3", "gate.weight": "1",
    "gate.warmup_epochs": "0",
}  # fmt: skip
EDGES: Settings = ATTENTION | {"model.gate": "learned", "gate.loss": "edges"}  # the same for a Segmenter
GBAS: Settings = {"model.gate": "learned", "gate.loss": "gbas", "gate.target": "0.25"}
DENSE: Settings = {"model.gate": "none"}


@dataclass(frozen=True)
class Schedule:
    """How long a recipe's runs are trained and at what rates; what is not here is the recipe's own."""

    base: Settings = field(default_factory=dict)  # the dense model that the others start from
    tune: Settings = field(default_factory=dict)  # these others
    learn: Settings = field(default_factory=dict)  # over `tune`: runs whose gate learns
    gbas: Settings = field(default_factory=dict)  # over `learn`: the paper's gate
    short: Settings = field(default_factory=dict)  # over `gbas`: ablations


PETS = Schedule(
    base={"optim.epochs": "30"},
    tune={"optim.lr": "3e-5", "optim.head_scale": "1", "optim.warmup_epochs": "0.5", "optim.epochs": "5"},
    learn={"optim.epochs": "10", "gate.lr_scale": "50"},
    gbas={"gate.warmup_epochs": "1", "gate.weight": "4"},
    short={"optim.epochs": "6"},
)
SCHEDULES = {
    "pets": PETS,
    "cub": replace(  # as Pets, from fewer epochs of smaller batches; gate.clip is that of Pets
        PETS, base={"optim.epochs": "13", "optim.lr": "1e-4", "optim.batch_size": "64"},
        tune=PETS.tune | {"optim.batch_size": "64", "gate.clip": "1"},
    ),
}  # fmt: skip
AS_IN_PAPER = ("cub",)  # recipes that `paper` trains from the weights, gate and host together, by their own schedule


@dataclass(frozen=True)
class Place:
    """What the experiments are about, and where things are."""

    data: str | None  # the recipe's own if None
    weights: str | None  # a file, instead of the recipe's pretrained or random weights
    runs: Path
    recipe: str = "pets"
    changes: Settings = field(default_factory=dict)  # of --set
    seeds: tuple[int, ...] = SEEDS
    smoke: bool = False
    name: str = "pets"  # in files of results
    from_weights: bool = False  # no base run, and the schedule is the recipe's own

    @cached_property
    def config(self) -> Config:
        return override(find(self.recipe, smoke=self.smoke), self.changes)

    @cached_property
    def backbone(self) -> Any:
        """The recipe's host without weights: for its cells, depth and modes."""
        bare = replace(self.config, model=replace(self.config.model, weights=None, pretrained=False))
        return without_weights(lambda: adapt(make_host(bare, 1), bare.model.merge_at))

    @cached_property
    def coarse(self) -> int:
        return self.config.model.coarse or self.backbone.usual_coarse(None)

    @property
    def mode(self) -> str:
        """How the paper's gate is trained: with adaptive trimming, or masked where there are no sequences to trim."""
        return "trimmed" if "trimmed" in self.backbone.modes else "masked"

    @property
    def schedule(self) -> Schedule:
        return Schedule() if self.from_weights else SCHEDULES.get(self.recipe, Schedule())

    @property
    def base(self) -> str:
        """The dense run that others start from, before the seed."""
        return f"base/dense-{self.config.data.img_size}"

    @property
    def start(self) -> tuple[str, ...]:
        """What runs wait for: the base run, or nothing where gate and host are trained together, as in the paper."""
        return () if self.config.model.pretrained or self.from_weights else (self.base,)

    def as_in_paper(self) -> "Place":
        return replace(self, from_weights=self.recipe in AS_IN_PAPER)

    def sizes(self, *sizes: int, multiple: int = 1, unit: int | None = None) -> list[int]:
        """Input sizes for a recipe of 224 px, scaled to this one's, in multiples of that many cells or of `unit` px."""
        unit, scale = unit or self.coarse * multiple, self.config.data.img_size / 224
        return list(dict.fromkeys(unit * max(1, round(size * scale / unit)) for size in sizes))

    def settings(self, *schedule: Settings, weights: str | Path | None = None) -> Settings:
        """Of a run from these weights, a file or a run; --set is above the schedule."""
        found = dict.fromkeys(("eval_every", "checkpoint_every"), "100")  # epochs: at the end only
        weights = weights or self.weights
        for name, value in (("data.source", self.data), ("model.weights", weights)):
            found |= {} if value is None else {name: str(value)}
        for each in (*schedule, self.changes):
            found |= each
        return found

    def tuned(self, *schedule: Settings, start: str | None = None) -> Settings:
        """Of a run that goes on from the base run of its seed, or from the run named `start`."""
        run = start or next(iter(self.start), None)
        weights = None if run is None else self.runs / f"{run}-s{{seed}}"
        return self.settings(self.schedule.tune, *schedule, weights=weights)

    def gbas(self, *schedule: Settings) -> Settings:
        """The same with the paper's gate and loss."""
        return self.tuned(self.schedule.learn, GBAS, self.schedule.gbas, *schedule)

    @property
    def gate_kind(self) -> Settings:
        return EDGES if self.config.task == "segment" else ATTENTION

    def learned(self, start: str | None = None) -> Settings:
        """The same with a gate that learns from a dense model or from label maps."""
        return self.tuned(self.schedule.learn, self.gate_kind, start=start)


def job(name: str, settings: Settings, seed: int, *after: str) -> Job:
    own = {key: value.replace("{seed}", str(seed)) for key, value in settings.items()}
    return Job(f"{name}-s{seed}", own | {"seed": str(seed)}, after=tuple(f"{other}-s{seed}" for other in after))


def base(place: Place, seeds: tuple[int, ...] | None = None) -> list[Job]:
    """The dense model that everything starts from."""
    about = place.settings(place.schedule.base) | DENSE
    return [job(place.base, about, seed) for seed in seeds or place.seeds] if place.start else []


def gates(place: Place) -> list[Job]:
    """One learned gate per seed; evaluated against Pets' trimaps too, where they lie beside the data."""
    objects = f"{place.data}/{{split}}_trimaps.tar.gz"
    known = {"data.objects": objects} if Path(objects.format(split="val")).is_file() else {}
    return [job(GATE, place.learned() | known, seed, *place.start) for seed in place.seeds]


def paper(place: Place) -> list[Job]:
    """The paper's gate and dense models of several sizes, all for as many steps; other gate losses with one seed.

    Discs with the gates' shares of fine cells follow when these are known (`discs`).
    """
    place = place.as_in_paper()
    about = place.gbas() | {"model.mode": place.mode, "gate.clip": "none"}
    rows = [(loss, seed) for loss in ("gbas", "l0", "bas", "bas-flat") for seed in place.seeds]
    return base(place) + sized(place, list(SIZES)) + [
        job(f"paper/{place.mode}-{loss}-{target:g}", about | {"gate.loss": loss, "gate.target": f"{target:g}"}, seed,
            *place.start)
        for loss, seed in rows if loss == "gbas" or seed == place.seeds[0] for target in PAPER_TARGETS
    ]  # fmt: skip


def sized(place: Place, sizes: list[int], **what: Any) -> list[Job]:
    """Dense runs and discs beside the paper's gate, for as many steps."""
    changes = place.tuned(place.schedule.learn)
    rows = grid(place.recipe, targets=[], weights=[], sizes=place.sizes(*sizes) if sizes else [], smoke=place.smoke,
                seeds=list(place.seeds), changes=changes, **what)  # fmt: skip
    return [within("paper", row, place.start) for row in rows]


def discs(place: Place) -> list[Job]:
    """Discs with the share of fine cells that the paper's gate came to at each target, the mean of its seeds.

    None for a gate that leaves all cells fine or all coarse, as no place is then before another.
    """
    place, shares = place.as_in_paper(), list[float]()
    for target in PAPER_TARGETS:
        runs = [place.runs / f"paper/{place.mode}-gbas-{target:g}-s{seed}" for seed in place.seeds]
        found = [Run(run).evaluations[OWN]["fine_share"] for run in runs if is_evaluated(run)]
        shares += [round(mean(found), 2)] if found else []
    return sized(place, [], gates=["disc"], shares=[share for share in shares if 0 < share < 1])


def packed_gbas(place: Place) -> list[Job]:
    """The paper's gate with packed steps instead of adaptive trimming, at two budgets."""
    return [
        job(f"curves/gbas-{target}", place.gbas() | {"gate.target": target, "model.mode": "packed"}, seed, *place.start)
        for target in ("0.25", "0.5") for seed in place.seeds
    ]  # fmt: skip


def curves(place: Place) -> list[Job]:
    """Accuracy against cost: smaller dense inputs, disc, entropy, the paper's gate and the learned one."""
    rows = sweep(place, "curves", TARGETS, sizes=place.sizes(*SIZES), gates=["disc", "entropy"])
    return base(place) + gates(place) + packed_gbas(place) + rows


def half(place: Place) -> list[Job]:
    """One budget of `curves`, 46 % of the multiply-adds: dense inputs around it, disc, learned and shipped gate."""
    sizes = place.sizes(*HALF_SIZES, unit=dense_unit(place.backbone))
    rows = sweep(place, "curves", (HALF_TARGET,), sizes=sizes, gates=["disc"])
    shipped = frozen_gate(place, "default") | {"gate.target": f"{HALF_TARGET:g}", "gate.weight": "1"}
    name = f"curves/shipped-{HALF_TARGET:g}"
    return base(place) + gates(place) + rows + [job(name, shipped, seed, *place.start) for seed in place.seeds]


def curves384(place: Place) -> list[Job]:
    """The same at an input of 12/7 the size; the gate is the one that was learned at the recipe's own."""
    sizes = place.sizes(*LARGE_SIZES)
    rows = sweep(place, "curves384", (0.5, 0.65), sizes=sizes, gates=["disc"], shares=[0.5], size=sizes[0])
    return base(place) + gates(place) + rows


def reducers(place: Place) -> list[Job]:
    """Each reducer by itself at two rates, and its weaker one with the gate at two budgets."""
    full = [place.config.data.img_size]
    alone = sweep(place, "curves", (), sizes=full, reducers=list(REDUCERS))
    both = sweep(place, "curves", (0.4, 0.65), sizes=full, reducers=list(REDUCERS[::2]))
    own = {"reducer.teacher": "none"}  # the model it starts from, not another run of the sweep
    rows = [replace(row, changes=row.changes | own) if "reducer.name" in row.changes else row for row in alone + both]
    return base(place) + gates(place) + rows


def sweep(place: Place, group: str, targets: tuple[float, ...], shares: list[float] | None = None,
          size: int | None = None, **what: Any) -> list[Job]:  # fmt: skip
    """Rows of `msvit sweep`, all from the dense runs; the learned gate is frozen, and its threshold follows."""
    changes = frozen_gate(place, str(place.runs / f"{GATE}-s{{seed}}"), size)
    rows = grid(
        place.recipe, targets=list(targets), weights=[1.0], seeds=list(place.seeds), shares=shares or list(targets),
        changes=changes, smoke=place.smoke, **what,
    )  # fmt: skip
    return [within(group, row, (GATE,) if row.name.startswith("t0") else place.start) for row in rows]


def frozen_gate(place: Place, gate: str, size: int | None = None) -> Settings:
    """Of a run from the base run with a gate that does not learn, but has a threshold that follows the target."""
    frozen = {"model.gate_from": gate, "model.freeze_gate": "true", "gate.follow": "true"}
    return place.tuned(place.gate_kind) | frozen | {"data.img_size": str(size or place.config.data.img_size)}


def within(group: str, row: Job, after: tuple[str, ...]) -> Job:
    """A row of `msvit sweep` in a folder of its group, after other runs of its seed."""
    return replace(
        row, name=f"{group}/{row.name}", after=tuple(f"{before}-s{row.changes['seed']}" for before in after)
    )


def ablation(place: Place, group: str, rows: dict[str, Settings]) -> list[Job]:
    """One seed of the paper's gate, with other settings in each run."""
    seed = place.seeds[0]
    return base(place, (seed,)) + [
        job(f"{group}/{name}", place.gbas(place.schedule.short) | own, seed, *place.start) for name, own in rows.items()
    ]


def losses(place: Place) -> list[Job]:
    """Gate losses and crops, at two targets."""
    kinds: dict[str, Settings] = {name: {"gate.loss": name} for name in ("l0", "bas", "bas-flat")}
    kinds |= {"gbas": {"gate.center": "false"}, "gbas-ctr": {"gate.center": "true"}}
    return ablation(place, "losses", {
        f"{name}-{crops}-{target}": own | {"data.crops": crops, "gate.target": target, "eval_every": "2"}
        for name, own in kinds.items() for crops in ("inception", "light") for target in ("0.25", "0.5")
    })  # fmt: skip


def modes(place: Place) -> list[Job]:
    """Masked, trimmed and packed training."""
    return ablation(place, "modes", {mode: {"model.mode": mode} for mode in ("masked", "trimmed", "packed")})


def noise(place: Place) -> list[Job]:
    """The noisy decision or the probability in the gate loss, and how much noise."""
    kinds = (("probability", "0.3"), ("probability", "1"), ("sampled", "0.3"), ("sampled", "1"), ("probability", "0"))
    return ablation(place, "noise", {
        f"{kind}-{scale}": {"gate.sampled": str(kind == "sampled").lower(), "gate.noise": scale}
        for kind, scale in kinds
    })  # fmt: skip


def scales(place: Place) -> list[Job]:
    """Patches of 16 px against twice that, cells of 32 against 64, at 256 px, where tokens are few: one seed."""
    seed, fine = place.seeds[0], place.backbone.fine
    size = place.sizes(256, multiple=2)[0]
    large = {"data.img_size": str(size), "model.options.patch_size": str(2 * fine)}
    start = f"scales/start-{size}-{2 * fine}px"
    found = [*base(place, (seed,)), job(start, place.settings(place.schedule.base) | DENSE | large, seed)]
    for patch, begin, own, shares, sizes in (
        (fine, None, {"data.img_size": str(size)}, ("0.05", "0.1", "0.2"), place.sizes(128, 96, 64)),
        (2 * fine, start, large, ("0.2", "0.5", "0.8"), [size]),
    ):
        rows = {f"t{share}-w1-{patch}px": place.learned(begin) | own | {"gate.target": share} for share in shares}
        dense = place.tuned(start=begin) | own | DENSE
        rows |= {f"dense-{side}-{patch}px": dense | {"data.img_size": str(side)} for side in sizes}
        after = place.start if begin is None else (begin,)
        found += [job(f"scales/{name}", settings, seed, *after) for name, settings in rows.items()]
    return found


def transfer(place: Place) -> list[Job]:
    """Gates that learned at other input sizes and with half the blocks, and a frozen one on half the blocks."""
    seed, start = place.seeds[0], "transfer/half-start"
    half = {"model.options.depth": str(half_depth(place))}
    short = place.settings(place.schedule.base, weights=halve(place)) | DENSE | half
    frozen = {"model.gate_from": str(place.runs / f"{GATE}-s{seed}"), "model.freeze_gate": "true"}
    rate = {"gate.lr_scale": f"{place.config.gate.lr_scale:g}"}  # the recipe's: a frozen gate does not learn
    moved = place.learned(start) | half | frozen | rate | {"gate.follow": "true"}
    return base(place) + gates(place) + [
        job(start, short, seed),
        *(job(f"transfer/size-{size}", place.learned() | {"data.img_size": str(size)}, seed, *place.start)
          for size in place.sizes(*OTHER_SIZES)),
        job("transfer/half-own", place.learned(start) | half, seed, start),
        job("transfer/half-moved", moved, seed, start, GATE),
    ]  # fmt: skip


def half_depth(place: Place) -> int:
    return max(1, len(place.backbone.blocks) // 2)


def halve(place: Place) -> Path | None:
    """The weights without the later half of the blocks: a smaller backbone. None where all weights are random."""
    if place.weights is None and place.config.model.pretrained:
        raise ValueError("transfer halves a file of weights, but --weights is missing; download them and give the file")
    if place.weights is None:
        return None
    path = place.runs / "half.safetensors"
    if Path(place.weights).is_file() and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = load_file(place.weights)
        late = tuple(f"blocks.{index}." for index in range(half_depth(place), len(place.backbone.blocks)))
        save_file({name: t for name, t in weights.items() if not name.startswith(late)}, path)
    return path


def robustness(place: Place) -> list[Job]:
    """A learned gate and a disc of as many tokens, to be evaluated under zooms and shifts."""
    return base(place) + gates(place) + [row for row in curves(place) if re.search(r"/(t|disc-)0\.4-", row.name)]


def times(place: Place) -> list[Job]:
    """What is to be timed: one seed of every curve."""
    return of_one_seed(place, curves(place) + reducers(place))


def times384(place: Place) -> list[Job]:
    return of_one_seed(place, curves384(place))


def of_one_seed(place: Place, jobs: list[Job]) -> list[Job]:
    return [row for row in jobs if row.name.endswith(f"-s{place.seeds[0]}")]


Experiment = Callable[[Place], list[Job]]
EXPERIMENTS: dict[str, Experiment] = {
    make.__name__: make
    for make in (
        paper, curves, half, reducers, curves384, losses, modes, noise, scales, transfer, robustness, times, times384,
    )
}  # fmt: skip
THEN: dict[str, Experiment] = {"paper": discs}  # runs that depend on results of the first
OWN_GROUPS = {
    "paper": ("base", "paper"), "curves": ("base", "gates", "curves"), "half": ("base", "gates", "curves"),
    "reducers": ("curves",), "robustness": (), "times": (), "times384": (),
}  # fmt: skip
AGAINST = dict.fromkeys(("paper", "curves", "curves384"), "own")
AGAINST |= dict.fromkeys(("gates", "losses", "modes", "noise"), "{name}_curves")


def groups(name: str) -> tuple[str, ...]:
    """The groups of runs that an experiment tells of; it may need others."""
    return OWN_GROUPS.get(name, (name,))


def analysis(name: str, place: Place, results: Path) -> list[str]:
    """The command that evaluates an experiment's trained models further; none if their own evaluations are enough."""
    scripts, runs, first = ROOT / "benchmarks", place.runs, place.seeds[0]
    bench = ["-m", "msvit", "bench", "--runs"]
    mark = "" if place.name == "pets" else f"{place.name}_"
    images = ROOT / "docs/images" if place.name == "pets" else results / "gates"
    sizes = [f"size-{size}" for size in place.sizes(*OTHER_SIZES)]
    return {
        "robustness": [
            f"{scripts}/robustness.py",
            *[f"{runs}/curves/{kind}-s{seed}" for kind in ("t0.4-w1", "disc-0.4") for seed in place.seeds],
            "--out", f"{results}/gates/{mark}robustness.json", "--plot", f"{images}/{mark}robustness.svg",
        ],
        "transfer": [
            f"{scripts}/agreement.py", *[f"{runs}/{GATE}-s{seed}" for seed in place.seeds],
            *[f"{runs}/transfer/{kind}-s{first}" for kind in (*sizes, "half-own")], "default", "--match",
            "--out", f"{results}/gates/{mark}agreement.json",
        ],
        "times": [*bench, f"{runs}/curves/*-s{first}", "--batch", "256", "--out", f"{results}/times/{place.name}.json"],
        "times384": [
            *bench, f"{runs}/curves384/*-s{first}", "--batch", "128", "--out", f"{results}/times/{place.name}384.json",
        ],
    }.get(name, [])  # fmt: skip


def unique(jobs: list[Job]) -> list[Job]:
    """Experiments share runs: each once, and of two that differ in a setting there is none."""
    found: dict[str, Job] = {}
    for each in jobs:
        if found.setdefault(each.name, each).changes != each.changes:
            raise ValueError(f"two experiments want a run {each.name} with different settings")
    return list(found.values())


def command_line(place: Place, names: list[str]) -> str:
    """The command behind results, with words in the place of paths."""
    words = ["python benchmarks/experiments.py", *names]
    words += [] if place.recipe == "pets" else ["--recipe", place.recipe]
    words += [] if place.data is None else ["--data", place.name.upper()]
    words += [] if place.weights is None else ["--weights", "FILE"]
    words += [] if place.seeds == SEEDS else ["--seeds", ",".join(map(str, place.seeds))]
    words += [part for key, value in place.changes.items() for part in ("--set", f"{key}={value}")]
    return " ".join(words)


def train(place: Place, jobs: list[Job], at_once: int) -> list[Job]:
    """Run what is not finished. Returns the jobs that failed."""
    check_folders(place.recipe, jobs, place.runs, smoke=place.smoke)
    with SweepProgress(jobs, place.runs) as progress:
        return run_jobs(place.recipe, jobs, place.runs, watcher=progress, smoke=place.smoke, at_once=at_once)


def read_arguments(arguments: list[str] | None = None) -> tuple[Any, Place]:
    parser = script_parser(__doc__, results=False)
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    parser.add_argument("--recipe", default="pets", choices=RECIPES)
    parser.add_argument("--data", help="a folder with train/ and val/ (or test/), and for Pets perhaps the trimaps")
    parser.add_argument("--weights", help="a file, such as a DINOv2-architecture ViT-S; by default the recipe's own")
    parser.add_argument("--set", action="append", default=[], help="a setting of every run, as in msvit train")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--name", help="in files of results and the folder of runs; the recipe's by default")
    parser.add_argument("--runs", type=Path, help="runs/NAME by default")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--smoke", action="store_true", help="tiny versions: does it run at all?")
    parser.add_argument("--dry-run", action="store_true", help="list the runs, train nothing")
    given = parser.parse_args(arguments)
    name = given.name or given.recipe
    place = Place(
        data=given.data, weights=given.weights, runs=(given.runs or Path("runs") / name).resolve(), name=name,
        recipe=given.recipe, changes=pairs(given.set), seeds=tuple(numbers(given.seeds, int)), smoke=given.smoke,
    )  # fmt: skip
    model = place.config.model
    if given.recipe == "pets" and not given.smoke and not (given.data and (given.weights or model.pretrained)):
        parser.error("the recipe pets has neither images nor weights of its own; give --data and --weights")
    return given, place


def main() -> None:
    given, place = read_arguments()
    jobs = unique([each for name in given.experiments for each in EXPERIMENTS[name](place)])
    if given.dry_run:
        print(*(each.name for each in in_order(jobs)), sep="\n")
        return
    for folder in ("sweeps", "gates", "times"):  # before hours of training: can results be written?
        (given.results / folder).mkdir(parents=True, exist_ok=True)
    failed = train(place, jobs, given.at_once)
    for name in given.experiments:
        if name in THEN and (rest := THEN[name](place)):
            failed += train(place, rest, given.at_once)
    for group in dict.fromkeys(group for name in given.experiments for group in groups(name)):
        if any(map(is_evaluated, (place.runs / group).glob("*"))):
            command = command_line(place, [name for name in given.experiments if group in groups(name)])
            against = AGAINST[group].format(name=place.name) if group in AGAINST else None
            found = collect(place.runs / group, command, given.commit, against, maps=group in ("losses", "paper"))
            write_json(given.results / f"sweeps/{place.name}_{group}.json", found)
    if failed:
        sys.exit(f"{len(failed)} runs failed ({', '.join(each.name for each in failed)}); see their log.txt")
    for name in given.experiments:
        if asked := analysis(name, place, given.results):
            commit = ["--commit", given.commit] if given.commit else []
            subprocess.run([sys.executable, *asked, *commit], check=True)


if __name__ == "__main__":
    run_script(main)
