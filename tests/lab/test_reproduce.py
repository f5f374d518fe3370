"""The commands of docs/reproduce.md: each is one that can be given, and on tiny images each runs."""

import re
import runpy
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from process_state import forget_accelerator
from scripts import load_script
from smoke_runs import call, write_images
from typer.main import get_command

import msvit
from msvit_lab import sweep
from msvit_lab.cli import app

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reproduce.md"
SIZES = ("--dense-sizes", "--sizes", "--img-size", "--size")
STUBS = """
shown() { printf '%s\\037' "$@"; printf '\\036'; }
msvit() { shown msvit "$@"; }
python() { shown python "$@"; }
"""


class Command(NamedTuple):
    program: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.program, *self.arguments))


@cache
def commands() -> list[Command]:
    """Those of the page as bash reads them, its loops unrolled: whole blocks, and what stands in cells of tables."""
    text = PAGE.read_text()
    parts = re.findall(r"^```bash\n(.*?)^```|^\|[^|]*\| `((?:msvit|python) [^`]*)` \|", text, re.DOTALL | re.MULTILINE)
    script = STUBS + "\n".join(block or cell for block, cell in parts)
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    lines = [line.split("\037")[:-1] for line in done.stdout.split("\036")[:-1]]
    return [Command(program, tuple(arguments)) for program, *arguments in lines]


def test_every_table_and_figure_of_the_paper_has_its_row():
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    kinds = {kind: " ".join(row for row in rows if kind in row) for kind in ("table", "section")}
    figures = " ".join(row for row in rows if "table" not in row or "figure" in row)
    assert {n for n in range(1, 6) if re.search(rf"\b{n}\b", kinds["table"])} == set(range(1, 6))
    missing = {n for n in range(1, 18) if not re.search(rf"\b{n}\b", figures)}
    assert missing == {2, 3, 10}  # drawings, and times of a plain ViT
    assert max(map(len, PAGE.read_text().splitlines())) <= 140


def test_links_lead_to_the_headings_of_the_page():
    text = PAGE.read_text()
    headings = {line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= headings


def test_the_fixed_gate_has_the_multiply_adds_that_the_page_says():
    share = float(re.search(r"--gate disc --set model.share=(\S+)", PAGE.read_text())[1])
    host = timm.create_model("vit_small_patch16_224", img_size=384)
    gmacs = msvit.macs(msvit.convert(host, gate=msvit.DiscGate(coarse=32, share=share)), torch.zeros(1, 3, 384, 384))
    assert f"has {gmacs.item() / 1e9:.2f}. " in PAGE.read_text()


class Planned(Exception):  # noqa: N818
    """Raised where training would begin."""


@pytest.mark.parametrize("command", dict.fromkeys(commands()), ids=str)
def test_a_command_can_be_given_and_its_runs_can_be_made(command, monkeypatch, tmp_path):
    """Up to where training would begin: options are known, settings fit each other, every run can be described."""

    def plan(*args, **kwargs):
        raise Planned

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("msvit_lab.training.loop.train", plan)
    monkeypatch.setattr("msvit_lab.sweep.run_jobs", plan)
    if command.program == "python":
        script, *rest = command.arguments
        assert (ROOT / script).is_file()
        if script.endswith("experiments.py"):
            experiments = load_script("experiments")
            monkeypatch.setattr(sys, "argv", [script, *rest])
            with pytest.raises(Planned):
                experiments.main()
    elif command.arguments[0] in ("train", "sweep"):
        result = call(*command.arguments)
        assert isinstance(result.exception, Planned), result.output
    else:  # they need trained runs
        name, *rest = command.arguments
        get_command(app).commands[name].make_context(name, rest)


def written(command: Command) -> set[str]:
    """Files and folders; --runs is what experiments.py writes and `msvit bench` reads."""
    names = {"--out", "--plot", "--results"} | ({"--runs"} if command.program == "python" else set())
    return {word for before, word in zip(command.arguments, command.arguments[1:], strict=False) if before in names}


def read(command: Command) -> set[str]:
    found = {word.removeprefix("model.gate_from=") for word in command.arguments}
    return {word for word in found if word.startswith(("runs/", "results/"))} - written(command)


def in_order() -> list[Command]:
    """Each command after those that write what it reads; a table may name one before the block that it needs."""
    left, done = list(dict.fromkeys(commands())), list[Command]()
    writers = {word: {other for other in left if any(overlap(word, out) for out in written(other))}
               for command in left for word in read(command)}  # fmt: skip
    assert all(writers.values()), [word for word, found in writers.items() if not found]
    while left:
        ready = [command for command in left if all(writers[word] <= set(done) for word in read(command))]
        assert ready, f"they wait for each other: {left}"
        done += ready
        left = [command for command in left if command not in ready]
    return done


def overlap(one: str, other: str) -> bool:
    """Whether one is the other, or lies in it."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def test_what_a_command_reads_is_written_by_another():
    assert len(in_order()) > 30


def stand_ins(folder: Path) -> dict[str, str]:
    """Tiny sets in the place of IMAGENET and CUB (with test/ instead of val/), ADE20K and PHOTOS."""
    for split, each in (("train", 6), ("test", 2)):
        write_images(folder / "imagenet" / split, each=each)
    draw = np.random.default_rng(0)
    for split, num in (("training", 16), ("validation", 2)):
        for index in range(num):
            for kind, shape, high in (("images", (70, 80, 3), 256), ("annotations", (70, 80), 151)):
                path = folder / f"ade20k/{kind}/{split}/{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(draw.integers(0, high, shape, np.uint8)).save(path)
    shutil.copytree(folder / "ade20k/images/validation", folder / "photos")
    names = {"IMAGENET": "imagenet", "CUB": "imagenet", "ADE20K": "ade20k", "PHOTOS": "photos"}
    return {word: str(folder / name) for word, name in names.items()}


def tiny(command: Command, data: dict[str, str]) -> list[str]:
    """The same command for tiny models and images: the input is two cells wide, a smaller one is one cell."""
    cell, full = (64, 448) if "patch32" in str(command) else (32, 192 if "vit_large" in str(command) else 224)

    def scaled(sizes: str) -> str:
        return ",".join(dict.fromkeys(str(cell * max(1, 2 * int(size) // full)) for size in sizes.split(",")))

    found: list[str] = []
    for before, word in zip(("", *command.arguments), command.arguments, strict=False):
        name, _, rest = word.partition("/")
        if name in data:
            word = "/".join([data[name], rest]).rstrip("/")
        elif before in SIZES:
            word = scaled(word)
        elif other := re.search(r"-(\d+)px-s0$", word):  # a run of another size
            word = word.replace(other[1], scaled(other[1]))
        elif word.startswith("data.img_size="):
            word = f"data.img_size={scaled(word.partition('=')[2])}"
        elif word.startswith("optim.epochs="):
            word = "optim.epochs=1"
        elif "--weights" in (before, word) or word == "--match":  # random weights, and gates with all cells fine
            continue
        elif before == "--batch":
            word = "1"
        elif word.startswith("vit_small_patch16_224") and "bench" in command.arguments:
            word = "vit_tiny_patch16_224"
        found.append(word)
    common = ["--set", "data.mean=0.5,0.5,0.5", "--set", "data.std=0.5,0.5,0.5"]  # of gates and of their users
    kind = command.arguments[0]
    if kind == "train":
        found += ["--smoke", "--rounds", "0", *common]
    elif kind == "sweep":
        weights = [] if "--gate-weight" in found else ["--gate-weight", "4"]
        found += ["--smoke", *weights, *common]
    elif kind == "bench":
        found += ["--device", "cpu", "--rounds", "2", "--seconds", "1"]
        found += ["--no-compile"] if "--runs" in found else []
    elif kind.endswith("experiments.py"):
        found += ["--smoke", "--seeds", "0", *common]
    return found


def run_here(recipe, jobs, out, progress, smoke=False, at_once=1):
    """What is left of a sweep in this process, one after the other: to start others takes longer than to train."""
    for job in (job for job in sweep.in_order(jobs) if not sweep.is_evaluated(out / job.name)):
        settings = [part for name, value in job.changes.items() for part in ("--set", f"{name}={value}")]
        invoke(["train", recipe, "--out", str(out / job.name), "--smoke", "--rounds", "0", *settings])
    return []


def invoke(arguments):
    forget_accelerator()
    result = call(*arguments)
    assert result.exit_code == 0, (result.output[-2000:], result.exception)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_every_command_of_the_page_runs_on_tiny_images(tmp_path, monkeypatch):
    """One after the other, as some read what others wrote."""
    data = stand_ins(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sweep, "run_jobs", run_here)
    failed = []
    for command in in_order():
        arguments = tiny(command, data)
        print(command.program, *arguments, flush=True)
        outs = [Path(arguments[i + 1]) for i, word in enumerate(arguments) if word in ("--out", "--plot")]
        try:
            if command.program == "python":
                monkeypatch.setattr(sys, "argv", arguments)
                runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
            else:
                invoke(arguments)
            assert all(out.exists() for out in outs), f"not written: {outs}"
        except (Exception, SystemExit) as error:
            failed.append(f"{command}\n    {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
