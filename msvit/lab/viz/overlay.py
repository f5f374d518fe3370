"""Masks drawn on their images: one sees where tokens were spent.

    picture = overlay(image, mask, coarse=32, fine=16)             # (h, w, 3) uint8, as the image
    picture = overlay(small, mask, coarse=16, fine=8, scale=4)     # four times as large, pixels kept square
    picture = overlay_photo(photo, mask, k=2)                      # a photograph of any size, its cells k x k patches
    picture = colour_by_token(image, owner, fine=16)               # what a reducer has left of the image
    save_png(contact_sheet([picture, ...], columns=4), "masks.png")
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8

from msvit.atomic import replacing
from msvit.types import check_divides, check_scales

GREY, VEIL = 170.0, 0.6  # coarse cells fade towards a grey, by so much: from there a dark frame always shows
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)


def overlay(
    image: np.ndarray, mask: np.ndarray, coarse: int, fine: int, scale: int = 1
) -> UInt8[np.ndarray, "height width 3"]:
    """Draw a mask (hc, wc), 1 = fine, on its image (h, w, 3) uint8, `scale` times enlarged.

    Fine cells keep their colours and show their k x k patches, by lines that are dark on light patches and light on
    dark ones; coarse cells fade to grey inside a bold dark frame. So both show on any image.
    """
    _check(image, mask, coarse, fine, scale)
    return overlay_photo(image.repeat(scale, 0).repeat(scale, 1), mask, coarse // fine)


def overlay_photo(photo: np.ndarray, mask: np.ndarray, k: int) -> UInt8[np.ndarray, "height width 3"]:
    """Draw a mask (hc, wc) on a photograph (h, w, 3) uint8 of any size, whose cells have k x k patches."""
    _check_image(photo)
    _check_mask(mask)
    pixels = photo.astype(np.float32)
    patches = (mask.shape[0] * k, mask.shape[1] * k)
    if photo.shape[0] < patches[0] or photo.shape[1] < patches[1]:
        raise ValueError(
            f"a picture of {photo.shape[0]}x{photo.shape[1]}px is too small for {patches[0]}x{patches[1]} patches; "
            f"enlarge it first"
        )
    width = max(1, min(photo.shape[0] // patches[0], photo.shape[1] // patches[1]) // 16)  # of lines, px
    is_fine = _spread(mask != 0, pixels)
    drawn_fine = np.where(_grid(pixels, patches, width)[..., None], _contrast(pixels, patches), pixels)
    veiled = _veiled(pixels)
    drawn_coarse = np.where(_frames(pixels, mask.shape, width)[..., None], 0.2 * veiled, veiled)
    return np.where(is_fine[..., None], drawn_fine, drawn_coarse).round().astype(np.uint8)


def colour_by_token(
    image: np.ndarray, owner: np.ndarray, fine: int, scale: int = 1, size: tuple[int, int] | None = None
) -> UInt8[np.ndarray, "height width 3"]:
    """What is left of an image after a reducer. `owner` (hf, wf) names the token of each fine patch, -1 if it has none.

    All that a token covers gets its mean colour, with lines where another token begins; what was dropped is white.
    The picture is `scale` times as large as the image, or of `size` (h, w).
    """
    _check_image(image)
    patches = (image.shape[0] // fine, image.shape[1] // fine)
    check_divides(image.shape[0], image.shape[1], fine)
    if owner.shape != patches:
        raise ValueError(
            f"owner is {owner.shape}, but an image of {image.shape[0]}x{image.shape[1]}px has {patches} patches "
            f"of {fine}px; give tokens.layout.owner[i] in that shape"
        )
    tokens, which = np.unique(owner, return_inverse=True)
    which = which.reshape(owner.shape)
    means = image.reshape(patches[0], fine, patches[1], fine, 3).mean((1, 3))  # (hf, wf, 3)
    total = np.zeros((len(tokens), 3))
    np.add.at(total, which, means)
    colour = total / np.bincount(which.flatten())[:, None]
    colour[tokens < 0] = 255
    like = np.empty(size or (image.shape[0] * scale, image.shape[1] * scale))
    pixels, large = _spread(colour[which], like), _spread(which, like)
    other = np.zeros(large.shape, dtype=bool)
    other[1:] |= large[1:] != large[:-1]
    other[:, 1:] |= large[:, 1:] != large[:, :-1]
    pixels[other] *= 0.6
    return pixels.round().astype(np.uint8)


def _veiled(pixels: Float32[np.ndarray, "h w 3"]) -> Float32[np.ndarray, "h w 3"]:
    grey = (pixels @ LUMA)[..., None]
    return (1 - VEIL) * (0.5 * pixels + 0.5 * grey) + VEIL * np.float32(GREY)


def _contrast(pixels: Float32[np.ndarray, "h w 3"], patches: tuple[int, int]) -> Float32[np.ndarray, "h w 3"]:
    """The colour of lines that show on these pixels, decided for each patch as a whole."""
    rows, columns = (starts(side, num)[:-1] for side, num in zip(pixels.shape, patches, strict=False))
    total = np.add.reduceat(np.add.reduceat(pixels @ LUMA, rows, 0), columns, 1)  # (hf, wf)
    high, wide = (np.diff(starts(side, num)) for side, num in zip(pixels.shape, patches, strict=False))
    light = _spread(total / (high[:, None] * wide) > 127.0, pixels)[..., None]
    return np.where(light, 0.3 * pixels, 0.3 * pixels + np.float32(0.7 * 255))


def starts(side: int, num: int) -> Int64[np.ndarray, " num1"]:
    """Where each of `num` nearly equal parts of `side` px begins, and where the last ends."""
    return np.arange(num + 1) * side // num


def _spread(parts: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The value of its part for every pixel, (rows, columns, ...) -> (h, w, ...)."""
    high, wide = (np.diff(starts(side, num)) for side, num in zip(like.shape, parts.shape[:2], strict=False))
    return parts.repeat(high, 0).repeat(wide, 1)


def _grid(like: np.ndarray, parts: tuple[int, ...], width: int) -> Bool[np.ndarray, "h w"]:
    """True on one line of `width` px where each part begins, and along the borders of the picture."""
    lines = []
    for side, num in zip(like.shape, parts, strict=False):
        line = _from_start(side, num) < width
        line[side - width :] = True
        lines.append(line)
    return lines[0][:, None] | lines[1][None, :]


def _frames(like: np.ndarray, parts: tuple[int, ...], width: int) -> Bool[np.ndarray, "h w"]:
    """True on a frame inside each part; neighbours have one each, so a bold line parts them."""
    lines = []
    for side, num in zip(like.shape, parts, strict=False):
        to_end = np.diff(starts(side, num)).repeat(np.diff(starts(side, num))) - _from_start(side, num)
        lines.append((_from_start(side, num) < width) | (to_end <= width))
    return lines[0][:, None] | lines[1][None, :]


def _from_start(side: int, num: int) -> Int64[np.ndarray, " side"]:
    """How many px each px is from where its part begins."""
    begin = starts(side, num)
    return np.arange(side) - begin[:-1].repeat(np.diff(begin))


def contact_sheet(images: Sequence[np.ndarray], columns: int, gap: int = 6) -> UInt8[np.ndarray, "height width 3"]:
    """Many pictures on one white sheet, row by row; each keeps its size in a slot of the largest."""
    if not images or columns < 1:
        raise ValueError(
            f"there are {len(images)} images for {columns} columns, but a sheet needs at least one of each; "
            f"pass a list of (h, w, 3) arrays"
        )
    for image in images:
        _check_image(image)
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    high, wide = (max(image.shape[axis] for image in images) + gap for axis in (0, 1))
    sheet = np.full((rows * high + gap, columns * wide + gap, 3), 255, dtype=np.uint8)
    for index, image in enumerate(images):
        top, left = index // columns * high + gap, index % columns * wide + gap
        sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    return sheet


def image_bytes(array: np.ndarray, kind: str = "PNG") -> bytes:
    """A picture (h, w, 3) uint8 as a file's content: exact as PNG, a tenth of the size as WEBP."""
    from PIL import Image

    _check_image(array)
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format=kind, **({"quality": 85} if kind == "WEBP" else {}))
    return buffer.getvalue()


def save_png(array: np.ndarray, path: str | os.PathLike[str]) -> Path:
    """Write a picture (h, w, 3) uint8. The file is replaced whole or not at all."""
    content, path = image_bytes(array), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(content)
    return path


def _check(image: np.ndarray, mask: np.ndarray, coarse: int, fine: int, scale: int) -> None:
    _check_image(image)
    check_scales(fine, coarse)
    check_divides(image.shape[0], image.shape[1], coarse)
    if scale < 1:
        raise ValueError(f"scale is {scale}, but pictures are enlarged 1, 2, 3, ... times; pass scale=1 to keep it")
    cells = (image.shape[0] // coarse, image.shape[1] // coarse)
    if mask.shape != cells:
        raise ValueError(
            f"mask is {mask.shape}, but an image of {image.shape[0]}x{image.shape[1]}px has {cells} cells "
            f"of {coarse}px; give one value per cell"
        )
    _check_mask(mask)


def _check_mask(mask: np.ndarray) -> None:
    if not np.isin(mask, (0, 1)).all():
        wrong = mask[~np.isin(mask, (0, 1))][0]
        raise ValueError(f"mask has {wrong} in it, but 0 is coarse and 1 is fine; threshold it first, as mask > 0.5")


def _check_image(image: np.ndarray) -> None:
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
        raise ValueError(
            f"a picture must be (h, w, 3) uint8, got {image.shape} {image.dtype}; "
            f"from a tensor (3, h, w) in [0, 1]: (x * 255).byte().permute(1, 2, 0).numpy()"
        )
