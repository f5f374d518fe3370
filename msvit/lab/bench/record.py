"""Record: on what machine, with what versions, from what commit and by what command a number was made."""

import platform
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import msvit
from msvit.lab.bench.images import short
from msvit.lab.runs import versions


def make_record(device: torch.device, arguments: list[str], commit: str | None = None) -> dict[str, Any]:
    """`commit` says where the source is from when this is no clean git checkout."""
    known = source_commit()
    if commit and known["dirty"] is not False:
        known = {"commit": commit, "dirty": None}
    return {
        "machine": machine(device),
        "versions": versions() | {"cuda": torch.version.cuda},
        "commit": known["commit"],
        "dirty": known["dirty"],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command(arguments),
    }


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """The processor's name, on Linux from /proc/cpuinfo; elsewhere what Python knows."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), None) or platform.processor() or f"{platform.machine()} CPU"


def source_commit() -> dict[str, Any]:
    """The commit of a git checkout and whether the package was changed since; None and None elsewhere."""
    package = Path(msvit.__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed, perhaps inside somebody else's checkout
        return {"commit": None, "dirty": None}
    return {"commit": git("rev-parse", "--short=12", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}


def command(arguments: list[str]) -> str:
    """As it was typed, with absolute paths cut to their last two names."""
    return shlex.join(["msvit", *(short(Path(word)) if word.startswith("/") else word for word in arguments)])
