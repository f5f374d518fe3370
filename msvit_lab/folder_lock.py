"""One writer per folder, on one machine or on several that share it.

    with locked(folder):              # ValueError with process and host of the holder, if there is one
        ...
    find_holder(folder)               # Holder(pid=4711, host="node7", ...), or None
    with temporary_folder(runs, ".decoded-") as folder:
        ...                           # removed in the end; if this process is killed, by the next call

The lock is a file with the holder's process and host, made in one step by a link: network file systems have that, while
their `flock` (and so `filelock`) may do nothing. The holder touches it every 30 seconds. It is void

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from tempfile import mkdtemp
from threading import Event, Thread

from msvit.saving.file import writing_beside

LOCK = ".lock"
TOUCHED = 30.0  # seconds between two touches
VOID = 600.0  # seconds without a touch after which a lock of another machine is void


@dataclass(frozen=True)
class Holder:
    """A process, in a way that two different ones never look the same. What a system does not report is empty."""

    pid: int
    host: str
    machine: str  # the same after a restart of the machine
    boot: str  # another one after a restart, and in another container
    started: str  # when the process was, in the system's own unit
    token: str  # of this one lock


def this_process() -> Holder:
    pid, boot = os.getpid(), ""
    with suppress(OSError):
        boot = f"{_read('/proc/sys/kernel/random/boot_id')} {os.readlink('/proc/self/ns/pid')}"
    return Holder(pid, socket.gethostname(), _read("/etc/machine-id"), boot, start_time(pid), token_hex(8))


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def start_time(pid: int) -> str:
    """Empty where a system does not report it, or there is no such process; "ended" for one not yet waited for."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # a program's name may hold spaces
    return "" if not fields else "ended" if fields[0] in "ZX" else fields[19]


def exists(holder: Holder) -> bool | None:
    """Whether the process exists; None where that cannot be seen from here."""
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


def read_holder(path: Path) -> Holder | None:
    """The holder that a lock file names, whether it is void or not."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError):
        return Holder(0, "an unknown host", "", "", "", "")  # not written whole: its age decides


def find_holder(folder: Path) -> Holder | None:
    """The process that holds the folder; None if there is no lock, or it is void."""
    holder = read_holder(folder / LOCK)
    return None if holder is None or is_void(folder / LOCK, holder) else holder


def is_void(path: Path, holder: Holder) -> bool:
    there = exists(holder)
    return seconds_since_touch(path) > VOID if there is None else not there


def seconds_since_touch(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


class Lock:
    """A lock that is held, and touched by a thread until it is released."""

    def __init__(self, folder: Path, holder: Holder) -> None:
        self.folder, self.holder = folder, holder
        self._stop = Event()
        self._thread = Thread(target=self._touch, daemon=True)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        return read_holder(self.folder / LOCK) == self.holder

    def check(self) -> None:
        """Raise ValueError if another process has taken the folder."""
        if not self.is_held:
            other = read_holder(self.folder / LOCK)
            words = "was removed" if other is None else f"was taken over by process {other.pid} on {other.host}"
            raise ValueError(f"the lock of {self.folder} {words}: nothing more is written; only one may train there")

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        if self.is_held:
            (self.folder / LOCK).unlink(missing_ok=True)

    def _touch(self) -> None:
        while not self._stop.wait(TOUCHED):
            with suppress(OSError):
                if self.is_held:
                    os.utime(self.folder / LOCK)


def check_free(folder: Path) -> Holder | None:
    """Raise ValueError if another process holds the folder. Returns the holder of a void lock. Nothing is written."""
    holder = read_holder(folder / LOCK)
    if holder is None or is_void(folder / LOCK, holder):
        return holder
    rule = ""
    if exists(holder) is None:
        ago = max(0.0, seconds_since_touch(folder / LOCK))
        rule = f" (its last sign of life was {ago:.0f} s ago; after {VOID:.0f} s without one its lock is void)"
    raise ValueError(
        f"{folder} is in use by process {holder.pid} on {holder.host}{rule}; wait for its end, choose another folder, "
        f"or delete {LOCK} in it if that process is gone"
    )


def acquire(folder: Path) -> Lock:
    """Raise ValueError if another process holds the folder, which must exist; a void lock is replaced."""
    holder = this_process()
    while True:
        void = check_free(folder)
        with writing_beside(folder / LOCK) as (beside, _):
            if void is not None:
                _take_away(folder / LOCK, void, beside / "claim")
            elif _create(folder / LOCK, json.dumps(asdict(holder)), beside / "new"):
                return Lock(folder, holder)


def _take_away(path: Path, void: Holder, beside: Path) -> None:
    """Remove a void lock, if it is still there. Of several that find it, one at a time may: who holds its claim.

    Without that, one that is late would remove the new lock of another, if only until it sees its error.
    """
    claim = path.with_name(f"{path.name}-{void.token}")
    if _create(claim, json.dumps(asdict(this_process())), beside):
        if read_holder(path) == void:
            path.unlink(missing_ok=True)
        claim.unlink(missing_ok=True)
        return
    other = read_holder(claim)
    if other is not None and is_void(claim, other):  # killed while it held the claim
        _take_away(claim, other, beside)
    else:
        time.sleep(0.01)


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
    """Wait for a holder that is about to end."""
    end = time.monotonic() + seconds
    while find_holder(folder) is not None and time.monotonic() < end:
        time.sleep(0.1)


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A locked folder that is removed in the end. Those of processes that are gone are removed first."""
    for left in parent.glob(f"{prefix}*"):
        with suppress(ValueError, OSError), locked(left):  # ValueError: its process is there
            shutil.rmtree(left, ignore_errors=True)
    while True:
        folder = Path(mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = acquire(folder)
            break
        except ValueError:  # another process took it for one that was left, and removes it
            continue
        except OSError:
            if folder.exists():
                raise
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
