"""Files that are replaced whole or not at all.

    with replacing(path) as part:
        part.write_text(...)          # on leaving, takes the place of `path`; if anything failed, nothing is left of it
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    part = path.with_name(f".{path.name}.part")  # always the same: what a killed process left is overwritten
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())  # on the disk before it takes the old one's place
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
