"""Results: a JSON file of workloads, each with the machine, versions, commit and command that it was measured with.

    found = measure(...) | {"record": make_record(device, sys.argv[1:])}
    write_result(Path("benchmarks/results/h200.json"), found)     # replaces the same workload, if it is there
    read_results(path)                                            # a list of workloads

The file is written anew after each workload, so that a run that is stopped keeps what it has.
"""

import json
import platform
import re
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import msvit
from msvit_lab.bench.images import short
from msvit_lab.json_values import write_json
from msvit_lab.runs import versions

FORMAT = 1
SAME = ("model", "size", "batch", "train", "device", "dtype", "asked")  # equal in records of one workload


def read_results(path: Path) -> list[dict[str, Any]]:
    try:
        about = json.loads(path.read_text())
        found, workloads = about["format"], about["workloads"]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no file of msvit bench ({type(error).__name__}); choose another --out") from None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, but this msvit reads format {FORMAT}; measure again")
    return workloads


def write_result(path: Path, found: dict[str, Any]) -> None:
    before = read_results(path) if path.exists() else []
    kept = [other for other in before if key(other) != key(found)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, "workloads": [*kept, found]})


def key(found: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(json.dumps(found.get(name), sort_keys=True) for name in SAME)


def make_record(
    device: torch.device, arguments: list[str], commit: str | None = None, program: str = "msvit"
) -> dict[str, Any]:
    """`commit`: where the source is from if this is no clean git checkout. Absolute paths keep their last two names.

    Also those after "=" and ",".
    """
    known = source_commit()
    if commit and known["dirty"] is not False:
        known = {"commit": commit, "dirty": None}
    words = [re.sub(r"(?<![^=,])/[^=,]+", lambda path: short(Path(path[0])), word) for word in arguments]
    cpu = f"{cpu_name()}, {torch.get_num_threads()} threads"
    return {
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "versions": versions() | {"cuda": torch.version.cuda},
        **known,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join([program, *words]),
    }


def cpu_name() -> str:
    """The processor's name, on Linux from /proc/cpuinfo; elsewhere from Python."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), None) or platform.processor() or f"{platform.machine()} CPU"


def source_commit() -> dict[str, Any]:
    """The commit of a git checkout and whether the packages were changed since; None and None elsewhere."""
    package = Path(msvit.__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed, perhaps inside somebody else's checkout
        return {"commit": None, "dirty": None}
    changed = git("status", "--porcelain", "--", ".", "../msvit_lab")
    return {"commit": git("rev-parse", "--short=12", "HEAD"), "dirty": bool(changed)}
