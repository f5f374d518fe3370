"""Opening files that may hold anything: plain files only, of a size that fits the memory, images of known formats only.

    read_plain(path, limit=MAX_BYTES)      # bytes; ValueError for a pipe, a device, or gigabytes
    open_image(data)                       # PIL's image, not decoded yet
    decode(data, name)                     # an RGB image, wholly read; BadImage with the name for anything else
    decode_label_map(data, name)           # (h, w) bytes

Every image that msvit reads is opened here. PIL alone would hand PostScript that is called photo.jpg to Ghostscript.
"""

import io
import os
import stat
import struct
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from msvit.types import IGNORE

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # by PIL's names; an ending decides nothing
GREY_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")  # one number per pixel
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
MAX_BYTES = 1 << 29  # of one image
MAX_TEXT = 1 << 26  # of a list of names or splits


class BadImage(ValueError):  # noqa: N818
    """An image that cannot be decoded: which, why, and what to do."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # both: an error crosses from a worker by its arguments
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.name} cannot be read as an image ({self.reason}); "
            f"repair or delete it, or pass skip_bad=True (--skip-bad) to go on without it"
        )


class BadLabelMap(BadImage):
    """A label map that does not fit its image or its classes. `reason` continues the sentence after the name."""

    def __str__(self) -> str:
        return f"{self.name} {self.reason}, or pass skip_bad=True (--skip-bad) to go on without it"


def read_plain(path: str | os.PathLike[str], offset: int = 0, num_bytes: int = -1, limit: int = MAX_BYTES) -> bytes:
    """Bytes of a plain file, by default all. Raise ValueError for anything else, before it is opened."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path} is no plain file but a pipe, a device or a folder; remove it, or put a file there")
    wanted = about.st_size - offset if num_bytes < 0 else num_bytes
    if wanted > limit:
        raise ValueError(f"{path} has {wanted} bytes to be read at once, but {limit} are read at most; make it smaller")
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(max(0, wanted))


def read_lines(path: Path) -> list[str]:
    return read_plain(path, limit=MAX_TEXT).decode().splitlines()


def open_image(data: bytes) -> Image.Image:
    """Raise ValueError for unknown formats and more pixels than PIL.Image.MAX_IMAGE_PIXELS, else what PIL raises."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"{len(data)} bytes in no known image format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{error}; make it smaller, or set PIL.Image.MAX_IMAGE_PIXELS") from None
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and image.width * image.height > most:
        raise ValueError(
            f"it has {image.width}x{image.height} pixels, but {most} are read at most; make it smaller, "
            f"or set PIL.Image.MAX_IMAGE_PIXELS"
        )
    return image


def decode(data: bytes, name: str) -> Image.Image:
    """An RGB image, wholly read: a truncated file fails here and not later."""
    try:
        return as_rgb(open_image(data))
    except BROKEN as error:
        raise BadImage(name, str(error)) from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Eight bits per channel. Images of 16 bits or floats are scaled, where PIL alone would clip them to white."""
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        grey = np.asarray(image, dtype=np.float64)
        top = next((top for top in (1.0, 255.0) if grey.max() <= top and image.mode != "I;16"), 65535.0)
        image = Image.fromarray((grey / top * 255).clip(0, 255).round().astype(np.uint8))
    return image.convert("RGB")


def decode_label_map(data: bytes, name: str) -> UInt8[np.ndarray, "h w"]:
    """The values of a label map, palette indices as they are. Raise BadLabelMap unless one channel, no JPEG, 0-255."""
    try:
        image = open_image(data)
        values = np.asarray(image)
    except BROKEN as error:
        raise BadImage(name, str(error)) from error
    if image.mode not in GREY_MODES:
        raise BadLabelMap(
            name,
            f"has the channels {image.mode}, but a label map has one number per pixel; where colours stand for "
            f"classes, write their numbers into a PNG of one channel",
        )
    if image.format == "JPEG":
        raise BadLabelMap(name, "is a JPEG, which does not keep numbers as they are; write label maps as PNG")
    if values.min() < 0 or values.max() > IGNORE:
        wrong = values.min() if values.min() < 0 else values.max()
        raise BadLabelMap(name, f"holds the value {wrong}, but labels are 0 to 254, {IGNORE} is ignored; renumber it")
    return values.astype(np.uint8)
