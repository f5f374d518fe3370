"""Image files that may hold anything: plain files only, of a size that fits the memory, known formats only.

    read_plain(path, limit=MAX_BYTES)      # bytes; ValueError for a pipe, a device, or gigabytes
    open_image(data)                       # PIL's image, not decoded yet
    as_rgb(image)                          # eight bits per channel
    read_image(path)                       # all of it: an RGB image, wholly read
    images_below("photos/")                # the paths of all images in a folder and those inside it
    read_folder("photos/")                 # (path, image) of each that can be read

Every image that msvit reads is opened here. PIL alone would hand PostScript that is called photo.jpg to Ghostscript.
"""

import io
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from msvit.checks import shown, warn

ImageInput = str | os.PathLike[str] | Image.Image
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # by PIL's names; an ending decides nothing
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
MAX_BYTES = 1 << 29  # of one image
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # of files that are looked for in folders
DRAWN = (".tokens.png", ".reduced.png", ".zoom.png", ".segmentation.png", ".labels.png")  # what `msvit viz` writes


def read_plain(path: str | os.PathLike[str], offset: int = 0, num_bytes: int = -1, limit: int = MAX_BYTES) -> bytes:
    """Read bytes of a plain file, by default all. Raise ValueError for anything else, before it is opened."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no plain file but a folder, a pipe or a device; give a file")
    wanted = status.st_size - offset if num_bytes < 0 else num_bytes
    if wanted > limit:
        raise ValueError(f"{path} has {wanted} bytes to be read at once, but {limit} are read at most; make it smaller")
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(max(0, wanted))


def open_image(data: bytes) -> Image.Image:
    """Open an image of a known format, of at most PIL.Image.MAX_IMAGE_PIXELS, or raise ValueError."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"{len(data)} bytes in no known image format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{error}; make it smaller, or set PIL.Image.MAX_IMAGE_PIXELS") from None
    max_pixels = Image.MAX_IMAGE_PIXELS
    if max_pixels is not None and image.width * image.height > max_pixels:
        raise ValueError(
            f"it has {image.width}x{image.height} pixels, but {max_pixels} are read at most; make it smaller, "
            f"or set PIL.Image.MAX_IMAGE_PIXELS"
        )
    return image


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert to eight bits per channel. Images of 16 bits or floats are scaled, where PIL would clip them to white."""
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        grey = np.asarray(image, dtype=np.float64)
        top = next((top for top in (1.0, 255.0) if grey.max() <= top and image.mode != "I;16"), 65535.0)
        image = Image.fromarray((grey / top * 255).clip(0, 255).round().astype(np.uint8))
    return image.convert("RGB")


def read_image(path: str | os.PathLike[str], upright: bool = False) -> Image.Image:
    """Read an RGB image wholly; raise ValueError that names the file for anything else.

    `upright`: turned as its EXIF orientation says, for people. Models are trained on pixels as they lie in the file.
    """
    try:
        with open_image(read_plain(path)) as image:
            return as_rgb(ImageOps.exif_transpose(image) if upright else image)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give the path of an image or a folder") from None
    except BROKEN as error:
        raise ValueError(f"{path} cannot be read as an image ({error}); give a JPEG, PNG or WebP") from None


def open_input(image: ImageInput) -> Image.Image:
    """Return an RGB image. Raise ValueError for what is neither a path nor an image, or cannot be read."""
    if isinstance(image, Image.Image):
        return as_rgb(image)
    if not isinstance(image, str | os.PathLike):
        raise ValueError(f"an image is {shown(image)}, but must be a path or a PIL image; call model(...) for tensors")
    return read_image(image)


def images_below(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the image files in a folder and those inside it, sorted; none hidden or drawn by `msvit viz`."""
    below = sorted(map(Path, walk(folder)))
    paths = [p for p in below if p.suffix.lower() in ENDINGS and p.name[0] != "." and not p.name.endswith(DRAWN)]
    if not paths:
        raise ValueError(f"{folder} has no images in it ({', '.join(ENDINGS)}); give files, or a folder with some")
    return paths


def read_folder(
    folder: str | os.PathLike[str], order: Callable[[list[Path]], list[Path]] = list
) -> Iterator[tuple[Path, Image.Image]]:
    """Yield path and image of all in a folder and those inside it; after the last warn of those that cannot be read."""
    errors: list[ValueError] = []
    for path in order(paths := images_below(folder)):
        try:
            image = read_image(path)
        except ValueError as error:
            errors.append(error)
        else:
            yield path, image
    if len(errors) == len(paths):
        raise ValueError(f"none of the {len(paths)} images of {folder} can be read; the first: {errors[0]}")
    if errors:
        warn(f"{len(errors)} of {len(paths)} images were left out; the first: {errors[0]}")


def walk(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield every file below a folder, links followed after the folders beside them; each folder is entered once."""
    entered: set[str] = set()
    for here, inside, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(here)) in entered:
            inside.clear()
            continue
        entered.add(real)
        inside.sort(key=lambda name: (os.path.islink(os.path.join(here, name)), name))
        yield from (os.path.join(here, file) for file in files)
