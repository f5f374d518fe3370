"""Opening files that may hold anything: plain files only, of a size that fits the memory, images of known formats only.

    open_image(data)                       # PIL's image, not decoded yet
    read_plain(path, limit=MAX_BYTES)      # bytes; ValueError for a pipe, a device, or gigabytes

Every image that msvit reads is opened here. PIL alone would hand PostScript that is called photo.jpg to Ghostscript.
"""

import io
import os
import stat
from pathlib import Path

from PIL import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # by PIL's names; an ending decides nothing
MAX_BYTES = 1 << 29  # of one image
MAX_TEXT = 1 << 26  # of a list of names or splits


def open_image(data: bytes) -> Image.Image:
    """Raise what PIL raises, or ValueError if there are more pixels than PIL.Image.MAX_IMAGE_PIXELS."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{error}; make it smaller, or set PIL.Image.MAX_IMAGE_PIXELS") from None
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and image.width * image.height > most:
        raise ValueError(
            f"it has {image.width}x{image.height} pixels, but {most} are read at most; make it smaller, "
            f"or set PIL.Image.MAX_IMAGE_PIXELS"
        )
    return image


def read_plain(path: str | os.PathLike[str], offset: int = 0, num_bytes: int = -1, limit: int = MAX_BYTES) -> bytes:
    """Bytes of a plain file, by default all. Raise ValueError for what is none, before it is opened."""
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
    """The lines of a text."""
    return read_plain(path, limit=MAX_TEXT).decode().splitlines()
