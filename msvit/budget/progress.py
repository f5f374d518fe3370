"""Progress of what takes minutes, on stderr: a bar, or lines where that is no terminal.

    note = note_progress(True, "fit_reducer")
    note(0.25, "distance 0.0687")             # fit_reducer: 25%, distance 0.0687, 90 s left
"""

import sys
import time
from collections.abc import Callable

FIRST = 0.1  # share that is done before the time left is shown: the first steps may take longer
Note = Callable[..., None]  # of the share that is done, and words about it


def note_progress(shown: bool, what: str) -> Note:
    """Return a function that shows the share that is done, and the time left."""
    begin = last = time.monotonic()
    shown = shown and sys.stderr is not None
    bar = shown and sys.stderr.isatty()

    def note(done: float, words: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if not shown or (done < 1 and now <= last + (0.2 if bar else 10)):
            return
        last = now
        left = [f"{(now - begin) * (1 - done) / done:.0f} s left"] if done >= FIRST else []
        line = f"{what}: {', '.join([f'{done:.0%}', *filter(None, [words]), *left])}"
        filled = f"\r[{'#' * round(20 * done):.<20}] {line}\033[K" if bar else line
        print(filled, end="" if bar and done < 1 else "\n", file=sys.stderr, flush=True)

    return note
