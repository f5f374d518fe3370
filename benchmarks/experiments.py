"""The experiments of docs/results.md, each one command; what is finished is not done again.

    python benchmarks/experiments.py curves --data PETS --weights FILE --runs runs/pets --at-once 8 --commit 1a2b3c4

Everything starts from a ViT-S that was fine-tuned on the same images, one a seed (`base`), and is trained a few more
epochs in the same way. One gate a seed learns where the class token of that model looks (`gates`); at every budget its
threshold follows the wanted share. The paper's own gate is trained with the rest, as the paper does it (`paper`).
Each group of runs is a folder, and a file of results as benchmarks/collect.py writes it; some experiments end with a
look at the trained models (`analysis`). `times` wants the machine for itself.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from collect import collect
from safetensors.torch import load_file, save_file
from shared import ROOT, run_script, script_parser

from msvit.lab.runs import is_evaluated, write_json
from msvit.lab.sweep import Job, check_folders, grid, run_jobs
from msvit.lab.sweep_progress import SweepProgress

SEEDS = (0, 1, 2)
TARGETS = (0.3, 0.4, 0.5, 0.65)  # shares of fine cells: 46 to 73 % of the dense multiply-adds
FULL, LARGE = 224, 384
BASE, GATE = f"base/dense-{FULL}", "gates/t0.3-w1"  # what everything starts from, before the seed
REDUCERS = ("evit-0.7", "evit-0.5", "dynamicvit-0.7", "dynamicvit-0.5", "tome-r8", "tome-r13")

Settings = dict[str, str]
TUNE: Settings = {"optim.lr": "3e-5", "optim.head_scale": "1", "optim.warmup_epochs": "0.5", "optim.epochs": "5"}
LEARN: Settings = TUNE | {"optim.epochs": "10", "gate.lr_scale": "50", "gate.target": "0.3"}
PAPER: Settings = LEARN | {  # the paper's gate and loss
    "model.gate": "learned", "gate.loss": "gbas", "gate.target": "0.25", "gate.weight": "4", "gate.warmup_epochs": "1",
}  # fmt: skip
SHORT: Settings = PAPER | {"optim.epochs": "6"}  # for ablations


@dataclass(frozen=True)
class Place:
    """Where things are."""

    data: str
    weights: str
    runs: Path

    def common(self, weights: str | Path | None = None) -> Settings:
        rare = dict.fromkeys(("eval_every", "checkpoint_every"), "100")  # epochs: at the end only
        return {"data.source": self.data, "model.weights": str(weights or self.weights), **rare}

    def tuned(self, weights: str | Path | None = None) -> Settings:
        """Five more epochs, from the dense run of the seed."""
        return self.common(weights or self.runs / f"{BASE}-s{{seed}}") | TUNE


def job(name: str, settings: Settings, seed: int, *after: str) -> Job:
    own = {key: value.replace("{seed}", str(seed)) for key, value in settings.items()}
    return Job(f"{name}-s{seed}", own | {"seed": str(seed)}, after=tuple(f"{other}-s{seed}" for other in after))


def base(place: Place, seeds: tuple[int, ...] = SEEDS) -> list[Job]:
    """The dense model that everything starts from."""
    about = place.common() | {"model.gate": "none", "optim.epochs": "30"}
    return [job(BASE, about, seed) for seed in seeds]


def gates(place: Place) -> list[Job]:
    """One learned gate per seed; evaluated against Pets' trimaps too, where they lie beside the data."""
    objects = f"{place.data}/{{split}}_trimaps.tar.gz"
    known = {"data.objects": objects} if Path(objects.format(split="val")).is_file() else {}
    return [job(GATE, place.tuned() | LEARN | known, seed, BASE) for seed in SEEDS]


def paper(place: Place) -> list[Job]:
    """The paper's gate, at two budgets. Twice the epochs of the others, as nothing of it was learned before."""
    return [
        job(f"curves/gbas-{target}", place.tuned() | PAPER | {"gate.target": target}, seed, BASE)
        for target in ("0.25", "0.5") for seed in SEEDS
    ]  # fmt: skip


def curves(place: Place) -> list[Job]:
    """Accuracy against cost: smaller dense inputs, disc, entropy, the paper's gate and the learned one."""
    rows = sweep(place, "curves", FULL, list(TARGETS), sizes=[224, 192, 160, 128], gates=["disc", "entropy"])
    return base(place) + gates(place) + paper(place) + rows


def curves384(place: Place) -> list[Job]:
    """The same at a larger input; the gate is the one that was learned at 224 px."""
    rows = sweep(place, "curves384", LARGE, [0.5, 0.65], sizes=[384, 320, 256], gates=["disc"], shares=[0.5])
    return base(place) + gates(place) + rows


def reducers(place: Place) -> list[Job]:
    """Each reducer by itself at two rates, and its weaker one with the gate at two budgets."""
    alone = sweep(place, "curves", FULL, [], sizes=[FULL], reducers=list(REDUCERS))
    both = sweep(place, "curves", FULL, [0.4, 0.65], sizes=[FULL], reducers=list(REDUCERS[::2]))
    own = {"reducer.teacher": "none"}  # the model it starts from, not another run of the sweep
    rows = [replace(row, changes=row.changes | own) if "reducer.name" in row.changes else row for row in alone + both]
    return base(place) + gates(place) + rows


def sweep(place: Place, group: str, size: int, targets: list[float], shares: list[float] | None = None,
          **what: Any) -> list[Job]:  # fmt: skip
    """Rows of `msvit sweep`, all from the dense runs; the learned gate is frozen, and its threshold follows."""
    frozen = {"model.gate_from": str(place.runs / f"{GATE}-s{{seed}}"), "model.freeze_gate": "true"}
    changes = place.tuned() | frozen | {"gate.follow": "true", "data.img_size": str(size)}
    rows = grid(
        "pets", targets=targets, weights=[1.0], seeds=list(SEEDS), shares=shares or targets, changes=changes, **what
    )
    return [
        replace(row, name=f"{group}/{row.name}", after=(f"{before}-s{row.changes['seed']}",))
        for row in rows for before in [GATE if row.name.startswith("t0") else BASE]
    ]  # fmt: skip


def ablation(place: Place, group: str, rows: dict[str, Settings]) -> list[Job]:
    """One seed of the paper's gate, with other settings in each run."""
    return base(place, (0,)) + [
        job(f"{group}/{name}", place.tuned() | SHORT | own, 0, BASE) for name, own in rows.items()
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
    """Patches and cells of 16/32 against 32/64 px at 256 px, where tokens are few: one seed."""
    large = {"data.img_size": "256", "model.options.patch_size": "32"}
    found = base(place, (0,))
    found.append(job("scales/start-256-32px", place.common() | large | {"model.gate": "none", "optim.epochs": "30"}, 0))
    for fine, start, own, shares in (
        ("16", BASE, {"data.img_size": "256"}, ("0.05", "0.1", "0.2")),
        ("32", "scales/start-256-32px", large, ("0.2", "0.5", "0.8")),
    ):
        about = place.tuned(place.runs / f"{start}-s{{seed}}") | own
        rows = {f"t{share}-w1-{fine}px": about | LEARN | {"gate.target": share} for share in shares}
        sizes = ("128", "96", "64") if fine == "16" else ("256",)
        rows |= {f"dense-{size}-{fine}px": about | {"model.gate": "none", "data.img_size": size} for size in sizes}
        found += [job(f"scales/{name}", settings, 0, start) for name, settings in rows.items()]
    return found


def transfer(place: Place) -> list[Job]:
    """Gates that learned at other input sizes and with half the blocks, and a frozen one on half the blocks."""
    half, start = {"model.options.depth": "6"}, "transfer/half-start"
    short = place.common(halve(place)) | half
    tuned = place.tuned(place.runs / f"{start}-s{{seed}}") | half
    frozen = {"model.gate_from": str(place.runs / f"{GATE}-s0"), "model.freeze_gate": "true"}
    follow = {"gate.follow": "true", "gate.target": "0.3", "optim.epochs": "10"}
    return base(place) + gates(place) + [
        job(start, short | {"model.gate": "none", "optim.epochs": "30"}, 0),
        *(job(f"transfer/size-{size}", place.tuned() | LEARN | {"data.img_size": size}, 0, BASE)
          for size in ("160", "384")),
        job("transfer/half-own", tuned | LEARN, 0, start),
        job("transfer/half-moved", tuned | frozen | follow, 0, start, GATE),
    ]  # fmt: skip


def halve(place: Place, keep: int = 6) -> Path:
    """The weights without the later half of the blocks: a smaller backbone."""
    path = place.runs / "half.safetensors"
    if Path(place.weights).is_file() and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = load_file(place.weights)
        late = tuple(f"blocks.{index}." for index in range(keep, 12))
        save_file({name: t for name, t in weights.items() if not name.startswith(late)}, path)
    return path


def robustness(place: Place) -> list[Job]:
    """A learned gate and a disc of as many tokens, to be looked at under zooms and shifts."""
    return base(place) + gates(place) + [row for row in curves(place) if re.search(r"/(t|disc-)0\.4-", row.name)]


def times(place: Place) -> list[Job]:
    """What is to be timed: one seed of every curve."""
    return [row for row in curves(place) + reducers(place) if row.name.endswith("-s0")]


def times384(place: Place) -> list[Job]:
    return [row for row in curves384(place) if row.name.endswith("-s0")]


EXPERIMENTS: dict[str, Callable[[Place], list[Job]]] = {
    make.__name__: make
    for make in (curves, reducers, curves384, losses, modes, noise, scales, transfer, robustness, times, times384)
}
OWN = {"curves": ("base", "gates", "curves"), "reducers": ("curves",), "robustness": (), "times": (), "times384": ()}
AGAINST = {"curves": "own", "curves384": "own"} | dict.fromkeys(("gates", "losses", "modes", "noise"), "pets_curves")


def groups(name: str) -> tuple[str, ...]:
    """The groups of runs that an experiment tells of; it may need others."""
    return OWN.get(name, (name,))


def analysis(name: str, place: Place, results: Path) -> list[str]:
    """The command that looks at an experiment's trained models; none if what their evaluation says is enough."""
    scripts, runs = ROOT / "benchmarks", place.runs
    bench = ["-m", "msvit", "bench", "--runs"]
    return {
        "robustness": [
            f"{scripts}/robustness.py",
            *[f"{runs}/curves/{kind}-s{seed}" for kind in ("t0.4-w1", "disc-0.4") for seed in SEEDS],
            "--out", f"{results}/gates/robustness.json", "--plot", f"{ROOT}/docs/images/robustness.svg",
        ],
        "transfer": [
            f"{scripts}/agreement.py", *[f"{runs}/{GATE}-s{seed}" for seed in SEEDS],
            *[f"{runs}/transfer/{kind}-s0" for kind in ("size-160", "size-384", "half-own")], "default", "--match",
            "--out", f"{results}/gates/agreement.json",
        ],
        "times": [*bench, f"{runs}/curves/*-s0", "--batch", "256", "--out", f"{results}/times/pets.json"],
        "times384": [*bench, f"{runs}/curves384/*-s0", "--batch", "128", "--out", f"{results}/times/pets384.json"],
    }.get(name, [])  # fmt: skip


def unique(jobs: list[Job]) -> list[Job]:
    """Experiments share runs: each once, and of two that differ in a setting there is none."""
    found: dict[str, Job] = {}
    for each in jobs:
        if found.setdefault(each.name, each).changes != each.changes:
            raise ValueError(f"two experiments want a run {each.name} with different settings")
    return list(found.values())


def main() -> None:
    parser = script_parser(__doc__, results=False)
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    parser.add_argument("--data", required=True, help="Pets: a folder with train/ and val/, and perhaps the trimaps")
    parser.add_argument("--weights", required=True, help="of a DINOv2-architecture ViT-S")
    parser.add_argument("--runs", type=Path, default=Path("runs/pets"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    place = Place(given.data, given.weights, given.runs.resolve())
    jobs = unique([each for name in given.experiments for each in EXPERIMENTS[name](place)])
    check_folders("pets", jobs, place.runs)
    for folder in ("sweeps", "gates", "times"):  # before hours of training: can results be written?
        (given.results / folder).mkdir(parents=True, exist_ok=True)
    with SweepProgress(jobs, place.runs) as progress:
        failed = run_jobs("pets", jobs, place.runs, watcher=progress, at_once=given.at_once)
    for group in dict.fromkeys(group for name in given.experiments for group in groups(name)):
        if any(map(is_evaluated, (place.runs / group).glob("*"))):
            names = [name for name in given.experiments if group in groups(name)]
            command = f"python benchmarks/experiments.py {' '.join(names)} --data PETS --weights FILE"
            found = collect(place.runs / group, command, given.commit, AGAINST.get(group), maps=group == "losses")
            write_json(given.results / f"sweeps/pets_{group}.json", found)
    if failed:
        sys.exit(f"{len(failed)} runs failed ({', '.join(each.name for each in failed)}); see their log.txt")
    for name in given.experiments:
        if asked := analysis(name, place, given.results):
            commit = ["--commit", given.commit] if given.commit else []
            subprocess.run([sys.executable, *asked, *commit], check=True)


if __name__ == "__main__":
    run_script(main)
