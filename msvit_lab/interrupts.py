"""Signals that ask a command to end: Ctrl-C, SIGTERM, and SIGUSR1, with which Slurm warns of it.

    with interrupts() as interrupted:     # in a loop: noted, and looked at after each step
        if interrupted():
            raise Interrupted("interrupted at step 12; go on with --resume")     # after saving
    with ending_as_ctrl_c(seen):          # anywhere else: KeyboardInterrupt

Commands then exit with RESUME_CODE. Nothing large is imported here: signals count from the start of a command.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

RESUME_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved but not finished, the same command with --resume goes on
WARNINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Stopped(Exception):  # noqa: N818
    """A run that ended early, with what happened and how to go on."""


class Interrupted(Stopped):
    """A run that was asked to end, and saved: exit code `RESUME_CODE`."""


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Signals are noted, for the end of the step; a second Ctrl-C, a second later or more, stops at once."""
    seen: list[float] = []

    def note(number: int, frame: Any) -> None:
        again = bool(seen) and time.monotonic() > seen[0] + 1  # torchrun passes on at once what the terminal sent
        seen.append(time.monotonic())
        if again and number == signal.SIGINT:  # a cluster repeats its warnings while a large model is saved
            raise KeyboardInterrupt

    with handling(note, signal.SIGINT, *WARNINGS):
        yield lambda: bool(seen)


@contextmanager
def ending_as_ctrl_c(seen: list[int]) -> Iterator[None]:
    """What a scheduler sends before it ends a process raises KeyboardInterrupt, once; Ctrl-C every time.

    `seen` gets the signals that came: libraries written in C may make another exception of one.
    """

    def interrupt(number: int, frame: Any) -> None:
        seen.append(number)
        if number == signal.SIGINT or len(seen) == 1:
            raise KeyboardInterrupt

    with handling(interrupt, signal.SIGINT, *WARNINGS):
        yield


@contextmanager
def handling(handler: Callable[[int, Any], None], *signals: signal.Signals) -> Iterator[None]:
    """Outside the main thread nothing happens: signals are somebody else's there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}
    try:
        for number in signals:
            before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
