"""Regions: functions that are compiled once, for all blocks and all models of a process.

    @compile_region
    def mlp_half(block: nn.Module, tokens: TokenBatch) -> TokenBatch: ...

    with compiled_regions():        # outside of it a region is called as a plain function
        mlp_half(block, tokens)     # the weights come in with the block

Integers and the first dimension of tensors are dynamic; booleans, None and all other dimensions are specialised on. So
whatever differs from block to block is passed as an argument.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from msvit.types import Heads, Layout, TokenBatch

P = ParamSpec("P")
T = TypeVar("T")

OPTIONS: dict[str, Any] = {"dynamic": True}  # of torch.compile
MAX_COMPILED = 64  # compilations of one function: kinds of hosts, dtypes, reducers in a process
_on = ContextVar("compiled_regions", default=False)


@contextmanager
def compiled_regions(on: bool = True) -> Iterator[None]:
    """Run the regions called inside, by this thread, compiled, and let torch.compile recompile up to MAX_COMPILED."""
    before = _on.set(on)
    try:
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED):
            yield
    finally:
        _on.reset(before)


def compile_region(run: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function as a region."""
    @cache
    def compiled() -> Callable[P, T]:
        return torch.compile(run, **OPTIONS)

    @wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling() or not _on.get():  # a part of what is compiled already, or plain
            return run(*args, **kwargs)
        _fix_widths((*args, *kwargs.values()))
        return compiled()(*args, **kwargs)

    return call


def _fix_widths(value: Any) -> None:
    """Only the first axis of an array varies: known widths make faster kernels."""
    if isinstance(value, Tensor):
        torch._dynamo.mark_static(value, list(range(1, value.ndim)))
    elif isinstance(value, tuple):
        for each in value:
            _fix_widths(each)
    elif isinstance(value, TokenBatch | Layout | Heads):
        _fix_widths(tuple(vars(value).values()))
