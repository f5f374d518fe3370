"""What an experiment is about (recipe, data, weights, seeds) and the settings of its runs; see experiments.py."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from msvit.backbones import adapt
from msvit.saving.host import build_on_meta
from msvit_lab.config import Config, override
from msvit_lab.hosts import make_host
from msvit_lab.recipes import recipe as find

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
        return EDGES if self.config.task == "segment" else ATTENTION

    def learned(self) -> Settings:
        """The same with a gate that learns from a dense model or from label maps."""
        return self.tuned(self.schedule.learn, self.gate_kind)
