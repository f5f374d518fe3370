"""Clock: calls in turn, in one run; medians with quartiles, and speed-ups of neighbours in time.

    times = take_turns(calls, sets, device=device, rounds=40, burst=8)   # {"dense": Times, "packed": Times}
    spread(times["packed"].single)                                       # median, low and high quartile
    speed_up(times["dense"].single, times["packed"].single)              # median of the ratios, round by round
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[[Tensor], Any]
MIN_ROUNDS = 4  # however little time there is
BURST = 8  # calls back to back on a GPU
WORDS = 300  # characters of an error's message


class Spread(NamedTuple):
    median: float
    low: float  # first quartile
    high: float  # third quartile


@dataclass
class Times:
    """Milliseconds of one row, one entry a round."""

    single: list[float] = field(default_factory=list)  # one call, waited for
    burst: list[float] = field(default_factory=list)  # a call among many that are waited for together
    trouble: str | None = None  # why the row stopped, if it did


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, all of it: on a GPU the work is waited for."""
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - start


def in_turn(names: Iterable[str], turn: int) -> list[str]:
    """The order of a round: forwards in one, backwards in the next, so that nobody always runs first."""
    return list(names) if turn % 2 else list(reversed(list(names)))


def take_turns(
    calls: dict[str, Call],
    sets: list[Tensor],
    *,
    device: torch.device,
    rounds: int,
    burst: int = 0,
    seconds: float | None = None,
) -> dict[str, Times]:
    """Time every call on the same images in each round, and on other images in the next.

    Each set meets one order in one pass over the sets and the other in the next. With `burst`, each round also times
    that many calls back to back, over the sets in turn. After `seconds` no further round begins, but there are at least
    four, and one for each set. A call that fails stops its own row only.
    """
    times = {name: Times() for name in calls}
    start = time.perf_counter()
    for turn in range(rounds):
        if seconds is not None and turn >= max(MIN_ROUNDS, len(sets)) and time.perf_counter() - start > seconds:
            break
        lap, which = divmod(turn, len(sets))
        for name in in_turn(calls, lap + which):
            own = times[name]
            if own.trouble is not None:
                continue
            try:
                own.single.append(1e3 * clock(partial(calls[name], sets[which]), device))
                if burst:
                    own.burst.append(1e3 * clock(partial(back_to_back, calls[name], sets, burst), device) / burst)
            except Exception as error:  # whatever a compiler or a device may say
                own.trouble = in_words(error)
    return times


def burst_of(device: torch.device, batch: int) -> int:
    """Calls to time back to back: of batches on a GPU. A single image is about how long one waits for it."""
    return BURST if device.type == "cuda" and batch > 1 else 0


def all_timed(times: dict[str, Times]) -> dict[str, list[float]]:
    """Milliseconds that speed-ups are from, back to back where calls were timed so; refuses if one could not be."""
    for name, own in times.items():
        if own.trouble is not None:
            raise ValueError(f"{name} cannot be timed here ({own.trouble}); leave it out, or give a smaller --batch")
    return {name: own.burst or own.single for name, own in times.items()}


def back_to_back(call: Call, sets: list[Tensor], num: int) -> None:
    for turn in range(num):
        call(sets[turn % len(sets)])


def in_words(error: Exception) -> str:
    """The kind of an error and the beginning of what it says, on one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:WORDS]}" if said else type(error).__name__


def spread(values: list[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median=median, low=low, high=high)


def speed_up(baseline: list[float], own: list[float]) -> Spread:
    """Ratios of the two times of each round: neighbours in time, so that drift cancels."""
    return spread([before / after for before, after in zip(baseline, own, strict=True)])
