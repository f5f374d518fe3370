"""Files that are replaced whole or not at all, and safetensors files with a checksum over every byte.

    with replacing(path) as part:
        part.write_text(...)          # on leaving, takes the place of `path`; if anything failed, nothing is left of it
    check_writable(folder, "choose another --out")
    write_tensors(path, tensors, {"step": "2"})
    read_header(path).metadata, read_header(path).shapes     # without reading any tensor
    read_tensors(path)                                       # Damaged, if one bit is not as it was written

A part lies in a folder of its own beside `path`, whose lock is held as long as the writer lives. What a killed writer
left is removed by the next one, and two writers at once do not disturb each other: the last one wins, whole.

A checksum is against accidents: a bad disk, a cut copy, a number edited by hand. It is no signature: who forges a file
can forge its checksum.
"""

import hashlib
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

try:
    import fcntl
except ImportError:  # a system without POSIX locks: leftovers go by their age
    fcntl = None  # type: ignore[assignment]

CHECKSUM = "checksum"
BLANK = "0" * 64  # what stands in its place while it is computed
LOCK = "lock"
ABANDONED = 3600.0  # seconds after which a leftover without a usable lock counts as one
_STAMP = re.compile(rb'"checksum": ?"([0-9a-f]{64})"')
_CHUNK = 1 << 22
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit


@contextmanager
def replacing(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """Write a file beside `path` that takes its place on leaving.

    `previous`: where the file that is replaced goes. Permissions follow the umask, whatever the writer sets.
    """
    with writing_beside(path) as (folder, mode):
        part = folder / path.name
        yield part
        os.chmod(part, mode)
        with part.open("rb") as file:
            os.fsync(file.fileno())  # on the disk before it takes the old one's place
        if previous is not None and path.exists():
            set_aside(path, previous, folder)
        os.replace(part, path)
        with suppress(OSError):  # where the system can flush a folder, so that names reach the disk too
            number = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


@contextmanager
def writing_beside(path: Path) -> Iterator[tuple[Path, int]]:
    """Make a folder for what is not complete yet; yield it and the permissions that the umask gives to new files."""
    remove_leftovers(path.parent, path.name)
    try:
        folder, lock = claim(path)
    except OSError as error:
        remedy = "make its folder writable, or choose another"
        raise OSError(f"{path} cannot be written ({error.strerror}); {remedy}") from error
    with lock:
        try:
            yield folder, os.fstat(lock.fileno()).st_mode & 0o777
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(path: Path, previous: Path, folder: Path) -> None:
    """Rename a file to `previous`, by a link where there are links, so that `path` exists at every moment."""
    link = folder / "previous"
    try:
        os.link(path, link)
    except OSError:
        link = path
    os.replace(link, previous)


def claim(path: Path) -> tuple[Path, IO[bytes]]:
    """Make a folder beside `path`; return it and its lock file, held until it is closed."""
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
    """Remove what killed writers left beside a file of this name, or beside any file of a folder."""
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


def check_writable(folder: Path, remedy: str) -> None:
    """Raise ValueError unless files can be made in this folder, which is created if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with writing_beside(folder / "anything"):
            pass
    except OSError as error:
        reason = error.strerror or (error.__cause__.strerror if isinstance(error.__cause__, OSError) else error)
        raise ValueError(f"{folder} cannot be written ({reason}); {remedy}") from None


class Damaged(ValueError):  # noqa: N818
    """A file that is not as it was written, with its name and what to do."""


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file."""

    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]


def write_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], previous: Path | None = None
) -> None:
    """Write a file, or replace it whole; `previous`: where the file that was there goes."""
    ready = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    with replacing(path, previous) as part:
        save_file(ready, part, metadata={**metadata, CHECKSUM: BLANK})
        with part.open("r+b") as file:
            start = _in_order(_read_start(file))
            place = _STAMP.search(start)
            assert place is not None
            digest = _digest(start, file).encode()
            file.seek(0)
            file.write(start[: place.start(1)] + digest + start[place.end(1) :])


def read_header(path: Path) -> Header:
    """Read metadata and shapes. Raise Damaged unless the file's checksum is right."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        stamped = metadata.pop(CHECKSUM, None) is not None
        right = stamped and _has_right_checksum(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(f"{path} is truncated or is no safetensors file ({error}); save or copy it again") from None
    if not stamped:
        raise Damaged(
            f"{path} was not written by msvit; load a checkpoint of timm or transformers there, and convert the model: "
            f"msvit.convert(model)"
        )
    if not right:
        raise Damaged(f"{path} is damaged: its checksum is not that of its contents; save or copy it again")
    return Header(metadata, shapes)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file whose header was read before."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(f"{path} is truncated or is no safetensors file ({error}); save or copy it again") from None


def _has_right_checksum(path: Path) -> bool:
    with path.open("rb") as file:
        start = _read_start(file)
        stamp = _STAMP.search(start)
        if stamp is None:
            return False
        blank = start[: stamp.start(1)] + BLANK.encode() + start[stamp.end(1) :]
        return _digest(blank, file) == stamp[1].decode()


def _read_start(file: Any) -> bytes:
    """Read the length and the header, in front of the tensors."""
    length = file.read(8)
    (num,) = struct.unpack("<Q", length)
    if num > _MAX_HEADER:
        raise ValueError(f"its header would have {num} bytes")
    return length + file.read(num)


def _in_order(start: bytes) -> bytes:
    """Sort the metadata, which safetensors writes in any order: equal contents become equal files."""
    header = json.loads(start[8:])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(text) <= len(start) - 8
    return start[:8] + text.ljust(len(start) - 8)


def _digest(start: bytes, file: Any) -> str:
    digest = hashlib.sha256(start)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
