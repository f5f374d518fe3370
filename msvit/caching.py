"""A cache for tables that depend on sizes and devices only.

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
    """Cache the results of a function of sizes, except while torch.compile traces it."""
    cached = lru_cache(maxsize=64)(make)

    @wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():  # a traced tensor must not be cached
            return make(*args, **kwargs)
        with torch.inference_mode(False):  # a cached tensor must be usable in training too
            return cached(*args, **kwargs)  # type: ignore[arg-type]

    return get
