"""Safetensors files and JSON texts with a checksum over every byte: what was damaged is not read.

    write_tensors(path, tensors, {"step": "2"})
    read_header(path).about, read_header(path).shapes     # without reading any tensor
    read_tensors(path)                                    # Damaged, if one bit is not as it was written
    text = with_checksum(values)                          # JSON
    check_text(path, text.encode(), unchecked=frozenset())

A checksum is against accidents: a bad disk, a cut copy, a number edited by hand. It is no signature: who forges a file
can forge its checksum. Files of earlier versions have none and are read without.
"""

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from msvit.atomic import replacing

CHECKSUM = "checksum"
BLANK = "0" * 64  # what stands in its place while it is computed
_STAMP = re.compile(rb'"checksum": ?"([0-9a-f]{64})"')
_CHUNK = 1 << 22
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit


class Damaged(ValueError):  # noqa: N818
    """A file that is not as it was written, with its name and what to do."""


@dataclass(frozen=True)
class Header:
    """The header of a file. `checked`: it has a checksum, which was right."""

    about: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    checked: bool


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str], previous: Path | None = None) -> None:
    """Replaced whole or not at all; `previous`: where the file that was there goes."""
    ready = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    with replacing(path, previous) as part:
        save_file(ready, part, metadata={**about, CHECKSUM: BLANK})
        with part.open("r+b") as file:
            start = _in_order(_read_start(file))
            place = _STAMP.search(start)
            assert place is not None
            digest = _digest(start, file).encode()
            file.seek(0)
            file.write(start[: place.start(1)] + digest + start[place.end(1) :])


def read_header(path: Path, unchecked: frozenset[str] = frozenset()) -> Header:
    """Raise Damaged unless the file's checksum is right.

    A file without one is of an earlier version, whose metadata has only the keys in `unchecked`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        checked = CHECKSUM in about
        right = _has_right_checksum(path) if checked else about.keys() <= unchecked
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(f"{path} is truncated or is no safetensors file ({error}); save or copy it again") from None
    if not right:
        raise Damaged(f"{path} is damaged: its checksum is not that of its contents; save or copy it again")
    about.pop(CHECKSUM, None)
    return Header(about, shapes, checked)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file whose header was read before."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(f"{path} is truncated or is no safetensors file ({error}); save or copy it again") from None


def with_checksum(values: dict[str, Any]) -> str:
    """As JSON, the checksum of its text last."""
    text = json.dumps({**values, CHECKSUM: BLANK}, indent=2)
    head, _, tail = text.rpartition(BLANK)
    return f"{head}{hashlib.sha256(text.encode()).hexdigest()}{tail}"


def check_text(path: Path, text: bytes, unchecked: frozenset[str]) -> None:
    """Raise Damaged unless a JSON text's checksum is right, or it is one of an earlier version with these keys."""
    values = json.loads(text)
    if CHECKSUM in values:
        blank, num = _STAMP.subn(lambda found: found[0].replace(found[1], BLANK.encode()), text)
        right = num == 1 and hashlib.sha256(blank).hexdigest() == values[CHECKSUM]
    else:
        right = values.keys() <= unchecked
    if not right:
        raise Damaged(f"{path} is damaged or was edited: its checksum is not that of its text; save or copy it again")


def _has_right_checksum(path: Path) -> bool:
    with path.open("rb") as file:
        start = _read_start(file)
        found = _STAMP.search(start)
        if found is None:
            return False
        blank = start[: found.start(1)] + BLANK.encode() + start[found.end(1) :]
        return _digest(blank, file) == found[1].decode()


def _read_start(file: Any) -> bytes:
    """The length and the header, in front of the tensors."""
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


def as_tuples(value: Any) -> Any:
    """JSON has no tuples."""
    if isinstance(value, dict):
        return {key: as_tuples(v) for key, v in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value
