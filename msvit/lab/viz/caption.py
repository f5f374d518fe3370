"""A line of text and a legend below a picture.

    picture = with_caption(picture, "103 of 196 tokens (53 %)", [(icon, "1 coarse token"), (other, "4 fine tokens")])
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

INK, PAPER = (20, 20, 20), (255, 255, 255)
LETTERS = 40  # a line has about so many
SIZES = (14, 30)  # px of a letter, least and most


def with_caption(
    picture: np.ndarray, text: str, legend: Sequence[tuple[np.ndarray, str]] = ()
) -> UInt8[np.ndarray, "height width 3"]:
    """Put a text below a picture (h, w, 3) uint8, and icons with what each means: in one row if there is room."""
    width = picture.shape[1]
    letter = int(np.clip(width / LETTERS, *SIZES))
    font, gap, line = ImageFont.load_default(letter), letter // 2, 2 * letter
    lines = wrapped(text, font, width - 2 * gap)
    top = len(lines) * (letter + gap) + gap  # of the legend
    wide = [line + gap + int(font.getlength(words)) + 2 * gap for _, words in legend]
    places, x, y = [], gap, top
    for each in wide:
        if x > gap and x + each > width:
            x, y = gap, y + line + gap
        places.append((x, y))
        x += each
    strip = Image.new("RGB", (width, y + line + gap if legend else top), PAPER)
    draw = ImageDraw.Draw(strip)
    for index, words in enumerate(lines):
        draw.text((gap, gap + index * (letter + gap) + letter / 2), words, INK, font, anchor="lm")
    for (x, y), (icon, words) in zip(places, legend, strict=True):
        strip.paste(Image.fromarray(icon).resize((line, line), Image.Resampling.LANCZOS), (x, y))
        draw.text((x + line + gap, y + letter), words, INK, font, anchor="lm")
    return np.concatenate([picture, np.asarray(strip)])


def wrapped(text: str, font: Any, width: int) -> list[str]:
    """The text in lines of at most `width` px; a word that is longer has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
