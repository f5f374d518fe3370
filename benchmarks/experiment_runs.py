"""The runs of each experiment, in the order they depend on each other; see experiments.py.

    EXPERIMENTS["curves"](Place("pets", "weights.safetensors", Path("runs/pets")))   # a list of jobs of a sweep

A `Place` is what an experiment is about (recipe, data, weights, seeds), with the settings of its runs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_
from pathlib import Path
from typing import Any

from msvit.backbones import adapt
from msvit.saving.host import build_on_meta
from msvit_lab.config import Config, override
from msvit_lab.hosts import make_host
from msvit_lab.recipes import recipe as find
from msvit_lab.sweep import Job, grid

SEEDS = (0, 1, 2)

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
        return build_on_meta(lambda: adapt(make_host(bare, 1), bare.model.merge_at))

    @cached_property
    def coarse(self) -> int:
        return self.config.model.coarse or self.backbone.default_coarse(None)

    @property
    def mode(self) -> str:
        """How the paper's gate is trained: as the recipe says, if that is masked, or with adaptive trimming."""
        own = self.config.model.mode
        return own if own == "masked" or "model.mode" in self.changes else self.trimmed

    @property
    def trimmed(self) -> str:
        """Masked where there are no sequences to trim."""
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

    def sizes(self, *sizes: int) -> list[int]:
        """Input sizes for a recipe of 224 px, scaled to this one's, in whole cells."""
        cells = [max(1, round(size * self.config.data.img_size / 224 / self.coarse)) for size in sizes]
        return [self.coarse * num for num in dict.fromkeys(cells)]

    def settings(self, *schedule: Settings, weights: str | Path | None = None) -> Settings:
        """Of a run from these weights, a file or a run; --set is above the schedule."""
        found = dict.fromkeys(("eval_every", "checkpoint_every"), "100")  # epochs: at the end only
        weights = weights or self.weights
        for name, value in (("data.source", self.data), ("model.weights", weights)):
            found |= {} if value is None else {name: str(value)}
        for each in (*schedule, self.changes):
            found |= each
        return found

    def tuned(self, *schedule: Settings) -> Settings:
        """Of a run that goes on from the base run of its seed, if there is one."""
        weights = self.runs / f"{self.base}-s{{seed}}" if self.start else None
        return self.settings(self.schedule.tune, *schedule, weights=weights)

    def gbas(self, *schedule: Settings) -> Settings:
        """The same with the paper's gate and loss; packed steps would not tell it what fine tokens are worth."""
        return self.tuned(self.schedule.learn, GBAS, self.schedule.gbas, {"model.mode": self.mode}, *schedule)

    @property
    def gate_kind(self) -> Settings:
        """A gate that learns from label maps or from a dense model."""
        return EDGES if self.config.task == "segment" else ATTENTION


TARGETS = (0.3, 0.4, 0.5, 0.65)  # shares of fine cells: 46 to 73 % of the dense multiply-adds
PAPER_TARGETS = (0.5, 0.25, 0.1)
SIZES = (224, 192, 160, 128)  # of dense inputs, for a recipe of 224 px
REGIME_RATE = 4.0  # of the gate, in host's rates
GATE = "gates/t0.3-w1"  # the gate that other runs take, before the seed
REDUCERS = ("evit-0.7", "evit-0.5", "dynamicvit-0.7", "dynamicvit-0.5", "tome-r8", "tome-r13")

REGIME_WORDS: dict[str, Settings] = {  # of which the names of its runs are made
    "masked": {"model.mode": "masked"}, "trimmed": {"model.mode": "trimmed"}, "zero": {"gate.cut_twins": "zero"},
    "wide": {"gate.sigma": "0.316"}, "sampled": {"gate.sampled": "true", "gate.temperature": "0.3"},
    "fast": {"gate.lr_scale": f"{5 * REGIME_RATE:g}"}, "faster": {"gate.lr_scale": f"{15 * REGIME_RATE:g}"},
    **{f"w{weight}": {"gate.weight": weight} for weight in ("1", "4", "20")},
}  # fmt: skip
REGIME_RUNS = (
    "masked-w1", "masked-w4", "masked-w20", "masked-w4-wide", "masked-w4-sampled", "masked-w4-wide-sampled",
    "masked-w4-fast", "masked-w1-wide-fast", "masked-w4-wide-faster", "masked-w4-large", "trimmed-w4",
    "trimmed-w4-zero", "trimmed-w4-wide-fast-zero",
)  # fmt: skip


def job(name: str, settings: Settings, seed: int, *after: str) -> Job:
    own = {key: value.replace("{seed}", str(seed)) for key, value in settings.items()}
    return Job(f"{name}-s{seed}", own | {"seed": str(seed)}, after=tuple(f"{other}-s{seed}" for other in after))


def base(place: Place, seeds: tuple[int, ...] | None = None) -> list[Job]:
    """The dense model that everything starts from."""
    about = place.settings(place.schedule.base) | DENSE
    return [job(place.base, about, seed) for seed in seeds or place.seeds] if place.start else []


def gates(place: Place) -> list[Job]:
    """One learned gate per seed; the gate that other runs take."""
    about = place.tuned(place.schedule.learn, place.gate_kind)
    return [job(GATE, about, seed, *place.start) for seed in place.seeds]


def paper(place: Place) -> list[Job]:
    """The paper's gate at its targets, dense models of several sizes, and the gate losses with adaptive trimming.

    Beside them a gate that sees its neighbours, by the paper's loss, and discs with as many fine cells as the gates of
    the same seed. All are trained for as many steps.
    """
    place = place.as_in_paper()
    about = place.gbas() | {"gate.clip": "none"}
    rows = [(place.mode, "gbas", target) for target in PAPER_TARGETS]
    rows += [(place.trimmed, loss, 0.25) for loss in ("gbas", "bas", "l0")]
    kinds = {
        f"{mode}-{loss}-{target:g}": {"model.mode": mode, "gate.loss": loss, "gate.target": f"{target:g}"}
        for mode, loss, target in rows
    } | {"context-gbas-0.25": {"model.gate": "context"}}
    return base(place) + sized(place, place.sizes(*SIZES)) + [
        job(f"paper/{name}", about | own, seed, *place.start) for name, own in kinds.items() for seed in place.seeds
    ] + [disc(place, target, seed) for target in PAPER_TARGETS for seed in place.seeds]  # fmt: skip


def regime(place: Place) -> list[Job]:
    """What the paper's gate needs to learn from the task: which weight, sigma, loss, mode, batch, rate and view.

    Beside dense runs of `paper`, the recipe's own gate and one that sees neighbouring cells, which are its runs too;
    and discs.
    """
    shared = [each for each in paper(place) if re.search(r"/(dense|context|[a-z]+-gbas-0\.25)-", each.name)]
    place = place.as_in_paper()
    about = place.gbas() | {"gate.clip": "none", "gate.sigma": "0.1", "gate.lr_scale": f"{REGIME_RATE:g}"}
    optim = place.config.optim
    batch = optim.batch_size * (1 if place.smoke else 4)  # of fewer steps, with as many images in all
    large = {"optim.batch_size": str(batch), "optim.lr": f"{2 * optim.lr:g}", "gate.lr_scale": f"{2 * REGIME_RATE:g}"}
    words = REGIME_WORDS | {"large": large}
    tried = [
        job(f"regime/{name}", reduce(or_, (words[word] for word in name.split("-")), about), seed, *place.start)
        for name in REGIME_RUNS for seed in place.seeds
    ]  # fmt: skip
    return base(place) + shared + tried + sized(place, [], "regime", gates=["disc"], shares=[0.25, 0.5])


def sized(place: Place, sizes: list[int], group: str = "paper", **what: Any) -> list[Job]:
    """Dense runs and discs beside the paper's gate, for as many steps; without a gate that learns they need no mask."""
    changes = place.tuned(place.schedule.learn) | {"model.mode": "auto"}
    rows = grid(place.recipe, targets=[], weights=[], sizes=sizes, smoke=place.smoke, seeds=list(place.seeds),
                changes=changes, **what)  # fmt: skip
    return [within(group, row, place.start) for row in rows]


def disc(place: Place, target: float, seed: int) -> Job:
    """A disc with as many fine cells as the paper's gate comes to at this target, perhaps all of them."""
    gate = f"paper/{place.mode}-gbas-{target:g}"
    own = {"model.gate": "disc", "model.share_of": str(place.runs / f"{gate}-s{seed}"), "model.mode": "auto"}
    return job(f"paper/disc-like-{target:g}", place.tuned(place.schedule.learn) | own, seed, *place.start, gate)


def curves(place: Place) -> list[Job]:
    """Accuracy against cost: smaller dense inputs, disc, entropy and the learned gate."""
    rows = sweep(place, TARGETS, sizes=place.sizes(*SIZES), gates=["disc", "entropy"])
    return base(place) + gates(place) + rows


def reducers(place: Place) -> list[Job]:
    """Each reducer by itself at two rates, and its weaker one with the gate at two budgets."""
    full = [place.config.data.img_size]
    alone = sweep(place, (), sizes=full, reducers=list(REDUCERS))
    both = sweep(place, (0.4, 0.65), sizes=full, reducers=list(REDUCERS[::2]))
    own = {"reducer.teacher": "none"}  # the model it starts from, not another run of the sweep
    rows = [replace(row, changes=row.changes | own) if "reducer.name" in row.changes else row for row in alone + both]
    return base(place) + gates(place) + rows


def sweep(place: Place, targets: tuple[float, ...], **what: Any) -> list[Job]:
    """Rows of `msvit sweep`, all from the dense runs; the learned gate is frozen, and its threshold follows."""
    frozen = {"model.gate_from": str(place.runs / f"{GATE}-s{{seed}}"), "model.freeze_gate": "true"}
    changes = place.tuned(place.gate_kind) | frozen | {"gate.follow": "true"}
    rows = grid(
        place.recipe, targets=list(targets), weights=[1.0], seeds=list(place.seeds), shares=list(targets),
        changes=changes, smoke=place.smoke, **what,
    )  # fmt: skip
    return [within("curves", row, (GATE,) if row.name.startswith("t0") else place.start) for row in rows]


def within(group: str, row: Job, after: tuple[str, ...]) -> Job:
    """A row of `msvit sweep` in a folder of its group, after other runs of its seed."""
    return replace(
        row, name=f"{group}/{row.name}", after=tuple(f"{before}-s{row.changes['seed']}" for before in after)
    )


def losses(place: Place) -> list[Job]:
    """One seed of the paper's gate with other losses and crops, at two targets."""
    kinds: dict[str, Settings] = {name: {"gate.loss": name} for name in ("l0", "bas", "bas-flat")}
    kinds |= {"gbas": {"gate.center": "false"}, "gbas-ctr": {"gate.center": "true"}}
    seed = place.seeds[0]
    return base(place, (seed,)) + [
        job(f"losses/{name}-{crops}-{target}", place.gbas(place.schedule.short) | own | {
            "data.crops": crops, "gate.target": target, "eval_every": "2",
        }, seed, *place.start)
        for name, own in kinds.items() for crops in ("inception", "light") for target in ("0.25", "0.5")
    ]  # fmt: skip


def robustness(place: Place) -> list[Job]:
    """A learned gate and a disc of as many tokens, to be evaluated under zooms and shifts."""
    return base(place) + gates(place) + [row for row in curves(place) if re.search(r"/(t|disc-)0\.4-", row.name)]


EXPERIMENTS: dict[str, Callable[[Place], list[Job]]] = {
    make.__name__: make for make in (paper, regime, curves, reducers, losses, robustness)
}
