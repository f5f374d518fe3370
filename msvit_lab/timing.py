"""Timing: calls in turn, in one run; medians with quartiles, and speed-ups of neighbours in time.

    times = take_turns(calls, sets, device=device, rounds=40, burst=32)   # {"dense": Times, "packed": Times}
    spread(times["packed"].single)                                       # median, low and high quartile
    speed_up(times["dense"].single, times["packed"].single)              # median of the ratios, round by round
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[[Tensor], Any]
MIN_ROUNDS = 4  # however little time there is
BURST = 32  # calls back to back on a GPU: so many that the waits before the first and after the last hardly count
MAX_MESSAGE = 300  # characters of an error's message


class Spread(NamedTuple):
    median: float
    low: float  # first quartile
    high: float  # third quartile

    def rounded(self) -> dict[str, float]:
        """Five digits of each, for JSON."""
        return {name: float(f"{value:.5g}") for name, value in self._asdict().items()}


@dataclass
class Times:
    """Milliseconds of one row, one entry per round."""

    single: list[float] = field(default_factory=list)  # one call and the wait for its result
    burst: list[float] = field(default_factory=list)  # per call, of several with one wait at the end
    error: str | None = None  # that stopped the row, if one did

    @property
    def used(self) -> list[float]:
        """What speed-ups are computed from: calls back to back where they were timed."""
        return self.burst or self.single


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, with all its work on a GPU."""
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - start


def take_turns(
    calls: dict[str, Call], sets: list[Tensor], *, device: torch.device, rounds: int, burst: int = 0,
    seconds: float | None = None,
) -> dict[str, Times]:  # fmt: skip
    """Time every call on the same images in each round, and on other images in the next.

    No call always runs first: each set is timed in one order in one pass over the sets, and in the other in the next.
    With `burst`, each round also times that many calls back to back, over the sets in turn. After `seconds` no further
    round begins, but there are at least four, and one per set. A call that fails stops its own row only.
    """
    times = {name: Times() for name in calls}
    start = time.perf_counter()
    for turn in range(rounds):
        if seconds is not None and turn >= max(MIN_ROUNDS, len(sets)) and time.perf_counter() - start > seconds:
            break
        lap, which = divmod(turn, len(sets))
        for name in list(calls) if (lap + which) % 2 else reversed(list(calls)):
            own = times[name]
            if own.error is not None:
                continue
            try:
                own.single.append(1e3 * clock(partial(calls[name], sets[which]), device))
                if burst:
                    own.burst.append(1e3 * clock(partial(repeat, calls[name], sets, burst), device) / burst)
            except Exception as error:  # of a compiler or a device: any type
                own.error = error_line(error)
    return times


def repeat(call: Call, sets: list[Tensor], num: int) -> None:
    """Calls back to back, over the sets in turn."""
    for turn in range(num):
        call(sets[turn % len(sets)])


def warm_up(call: Call, sets: list[Tensor], passes: int) -> None:
    """Enough calls to compile and to capture, on every set, as some libraries prepare for each new shape."""
    repeat(call, sets, max(3, passes * len(sets)))


def burst_size(device: torch.device, batch: int) -> int:
    """Calls to time back to back: of batches on a GPU. For a single image the latency is what matters."""
    return BURST if device.type == "cuda" and batch > 1 else 0


def time_all(calls: dict[str, Call], sets: list[Tensor], *, passes: int = 1, **how: Any) -> dict[str, list[float]]:
    """Warm up and `take_turns`; the times that speed-ups are computed from. Raise ValueError if a call fails."""
    for call in calls.values():
        warm_up(call, sets, passes)
    times = take_turns(calls, sets, **how)
    for name, own in times.items():
        if own.error is not None:
            raise ValueError(f"{name} cannot be timed here ({own.error}); leave it out, or give a smaller --batch")
    return {name: own.used for name, own in times.items()}


def error_line(error: Exception) -> str:
    """The type of an error and the beginning of its message, on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:MAX_MESSAGE]}" if message else type(error).__name__


def spread(values: list[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median=median, low=low, high=high)


def speed_up(baseline: list[float], own: list[float]) -> Spread:
    """Ratios of the two times of each round: neighbours in time, so that drift cancels."""
    return spread([before / after for before, after in zip(baseline, own, strict=True)])
