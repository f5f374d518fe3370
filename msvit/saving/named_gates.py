"""A gate by its name: the trained one that comes with msvit, or one of the classes in `gates.GATES`.

    named_gate("default", coarse=28)            # trained, for cells of 28 px
    named_gate("disc", coarse=32, share=0.5)
"""

from inspect import signature
from typing import Any

from msvit.checks import check_choice
from msvit.gates import GATES, Gate
from msvit.saving.folder import load_gate

DEFAULT = "default"
COARSE = 32  # px: cells of a gate without weights, where none are given
SHARE = 0.3  # of fine cells, of gates that need one


def named_gate(name: str, coarse: int | None = None, share: float | None = None) -> Gate:
    """Return a gate by its name. `coarse`: the side of a cell in px; `share`: of fine cells, if the gate takes one."""
    check_choice("gate", name, (DEFAULT, *GATES))
    if name == DEFAULT:
        return load_gate(DEFAULT, coarse=coarse)
    kind: Any = GATES[name]
    options = {"share": SHARE if share is None else share} if "share" in signature(kind).parameters else {}
    return kind(coarse=COARSE if coarse is None else coarse, **options)
