"""Decoding the bytes of images and label maps, with the name of the file in every error.

    decode(data, name)                     # an RGB image, wholly read; BadImage with the name for anything else
    decode_label_map(data, name)           # (h, w) bytes
"""

from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from msvit.image_files import BROKEN, as_rgb, open_image, read_plain
from msvit.types import IGNORE

GREY_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")  # one number per pixel
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


def read_lines(path: Path) -> list[str]:
    return read_plain(path, limit=MAX_TEXT).decode().splitlines()


def decode(data: bytes, name: str) -> Image.Image:
    """An RGB image, wholly read: a truncated file fails here and not later."""
    try:
        return as_rgb(open_image(data))
    except BROKEN as error:
        raise BadImage(name, str(error)) from error


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
