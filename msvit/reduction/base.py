"""The base class of reducers: a module that takes tokens away between two blocks, or between the halves of one."""

from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from msvit.checks import check_number
from msvit.output import MSViTOutput
from msvit.types import Heads, Layout, ScaleGrid, TokenBatch

Count = TypeVar("Count", int, Tensor)  # of one image, or of each image of a batch
Ratio = tuple[int, int]  # numerator and denominator: whole numbers give the same counts on every device


class Reducer(nn.Module):
    """Base class of reducers, TokenBatch -> TokenBatch. `config` holds the constructor's arguments, for saving.

    How many tokens an image keeps depends on how many it has, and on nothing else: `num_kept` computes it for numbers
    and for tensors, so that costs are known beforehand and nothing waits for the device.
    """

    acts_before = False  # before a block, not between its attention and its MLP
    needs_teacher = False  # in training
    can_be_traced = False  # by torch.export: no shape depends on the image

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config: dict[str, Any] = config
        self._lines: dict[Any, tuple[int, int, int]] = {}

    def fit(self, host: Any) -> None:
        """Check that the host has what is needed, and make what depends on its width. Called by the model."""

    def begin(self, tokens: TokenBatch) -> TokenBatch:
        """Reduce before the first block."""
        return tokens

    def before(self, index: int, tokens: TokenBatch, start: Layout) -> TokenBatch:
        """Reduce before block `index`, counted from 0; `start` is the layout before anything was reduced."""
        return tokens

    def acts_between(self, index: int) -> bool:
        """Return whether `between` may do anything at block `index`; else that block runs in one piece."""
        return type(self).between is not Reducer.between

    def between(self, index: int, start: Layout, tokens: TokenBatch, heads: Heads) -> TokenBatch:
        """Reduce between attention and MLP of block `index`; `heads` are those of that attention."""
        return tokens

    def num_kept(self, index: int, now: Count, first: Count) -> Count:
        """Return the tokens after the reduction at block `index`, of `now` before it and `first` at the start."""
        return now

    def num_macs(self, index: int, now: Tensor, num_prefix: int) -> Tensor:
        """Return the multiply-adds of the reduction itself at block `index`, for images of `now` tokens before it."""
        return torch.zeros_like(now)

    def at_progress(self, share: float) -> None:
        """Adapt to the share of training steps done."""

    def losses(self, output: MSViTOutput, teacher: MSViTOutput | None) -> dict[str, Tensor]:
        """Return terms to add to the loss of the task, each with its weight."""
        return {}

    def max_left(self, index: int, grid: ScaleGrid) -> int:
        """Return the largest number of tokens an image can have after block `index`."""
        return self._after(index, grid.num_patches)

    def max_kept(self, index: int, start: Layout) -> int:
        """Return slots that suffice for the batch after block `index`, whatever its masks are, without waiting.

        `num_kept` is nearly linear: a line above it gives a bound for the sum over images from the sum of their tokens.
        """
        level, rise, run = self._line(index, start.grid)
        low = start.grid.num_cells
        beyond = start.token.shape[0] - start.batch * (start.num_prefix + low)  # tokens that all-coarse images lack
        return start.batch * start.num_prefix + (start.batch * level + rise * beyond) // run

    def _line(self, index: int, grid: ScaleGrid) -> tuple[int, int, int]:
        """level, rise, run: of n tokens at most (level + rise * (n - num_cells)) / run are left after block `index`."""
        rate = getattr(self, "rate", None)  # in training it may fall
        key = (index, grid.height, grid.width, grid.fine, grid.coarse, rate)
        if key in self._lines:
            return self._lines[key]
        low, high, step = grid.num_cells, grid.num_patches, grid.k**2 - 1
        after = {n: self._after(index, n) for n in range(low, high + 1, max(1, step))}
        rise, run = after[high] - after[low], max(1, high - low)  # without cells there is one number of tokens
        line = max(after[n] * run - rise * (n - low) for n in after), rise, run
        if not torch.compiler.is_compiling():
            self._lines[key] = line
        return line

    def precompute(self, depth: int, grid: ScaleGrid) -> None:
        """Fill the cache of `_line` for all blocks before torch.compile, which would trace its loop."""
        for index in range(depth):
            self._line(index, grid)

    def _after(self, index: int, first: int) -> int:
        now = first
        for block in range(index + 1):
            now = self.num_kept(block, now, first)
        return now

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.config.items() if value is not None)

    @property
    def words(self) -> str:
        """Class and settings as text, equal for equal reducers."""
        return f"{type(self).__name__}({self.extra_repr()})"


def check_rate(rate: float, lowest: float = 0.0) -> float:
    """Return the share of tokens that stay, or raise ValueError."""
    return check_number("rate", rate, above=0, at_least=lowest or None, at_most=1, example=0.7)


def check_at(at: tuple[int, ...]) -> tuple[int, ...]:
    """Return blocks as a tuple, or raise ValueError unless they rise from 0 on."""
    at = tuple(at) if isinstance(at, tuple | list) else (at,)
    whole = all(type(index) is int and index >= 0 for index in at)
    if not at or not whole or list(at) != sorted(set(at)):
        raise ValueError(f"at is {at}, but must name blocks from 0 on in rising order, such as (3, 6, 9)")
    return at


def check_depth(name: str, at: tuple[int, ...], host: Any) -> None:
    """Raise ValueError unless the host has the blocks `at`."""
    depth = len(host.blocks)
    if max(at) >= depth:
        raise ValueError(
            f"{name} reduces at blocks {at}, but the host has blocks 0 to {depth - 1}; "
            f"pass for example at={stages(depth)}"
        )


def stages(depth: int) -> tuple[int, ...]:
    """Return the blocks at which hosts of any depth are reduced: 3, 6 and 9 of 12."""
    return tuple(sorted({depth // 4, depth // 2, 3 * depth // 4}))


def share_of(count: Count, rate: Ratio) -> Count:
    """Return ceil(rate * count), exactly, for numbers and for tensors."""
    return -(-count * rate[0] // rate[1])


def at_least(count: Count, minimum: Any) -> Count:
    """Return the larger one, for numbers and for tensors."""
    return count.clamp(min=minimum) if isinstance(count, Tensor) else max(count, minimum)


def as_ratio(rate: float, power: int = 1) -> Ratio:
    """Return the fraction that was written: 0.7 is 7/10, and not the nearest binary number."""
    exact = Fraction(str(rate)).limit_denominator(10_000) ** power
    exact = exact.limit_denominator(10**9)  # a count times this still is a whole number of 64 bits
    return exact.numerator, exact.denominator
