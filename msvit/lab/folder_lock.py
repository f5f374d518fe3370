"""One writer per folder, on one machine or on several that share it.

    with locked(folder):              # ValueError with process and host of the holder, if there is one
        ...
    find_holder(folder)               # Holder(pid=4711, host="node7", ...), or None
    remove_unlocked(runs.glob(".decoded-*"))

The lock is a file with the holder's process and host, made in one step by a link: network file systems have that, where
`flock` may do nothing. The holder touches it every 30 seconds. It is void

- at once, if it names a process of this machine that does not exist any more (process numbers are used again: the time
  a process started is compared too), or one from before this machine was started;
- after 10 minutes without a touch, if it was made on another machine, whose processes cannot be seen from here.

A holder whose lock was taken over all the same (a machine that slept) finds out before it writes: `Lock.check`.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from threading import Event, Thread

from msvit.atomic import remove_leftovers, writing_beside

LOCK = ".lock"
TOUCHED = 30.0  # seconds between two touches
VOID = 600.0  # seconds without a touch after which a lock of another machine is void
REMEDY = f"wait for its end, choose another folder, or delete {LOCK} in it if that process is gone"


@dataclass(frozen=True)
class Holder:
    """A process, in a way that two different ones never look the same. What a system cannot say is empty."""

    pid: int
    host: str
    machine: str  # the same after a restart of the machine
    boot: str  # another one after a restart, and in another container
    started: str  # when the process was, in the system's own unit
    token: str  # of this one lock


def this_process() -> Holder:
    pid = os.getpid()
    return Holder(pid, socket.gethostname(), _machine(), _boot(), start_time(pid), token_hex(8))


def _machine() -> str:
    return _read("/etc/machine-id")


def _boot() -> str:
    with suppress(OSError):
        return f"{_read('/proc/sys/kernel/random/boot_id')} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def start_time(pid: int) -> str:
    """Empty where a system does not say, or there is no such process. One that nobody waited for yet has ended."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # a program's name may hold spaces
    return "" if not fields else "ended" if fields[0] in "ZX" else fields[19]


def exists(holder: Holder) -> bool | None:
    """Whether the process is there; None where that cannot be seen from here."""
    here = this_process()
    if holder.host != here.host or os.name == "nt":  # there a signal of 0 would end the process
        return None
    if holder.boot != here.boot:
        return False if holder.machine and holder.machine == here.machine else None
    if holder.started and (started := start_time(holder.pid)):
        return started == holder.started
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return None  # there is a process of this number, perhaps another one


def read_holder(folder: Path) -> Holder | None:
    """Whom the lock names, whether it is void or not."""
    return _read_record(folder / LOCK)


def _read_record(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError):
        return Holder(0, "an unknown host", "", "", "", "")  # not written whole: it goes by its age


def find_holder(folder: Path) -> Holder | None:
    """Who holds the folder; None if nobody does, or the lock is void."""
    holder = read_holder(folder)
    return None if holder is None or is_void(folder, holder) else holder


def is_void(folder: Path, holder: Holder) -> bool:
    there = exists(holder)
    if there is not None:
        return not there
    try:
        return seconds_since_touch(folder) > VOID
    except FileNotFoundError:
        return True


def seconds_since_touch(folder: Path) -> float:
    return time.time() - (folder / LOCK).stat().st_mtime


class Lock:
    """A lock that is held. Touched by a thread, as long as it is there."""

    def __init__(self, folder: Path, holder: Holder) -> None:
        self.folder, self.holder = folder, holder
        self._stop = Event()
        self._thread = Thread(target=self._touch, daemon=True)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        return read_holder(self.folder) == self.holder

    def check(self) -> None:
        """Raise ValueError if another process has taken the folder."""
        if not self.is_held:
            other = read_holder(self.folder)
            words = "was removed" if other is None else f"was taken over by process {other.pid} on {other.host}"
            raise ValueError(f"the lock of {self.folder} {words}: nothing more is written; only one may train there")

    def stop_touching(self) -> None:
        self._stop.set()
        self._thread.join()

    def release(self) -> None:
        self.stop_touching()
        if self.is_held:
            (self.folder / LOCK).unlink(missing_ok=True)

    def _touch(self) -> None:
        while not self._stop.wait(TOUCHED):
            with suppress(OSError):
                if self.is_held:
                    os.utime(self.folder / LOCK)


def check_free(folder: Path) -> Holder | None:
    """Raise ValueError if another process holds the folder. Returns whom a void lock names. Nothing is written."""
    holder = read_holder(folder)
    if holder is None or is_void(folder, holder):
        return holder
    rule = ""
    if exists(holder) is None:
        with suppress(OSError):
            ago = max(0.0, seconds_since_touch(folder))
            rule = f" (its last sign of life was {ago:.0f} s ago; after {VOID:.0f} s without one its lock is void)"
    raise ValueError(f"{folder} is in use by process {holder.pid} on {holder.host}{rule}; {REMEDY}")


def acquire(folder: Path) -> Lock:
    """Raise ValueError if another process holds the folder, which must exist; a void lock is replaced."""
    holder = this_process()
    while True:
        void = check_free(folder)
        with writing_beside(folder / LOCK) as (beside, _):
            if void is not None:
                _take_away(folder, void, beside / "void")
            elif _create(folder / LOCK, json.dumps(asdict(holder)), beside / "new"):
                return Lock(folder, holder)


def _take_away(folder: Path, void: Holder, aside: Path) -> None:
    """Of several that find the same void lock one takes it away, and none takes the new one of another."""
    with suppress(FileNotFoundError):
        os.rename(folder / LOCK, aside)
        if _read_record(aside) != void:
            with suppress(FileExistsError):
                os.link(aside, folder / LOCK)


def _create(path: Path, text: str, beside: Path) -> bool:
    """The file with its text in one step; False if there is one already."""
    beside.write_text(text)
    try:
        os.link(beside, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            return False
    return True


@contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Hold an existing folder."""
    lock = acquire(folder)
    try:
        yield lock
    finally:
        lock.release()


def wait_until_free(folder: Path, seconds: float) -> None:
    """Give a holder that is about to end the time for it."""
    end = time.monotonic() + seconds
    while find_holder(folder) is not None and time.monotonic() < end:
        time.sleep(0.1)


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder that is removed in the end, and by the next call with this prefix where a process could not do that."""
    remove_unlocked(parent.glob(f"{prefix}*"))
    while True:
        folder = parent / f"{prefix}{token_hex(4)}"
        folder.mkdir()
        try:
            lock = acquire(folder)
            break
        except OSError:
            if folder.exists():
                raise
    try:
        yield folder
    finally:
        lock.stop_touching()
        _remove(folder)


def remove_unlocked(folders: Iterable[Path]) -> None:
    """Remove folders that no process holds. One without a lock goes if it is empty: it may be about to get one."""
    for folder in folders:
        with suppress(OSError):
            if (folder / LOCK).exists():
                if find_holder(folder) is None:
                    _remove(folder)
            else:
                remove_leftovers(folder)
                folder.rmdir()


def _remove(folder: Path) -> None:
    """The lock last: a process killed on the way leaves a folder that can be recognised."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()
