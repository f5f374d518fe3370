"""The runs of each experiment; see experiments.py.

    EXPERIMENTS["paper"](Place("cub", "weights.safetensors", Path("runs/cub")))   # a list of jobs of a sweep

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
GBAS: Settings = {  # the paper's gate, with one clipping for all weights
    "model.gate": "learned", "gate.loss": "gbas", "gate.target": "0.25", "gate.clip": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What the experiments are about, and where things are."""

    data: str | None  # the recipe's own if None
    weights: str | None  # a file, instead of the recipe's pretrained or random weights
    runs: Path
    recipe: str = "cub"
    changes: Settings = field(default_factory=dict)  # of --set
    seeds: tuple[int, ...] = SEEDS
    smoke: bool = False
    name: str = "cub"  # in files of results

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

    def sizes(self, *sizes: int) -> list[int]:
        """Input sizes for a recipe of 224 px, scaled to this one's, in whole cells."""
        cells = [max(1, round(size * self.config.data.img_size / 224 / self.coarse)) for size in sizes]
        return [self.coarse * num for num in dict.fromkeys(cells)]

    def settings(self, *settings: Settings) -> Settings:
        """Of a run; --set is above them."""
        found = dict.fromkeys(("eval_every", "checkpoint_every"), "100")  # epochs: at the end only
        found |= {} if self.data is None else {"data.source": self.data}
        found |= {} if self.weights is None else {"model.weights": self.weights}
        return reduce(or_, (*settings, self.changes), found)

    def gbas(self, *settings: Settings) -> Settings:
        """The paper's gate and loss; packed steps would not tell it what fine tokens are worth."""
        return self.settings(GBAS, {"model.mode": self.mode}, *settings)


PAPER_TARGETS = (0.5, 0.25, 0.1)
SIZES = (224, 192, 160, 128)  # of dense inputs, for a recipe of 224 px
REGIME_RATE = 4.0  # of the gate, in host's rates

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
    return Job(f"{name}-s{seed}", settings | {"seed": str(seed)}, after=tuple(f"{other}-s{seed}" for other in after))


def paper(place: Place) -> list[Job]:
    """The paper's gate at its targets, dense models of several sizes, and the gate losses with adaptive trimming.

    Beside them a gate that sees its neighbours, by the paper's loss, and discs with as many fine cells as the gates of
    the same seed. All are trained for as many steps.
    """
    rows = [(place.mode, "gbas", target) for target in PAPER_TARGETS]
    rows += [(place.trimmed, loss, 0.25) for loss in ("gbas", "bas", "l0")]
    kinds = {
        f"{mode}-{loss}-{target:g}": {"model.mode": mode, "gate.loss": loss, "gate.target": f"{target:g}"}
        for mode, loss, target in rows
    } | {"context-gbas-0.25": {"model.gate": "context"}}
    gated = [job(f"paper/{name}", place.gbas() | own, seed) for name, own in kinds.items() for seed in place.seeds]
    discs = [disc(place, target, seed) for target in PAPER_TARGETS for seed in place.seeds]
    return sized(place, place.sizes(*SIZES)) + gated + discs


def regime(place: Place) -> list[Job]:
    """What the paper's gate needs to learn from the task: which weight, sigma, loss, mode, batch, rate and view.

    Beside dense runs of `paper`, the recipe's own gate and one that sees neighbouring cells, which are its runs too;
    and discs.
    """
    shared = [each for each in paper(place) if re.search(r"/(dense|context|[a-z]+-gbas-0\.25)-", each.name)]
    about = place.gbas() | {"gate.sigma": "0.1", "gate.lr_scale": f"{REGIME_RATE:g}"}
    optim = place.config.optim
    batch = optim.batch_size * (1 if place.smoke else 4)  # of fewer steps, with as many images in all
    large = {"optim.batch_size": str(batch), "optim.lr": f"{2 * optim.lr:g}", "gate.lr_scale": f"{2 * REGIME_RATE:g}"}
    words = REGIME_WORDS | {"large": large}
    tried = [
        job(f"regime/{name}", reduce(or_, (words[word] for word in name.split("-")), about), seed)
        for name in REGIME_RUNS for seed in place.seeds
    ]  # fmt: skip
    return shared + tried + sized(place, [], "regime", gates=["disc"], shares=[0.25, 0.5])


def losses(place: Place) -> list[Job]:
    """One seed of the paper's gate with other losses and crops, at two targets."""
    kinds: dict[str, Settings] = {name: {"gate.loss": name} for name in ("l0", "bas", "bas-flat")}
    kinds |= {"gbas": {"gate.center": "false"}, "gbas-ctr": {"gate.center": "true"}}
    return [
        job(f"losses/{name}-{crops}-{target}", place.gbas({"eval_every": "2"}) | own | {
            "data.crops": crops, "gate.target": target,
        }, place.seeds[0])
        for name, own in kinds.items() for crops in ("inception", "light") for target in ("0.25", "0.5")
    ]  # fmt: skip


def sized(place: Place, sizes: list[int], group: str = "paper", **what: Any) -> list[Job]:
    """Dense runs and discs beside the paper's gate, for as many steps; without a gate that learns they need no mask."""
    changes = place.settings() | {"model.mode": "auto"}
    rows = grid(place.recipe, targets=[], weights=[], sizes=sizes, smoke=place.smoke, seeds=list(place.seeds),
                changes=changes, **what)  # fmt: skip
    return [replace(row, name=f"{group}/{row.name}") for row in rows]


def disc(place: Place, target: float, seed: int) -> Job:
    """A disc with as many fine cells as the paper's gate comes to at this target, perhaps all of them."""
    gate = f"paper/{place.mode}-gbas-{target:g}"
    own = {"model.gate": "disc", "model.share_of": str(place.runs / f"{gate}-s{seed}"), "model.mode": "auto"}
    return job(f"paper/disc-like-{target:g}", place.settings() | own, seed, gate)


EXPERIMENTS: dict[str, Callable[[Place], list[Job]]] = {make.__name__: make for make in (paper, regime, losses)}
