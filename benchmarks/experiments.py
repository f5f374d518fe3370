"""The experiments of docs/results.md and the paper's own, each one command; finished runs are not trained again.

    python benchmarks/experiments.py paper --recipe imagenet_vit --data IMAGENET --seeds 0
    python benchmarks/experiments.py paper --recipe cub --data CUB --weights FILE --at-once 8 --commit 1a2b3c4
    python benchmarks/experiments.py regime --recipe cub --data CUB --weights FILE --seeds 0 --at-once 6

Any recipe and data will do. All runs start from the recipe's weights, or those given, gate and host together, as in the
paper, and have the recipe's schedule. `--set` is passed on to every run, but does not change what tells runs apart
(gates, targets, sizes).

`paper` trains the paper's gate with one clipping for all weights, in adaptive trimming or masked as the recipe says,
beside dense models of several sizes and discs with as many fine cells, all for as many steps, and compares gate losses
with trimming. At its end classifiers of the first seed are looked at further (`analyses`): at a larger input, under
zooms and shifts, and how alike their gates decide. `regime` compares weights, sigmas, losses, modes, batches and rates,
beside some runs of `paper`, `losses` the gate losses with two kinds of crops.

Each group of runs is a folder, and a file of results as benchmarks/collect.py writes it, sweeps/NAME_GROUP.json, anew
whenever a run ends, so that an interrupted experiment has those of finished runs.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from collect import collect
from experiment_runs import EXPERIMENTS, PAPER_TARGETS, SEEDS, Place
from shared import ROOT, run_script, script_parser

from msvit_lab.cli.app import numbers, pairs
from msvit_lab.interrupts import ending_as_ctrl_c
from msvit_lab.json_values import write_json
from msvit_lab.recipes import RECIPES
from msvit_lab.runs import is_evaluated
from msvit_lab.sweep import Job, SweepProgress, check_folders, in_order, run_jobs

OWN_GROUPS = {"regime": ("regime", "paper")}  # of runs that an experiment tells of, where they are not its own alone
AGAINST = {"paper": "own", "regime": "{name}_paper"}  # whose dense runs a group is compared with
NUM_RANDOM = 12  # views
TRANSFER = 384  # px, of a larger input without training, for recipes of 224


def groups(name: str) -> tuple[str, ...]:
    """The groups of runs that an experiment tells of."""
    return OWN_GROUPS.get(name, (name,))


def analyses(name: str, place: Place, results: Path, commit: str = "") -> list[list[str]]:
    """Python's arguments for each program that looks further at an experiment's trained classifiers."""
    if name != "paper" or place.config.task != "classify":
        return []

    def trained(*kinds: str) -> list[str]:
        folders = [place.runs / f"paper/{kind}-s{place.seeds[0]}" for kind in dict.fromkeys(kinds)]
        return [str(folder) for folder in folders if is_evaluated(folder)]

    own, context, to = f"{place.mode}-gbas", "context-gbas-0.25", f"{results}/gates/{place.name}"
    moved = trained(f"{own}-0.25", "disc-like-0.25", context)
    larger = [*trained(f"dense-{place.config.data.img_size}"), *moved]
    resized = ["--size", f"{place.sizes(TRANSFER)[0]}", "--rounds", "0"]
    alike = trained(*(f"{own}-{target:g}" for target in PAPER_TARGETS), f"{place.trimmed}-gbas-0.25", context)
    plot = ["--random", f"{NUM_RANDOM}", "--plot", f"{to}_robustness.svg"]
    scripts, extra = f"{ROOT}/benchmarks", ["--commit", commit] if commit else []
    found = [["-m", "msvit", "eval", run, *resized] for run in larger]
    if moved:
        found.append([f"{scripts}/robustness.py", *moved, *plot, "--out", f"{to}_robustness.json", *extra])
    if alike:
        found.append([f"{scripts}/agreement.py", *alike, "default", "--match", "--out", f"{to}_agreement.json", *extra])
    return found


def only(jobs: list[Job], pattern: str) -> list[Job]:
    """The jobs in whose names the pattern is found, and those that they wait for."""
    after = {each.name: each.after for each in jobs}
    wanted = [name for name in after if re.search(pattern, name)]
    for name in wanted:
        wanted += [other for other in after[name] if other not in wanted]
    return [each for each in jobs if each.name in wanted]


def command_line(place: Place, names: list[str]) -> str:
    """The command behind results, with words in the place of paths."""
    words = ["python benchmarks/experiments.py", *names]
    words += ["--recipe", place.recipe]
    words += [] if place.data is None else ["--data", place.name.upper()]
    words += [] if place.weights is None else ["--weights", "FILE"]
    words += [] if place.seeds == SEEDS else ["--seeds", ",".join(map(str, place.seeds))]
    words += [part for key, value in place.changes.items() for part in ("--set", f"{key}={value}")]
    return " ".join(words)


class Recorded(SweepProgress):
    """Writes results whenever a run ends."""

    def __init__(self, jobs: list[Job], given: Any, place: Place) -> None:
        super().__init__(jobs, place.runs)
        self.given, self.place = given, place

    def ended(self, job: Job, error: str | None) -> None:
        super().ended(job, error)
        try:
            with self.lock:
                write_results(self.given, self.place)
        except (OSError, ValueError) as problem:  # of a full disk, say: no reason to end the others
            print(f"results are not written: {problem}", file=sys.stderr)


def train(place: Place, jobs: list[Job], given: Any) -> list[Job]:
    """Run what is not finished. Returns the jobs that failed."""
    check_folders(place.recipe, jobs, place.runs, smoke=place.smoke)
    progress = Recorded(jobs, given, place)
    return run_jobs(place.recipe, jobs, place.runs, progress, smoke=place.smoke, at_once=given.at_once)


def read_arguments(arguments: list[str] | None = None) -> tuple[Any, Place]:
    parser = script_parser(__doc__, results=False)
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    parser.add_argument("--recipe", default="cub", choices=RECIPES)
    parser.add_argument("--data", help="a folder with train/ and val/ (or test/)")
    parser.add_argument("--weights", help="a file, such as a DINOv2-architecture ViT-S; by default the recipe's own")
    parser.add_argument("--set", action="append", default=[], help="a setting of every run, as in msvit train")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the runs whose names match, and what they need")
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
    known = given.data and (given.weights or place.config.model.pretrained)
    if given.recipe in ("cub", "pets") and not given.smoke and not known:
        parser.error(f"the recipe {given.recipe} has neither images nor weights of its own; give --data and --weights")
    return given, place


def write_results(given: Any, place: Place) -> None:
    """Write a file of results for each group that has a finished run."""
    for group in dict.fromkeys(group for name in given.experiments for group in groups(name)):
        if any(map(is_evaluated, (place.runs / group).glob("*"))):
            command = command_line(place, [name for name in given.experiments if group in groups(name)])
            command += f" --only '{given.only}'" if given.only else ""
            against = AGAINST[group].format(name=place.name) if group in AGAINST else None
            found = collect(place.runs / group, command, given.commit, against)
            write_json(given.results / f"sweeps/{place.name}_{group}.json", found)


def main() -> None:
    given, place = read_arguments()
    jobs = {each.name: each for name in given.experiments for each in EXPERIMENTS[name](place)}  # some are of two
    jobs = sorted(only([*jobs.values()], given.only), key=lambda each: int(each.changes["seed"]))  # whole seeds
    if given.dry_run:
        print(*(each.name for each in in_order(jobs)), sep="\n")
        return
    for folder in ("sweeps", "gates"):  # before hours of training: can results be written?
        (given.results / folder).mkdir(parents=True, exist_ok=True)
    write_results(given, place)  # of runs that were finished before
    with ending_as_ctrl_c([]):
        failed = train(place, jobs, given)
    write_results(given, place)
    if failed:
        sys.exit(f"{len(failed)} runs failed ({', '.join(each.name for each in failed)}); see their log.txt")
    looks = [words for name in given.experiments for words in analyses(name, place, given.results, given.commit)]
    with ThreadPoolExecutor(given.at_once) as pool:
        codes = [*pool.map(lambda words: subprocess.call([sys.executable, *words]), looks)]
    write_results(given, place)  # now of larger inputs, too
    if any(codes):
        sys.exit("all runs are trained, but not all were looked at further; see above")


if __name__ == "__main__":
    run_script(main)
