"""Pictures (h, w, 3) uint8: tokens drawn on images, label maps in colour, text below.

    picture = overlay(image, mask, k=2)                    # coarse cells veiled, fine ones with their k x k patches
    picture = colour_by_token(image, owner, fine=16)       # what a reducer has left, each token in its mean colour
    picture = label_picture(labels)                        # a colour for each class, ignored pixels hatched
    picture = with_caption(picture, "103 of 196 tokens", [(icon, "1 coarse token"), (other, "4 fine tokens")])
    row = side_by_side([picture, other])
    save_png(enlarge(picture, 4), "tokens.png")
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64, UInt8
from PIL import Image, ImageDraw, ImageFont

from msvit.saving.file import replacing
from msvit.types import IGNORE

GREY, VEIL = 170.0, 0.6  # coarse cells fade towards this grey by this much: a dark frame shows on the result
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
STRIPE, GREYS = 4, (214, 158)  # px and levels of the stripes of ignored pixels
INK, PAPER = (20, 20, 20), (255, 255, 255)  # of captions
GAP = 8  # px between pictures of a row
LETTERS, LETTER_SIZES = 40, (14, 30)  # per line of a caption, about; px, least and most

# Pascal VOC's palette: the bits of a class go to red, green and blue in turn, the lowest weigh most.
_CLASS = np.arange(256)
_CHANNELS = [sum((_CLASS >> 3 * bit + channel & 1) << 7 - bit for bit in range(3)) for channel in range(3)]
PALETTE = np.stack(_CHANNELS, axis=1).astype(np.uint8)  # (256, 3)


def overlay(image: np.ndarray, mask: np.ndarray, k: int) -> UInt8[np.ndarray, "h w 3"]:
    """Draw a mask (hc, wc), 1 = fine, on an image of any size whose cells have k x k patches.

    Fine cells keep their colours and show their patches, by lines that are dark on light patches and light on dark
    ones; coarse cells fade to grey inside a bold dark frame. So both show on any image.
    """
    if not np.isin(mask, (0, 1)).all():
        wrong = mask[~np.isin(mask, (0, 1))][0]
        raise ValueError(f"mask has {wrong} in it, but 0 is coarse and 1 is fine; threshold it first, as mask > 0.5")
    size, patches = image.shape[:2], (mask.shape[0] * k, mask.shape[1] * k)
    if size[0] < patches[0] or size[1] < patches[1]:
        raise ValueError(
            f"a picture of {size[0]}x{size[1]}px is too small for {patches[0]}x{patches[1]} patches; enlarge it first"
        )
    width = max(1, min(size[0] // patches[0], size[1] // patches[1]) // 16)  # of lines, px
    pixels = image.astype(np.float32)
    luma = pixels @ LUMA

    rows, columns = (_starts(side, num) for side, num in zip(size, patches, strict=True))
    total = np.add.reduceat(np.add.reduceat(luma, rows[:-1], 0), columns[:-1], 1)  # (hf, wf)
    light = _spread(total / (np.diff(rows)[:, None] * np.diff(columns)) > 127.0, size)[..., None]
    line_colour = np.where(light, 0.3 * pixels, 0.3 * pixels + np.float32(0.7 * 255))
    fine = np.where(_lines(size, patches, width, both_ends=False)[..., None], line_colour, pixels)

    veiled = (1 - VEIL) * (0.5 * pixels + 0.5 * luma[..., None]) + VEIL * np.float32(GREY)
    coarse = np.where(_lines(size, mask.shape, width, both_ends=True)[..., None], 0.2 * veiled, veiled)
    return np.where(_spread(mask != 0, size)[..., None], fine, coarse).round().astype(np.uint8)


def colour_by_token(
    image: np.ndarray, owner: np.ndarray, fine: int, size: tuple[int, int] | None = None
) -> UInt8[np.ndarray, "height width 3"]:
    """What is left of an image after a reducer. `owner` (hf, wf) names the token of each fine patch, -1 if it has none.

    All that a token covers gets its mean colour, with lines where another token begins; what was dropped is white.
    The picture is as large as the image, or of `size` (h, w).
    """
    assert (owner.shape[0] * fine, owner.shape[1] * fine) == image.shape[:2], "patches of this image"
    tokens, which = np.unique(owner, return_inverse=True)
    which = which.reshape(owner.shape)
    means = image.reshape(owner.shape[0], fine, owner.shape[1], fine, 3).mean((1, 3))  # (hf, wf, 3)
    total = np.zeros((len(tokens), 3))
    np.add.at(total, which, means)
    colour = total / np.bincount(which.flatten())[:, None]
    colour[tokens < 0] = 255
    pixels, large = (_spread(each, size or image.shape[:2]) for each in (colour[which], which))
    border = np.zeros(large.shape, dtype=bool)
    border[1:] |= large[1:] != large[:-1]
    border[:, 1:] |= large[:, 1:] != large[:, :-1]
    pixels[border] *= 0.6
    return pixels.round().astype(np.uint8)


def label_picture(labels: np.ndarray) -> UInt8[np.ndarray, "h w 3"]:
    """Colour a map of classes (h, w), 0 to 254 or 255 for ignored, which is striped."""
    lowest, highest = labels.min(), labels.max()
    if lowest < 0 or highest > IGNORE:
        found = f"{labels.shape} with {lowest} to {highest}"
        raise ValueError(f"a label map must be (h, w) with classes 0 to {IGNORE}, got {found}")
    rows, columns = (np.arange(side) for side in labels.shape)
    stripes = np.array(GREYS, dtype=np.uint8)[(rows[:, None] + columns) // STRIPE % 2]
    return np.where(labels[..., None] == IGNORE, stripes[..., None], PALETTE[labels])


def css_colour(index: int) -> str:
    """The colour of a class as a CSS background, for a legend; stripes for ignored."""
    if index == IGNORE:
        light, dark = (f"rgb({grey},{grey},{grey})" for grey in GREYS)
        return f"repeating-linear-gradient(-45deg,{light} 0 3px,{dark} 3px 6px)"
    return "#{:02x}{:02x}{:02x}".format(*PALETTE[index])


def with_caption(
    picture: np.ndarray, text: str, legend: Sequence[tuple[np.ndarray, str]] = ()
) -> UInt8[np.ndarray, "height width 3"]:
    """Put a text below a picture, and icons with what each means: in one row if they fit."""
    width = picture.shape[1]
    letter = int(np.clip(width / LETTERS, *LETTER_SIZES))
    font, gap, line = ImageFont.load_default(letter), letter // 2, 2 * letter
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        fits = not lines[-1] or font.getlength(longer) <= width - 2 * gap
        lines = [*lines[:-1], longer] if fits else [*lines, word]
    places, x, y = [], gap, len(lines) * (letter + gap) + gap
    for _, words in legend:
        wide = line + gap + int(font.getlength(words)) + 2 * gap
        if x > gap and x + wide > width:
            x, y = gap, y + line + gap
        places.append((x, y))
        x += wide
    strip = Image.new("RGB", (width, y + line + gap if legend else y), PAPER)
    draw = ImageDraw.Draw(strip)
    for index, words in enumerate(lines):
        draw.text((gap, gap + index * (letter + gap) + letter / 2), words, INK, font, anchor="lm")
    for (x, y), (icon, words) in zip(places, legend, strict=True):
        strip.paste(Image.fromarray(icon).resize((line, line), Image.Resampling.LANCZOS), (x, y))
        draw.text((x + line + gap, y + letter), words, INK, font, anchor="lm")
    return np.concatenate([picture, np.asarray(strip)])


def side_by_side(pictures: Sequence[np.ndarray]) -> UInt8[np.ndarray, "height width 3"]:
    """Pictures in a row, upper edges in line, with white between and below them."""
    height = max(len(picture) for picture in pictures)
    parts = [np.pad(each, ((0, height - len(each)), (0, GAP), (0, 0)), constant_values=255) for each in pictures]
    return np.concatenate(parts, axis=1)[:, :-GAP]


def enlarge(picture: np.ndarray, scale: int) -> np.ndarray:
    """`scale` times as large, (h, w, ...) -> (scale h, scale w, ...); pixels stay square."""
    return picture.repeat(scale, 0).repeat(scale, 1)


def image_bytes(picture: np.ndarray, kind: str = "PNG") -> bytes:
    """A picture as the content of a file: exact as PNG, a tenth of the size as WEBP."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format=kind, quality=85)  # PNG has none
    return buffer.getvalue()


def save_png(picture: np.ndarray, path: Path) -> Path:
    """Write a picture. The file is replaced whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(image_bytes(picture))
    return path


def _starts(side: int, num: int) -> Int64[np.ndarray, " num1"]:
    """Where each of `num` nearly equal parts of `side` px begins, and where the last ends."""
    return np.arange(num + 1) * side // num


def _spread(parts: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """The value of its part for every pixel, (rows, columns, ...) -> (h, w, ...)."""
    high, wide = (np.diff(_starts(side, num)) for side, num in zip(size, parts.shape[:2], strict=True))
    return parts.repeat(high, 0).repeat(wide, 1)


def _lines(size: tuple[int, ...], parts: tuple[int, ...], width: int, both_ends: bool) -> Bool[np.ndarray, "h w"]:
    """True on the first `width` px of each part, and on the last ones of the picture, or of each part (`both_ends`)."""
    found = []
    for side, num in zip(size, parts, strict=True):
        starts, px = _starts(side, num), np.arange(side)
        part = np.arange(num).repeat(np.diff(starts))
        ends = starts[part + 1] if both_ends else side
        found.append((px - starts[part] < width) | (ends - px <= width))
    return found[0][:, None] | found[1]
