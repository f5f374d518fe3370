"""Reduction: fewer tokens from block to block, whatever the gate has left.

    reducer = EViT(rate=0.7)            # keeps what the class token attends to, fuses the rest into one token
    reducer = DynamicViT(rate=0.7)      # keeps what small trained predictors choose
    reducer = ToMe(r=13)                # merges tokens that are alike, in every block
    msvit.convert(vit, gate=gate, reducer=reducer)

Counts are per image, over the tokens it has. With the gate `AllFine` these are the published methods. A reducer of your
own is a `Reducer`; to save it with a model, add its class to `REDUCERS`.
"""

from inspect import signature
from typing import Any

from msvit.checks import check_choice
from msvit.reduction.base import Reducer
from msvit.reduction.dynamicvit import DynamicViT
from msvit.reduction.evit import EViT
from msvit.reduction.tome import ToMe

REDUCERS: dict[str, type[Reducer]] = {"evit": EViT, "dynamicvit": DynamicViT, "tome": ToMe}


def make_reducer(name: str, **settings: Any) -> Reducer | None:
    """Make a reducer by its name, with those settings that are not None; return None for "none"."""
    given = {key: value for key, value in settings.items() if value is not None}
    if check_choice("reducer name", name, ("none", *REDUCERS)) == "none":
        return None
    known = signature(REDUCERS[name]).parameters
    if unknown := given.keys() - known.keys():
        raise ValueError(f"{name} has no {min(unknown)}; its settings are {', '.join(known)}")
    return REDUCERS[name](**given)


__all__ = ["REDUCERS", "DynamicViT", "EViT", "Reducer", "ToMe", "make_reducer"]
