"""Files that are replaced whole or not at all.

    with replacing(path) as part:
        part.write_text(...)          # on leaving, takes the place of `path`; if anything failed, nothing is left of it
    check_writable(folder, "choose another --out")

The part lies in a folder of its own beside `path`, whose lock is held as long as the writer lives. What a killed writer
left is removed by the next one, and two writers at once do not disturb each other: the last one wins, whole.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import IO

try:
    import fcntl
except ImportError:  # a system without POSIX locks: leftovers go by their age
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"
ABANDONED = 3600.0  # seconds after which a leftover without a usable lock counts as one


@contextmanager
def replacing(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """`previous`: where the file that is replaced goes. Permissions follow the umask, whatever the writer sets."""
    with writing_beside(path) as (folder, mode):
        part = folder / path.name
        yield part
        os.chmod(part, mode)
        with part.open("rb") as file:
            os.fsync(file.fileno())  # on the disk before it takes the old one's place
        if previous is not None and path.exists():
            set_aside(path, previous, folder)
        os.replace(part, path)
        sync_folder(path.parent)


@contextmanager
def writing_beside(path: Path) -> Iterator[tuple[Path, int]]:
    """A folder of its own for what is not complete yet, and the permissions that the umask gives to new files."""
    remove_leftovers(path.parent, path.name)
    try:
        folder, lock = claim(path)
    except OSError as error:
        raise unwritable(path, error, "make its folder writable, or choose another") from error
    with lock:
        try:
            yield folder, os.fstat(lock.fileno()).st_mode & 0o777
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(path: Path, previous: Path, folder: Path) -> None:
    """The file under a second name, so that there is one under the first at every moment; where links exist."""
    link = folder / "previous"
    try:
        os.link(path, link)
    except OSError:
        link = path
    os.replace(link, previous)


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that names reach the disk too, where the system can do that."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def claim(path: Path) -> tuple[Path, IO[bytes]]:
    """A new folder beside `path`, and its lock file, held until it is closed."""
    while True:
        folder = path.with_name(f".{path.name}.{token_hex(4)}.part")
        folder.mkdir()
        try:
            lock = (folder / LOCK).open("wb")
        except FileNotFoundError:  # another writer took it for a leftover
            continue
        hold(lock, wait=True)
        if (folder / LOCK).exists():
            return folder, lock
        lock.close()


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """What killed writers left beside a file of this name, or beside any file of a folder."""
    for part in folder.glob(f".{'*' if name is None else escape(name)}.????????.part"):
        with suppress(OSError):
            if not (part / LOCK).exists():
                part.rmdir()  # killed before there was a lock; not empty: its writer has just made one
                continue
            with (part / LOCK).open("r+b") as lock:
                if hold(lock, wait=False):
                    shutil.rmtree(part, ignore_errors=True)


def hold(lock: IO[bytes], wait: bool) -> bool:
    """Take a lock, if it is free. On systems without locks, an old file counts as free."""
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return os.fstat(lock.fileno()).st_mtime < time.time() - ABANDONED


def unwritable(path: Path, error: OSError, remedy: str) -> OSError:
    return OSError(f"{path} cannot be written ({error.strerror}); {remedy}")


def check_writable(folder: Path, remedy: str) -> None:
    """Raise ValueError unless files can be made in this folder, which is created if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with writing_beside(folder / "anything"):
            pass
    except OSError as error:
        reason = error.strerror or (error.__cause__.strerror if isinstance(error.__cause__, OSError) else error)
        raise ValueError(f"{folder} cannot be written ({reason}); {remedy}") from None
