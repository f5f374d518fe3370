"""Label maps as pictures: a colour for each class, the same on every page.

    picture = label_picture(labels, scale=4)       # (h, w) classes -> (4 h, 4 w, 3) uint8; ignored pixels are hatched
    colour_of(15)                                  # (192, 128, 128): Pascal VOC's persons
    css_colour(15), css_colour(IGNORE)             # for a legend beside it
"""

import numpy as np
from jaxtyping import UInt8

from msvit.types import IGNORE

STRIPE = 4  # px of an ignored area's stripes
GREYS = (214, 158)


def colour_of(index: int) -> tuple[int, int, int]:
    """Pascal VOC's palette: the bits of the class go to red, green and blue in turn, the lowest weigh most.

    So class 0 is black, 256 classes have 256 colours, and no list of them is needed.
    """
    red, green, blue = (sum((index >> 3 * bit + channel & 1) << 7 - bit for bit in range(3)) for channel in range(3))
    return red, green, blue


PALETTE = np.array([colour_of(index) for index in range(256)], dtype=np.uint8)


def css_colour(index: int) -> str:
    """The same as CSS's background, stripes included."""
    if index == IGNORE:
        light, dark = (f"rgb({grey},{grey},{grey})" for grey in GREYS)
        return f"repeating-linear-gradient(-45deg,{light} 0 3px,{dark} 3px 6px)"
    return "#{:02x}{:02x}{:02x}".format(*colour_of(index))


def label_picture(labels: np.ndarray, scale: int = 1) -> UInt8[np.ndarray, "height width 3"]:
    """Colour a map of classes (h, w), 0 to 254 or 255 for ignored, `scale` times enlarged."""
    if labels.ndim != 2 or not labels.size or labels.min() < 0 or labels.max() > IGNORE:
        found = f"{labels.min()} to {labels.max()}" if labels.size else "nothing"
        raise ValueError(f"a label map must be (h, w) with classes 0 to {IGNORE}, got {labels.shape} with {found}")
    large = labels.repeat(scale, 0).repeat(scale, 1)  # (scale h, scale w)
    rows, columns = (np.arange(side) for side in large.shape)
    stripes = np.array(GREYS, dtype=np.uint8)[(rows[:, None] + columns) // STRIPE % 2]
    return np.where(large[..., None] == IGNORE, stripes[..., None], PALETTE[large])
