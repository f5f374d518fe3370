"""A gate by its name, or by the folder it lies in: what `--gate` means to every command.

    find_gate("default")                     # the trained one that comes with msvit
    find_gate("gates/mine", coarse=28)       # written by msvit.save_gate, for other cells
    find_gate("runs/scenes")                 # of a run
    find_gate("disc", coarse=32, share=0.3)  # one without weights
"""

from pathlib import Path
from typing import TYPE_CHECKING

from msvit.gates import GATES, Gate
from msvit.saving.folder import DEFAULT, load_gate, named_gate

if TYPE_CHECKING:
    from msvit_lab.config import Data


def gate_names() -> list[str]:
    """Every name that is no folder."""
    return [DEFAULT, *GATES]


def is_trained(name: str) -> bool:
    """Whether a name stands for a gate with weights: default, or a folder. Names of gates come before folders."""
    return name == DEFAULT or (name not in gate_names() and Path(name).is_dir())


def find_gate(name: str, coarse: int | None = None, share: float | None = None) -> Gate:
    """The gate of this name.

    `coarse`: the side of a cell in px, a trained gate's own by default. `share`: of fine cells, if it takes one.
    Raise ValueError for a name that is none.
    """
    if is_trained(name):
        return read_gate(Path(name), coarse)[0]
    if name not in gate_names():
        raise ValueError(
            f"unknown gate {name!r}; known: {', '.join(gate_names())}, and folders: a run of msvit train, or one "
            f"written by msvit.save_gate"
        )
    return named_gate(name, coarse, share)


def read_gate(folder: Path, coarse: int | None = None) -> tuple[Gate, "Data | None"]:
    """A gate that was saved alone, or that of a run with what it was trained on; for cells of `coarse` px, if given."""
    if (folder / "config.json").is_file():
        from msvit_lab.runs import Run

        run = Run(folder)
        run.check_finished()
        return load_gate(run.model, coarse=coarse), run.config.data
    own = any(folder.glob("gate.*"))  # a folder that happens to be called default
    return load_gate(folder.resolve() if own else folder, coarse=coarse), None
