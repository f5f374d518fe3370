"""Whether a run goes on with the settings it began with.

    differences(old, new)              # ["optim.lr was 0.001, now 0.1", "seed was 0, now 3"]
    check_settings(folder, config)     # ValueError that names them all
"""

from pathlib import Path

from msvit.lab.config import OPEN, Config, settings
from msvit.lab.runs import read_config

# They change what is written, how fast, or whether a bad file ends the run; not what is learned.
FREE = frozenset(
    ("data.workers", "data.skip_bad", "log_every", "eval_every", "checkpoint_every", "tensorboard")
)  # fmt: skip


def differences(old: Config, new: Config) -> list[str]:
    """Every setting that decides what is learned and is another one. More epochs are none: a run may be made longer."""
    found = []
    for (name, _, before), (_, _, now) in zip(settings(old), settings(new), strict=True):
        longer = name == "optim.epochs" and now > before
        left_open = now == OPEN.get(name, before)  # it will be what the run has found
        if before != now and name not in FREE and not longer and not left_open:
            found.append(f"{name} was {before}, now {now}")
    return found


def check_settings(folder: Path, config: Config, remedy: str) -> None:
    """Raise ValueError unless a run that began in this folder goes on as it began."""
    if (folder / "config.json").is_file() and (found := differences(read_config(folder)["config"], config)):
        raise ValueError(f"{folder} began with other settings: {'; '.join(found)}; {remedy}")
