"""Keeping what follows from geometry alone: made once, and then known.

    @cache_by_size
    def table(grid: ScaleGrid, device: torch.device) -> Tensor: ...
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def cache_by_size(make: Callable[P, T]) -> Callable[P, T]:
    """Remembers what a function of sizes has made, but not while it is compiled."""
    known = lru_cache(maxsize=64)(make)

    @wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():  # what is traced must not be kept
            return make(*args, **kwargs)
        with torch.inference_mode(False):  # and must stay usable where gradients are wanted
            return known(*args, **kwargs)  # type: ignore[arg-type]

    return get
