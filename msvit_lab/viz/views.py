"""Zooms and shifts of a photograph, each with its mask (the paper's figures 8 and 14a).

    views = random_views(6)                                          # the whole image, and six more
    for drawn in draw_views(photo, chooser, Path("photo.zoom.png"), views):
        print(drawn)                                                 # photo.zoom.png: 703 of 1372 tokens (51 %)

Where a view has no content it has the mean colour, which is 0 once normalised.
"""

import random
from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from msvit_lab.viz.pictures import overlay, save_png, side_by_side, with_caption
from msvit_lab.viz.tokens import Chooser, Drawn, choose_cells, grid_for, in_words, legend

TILE = 320  # px: the longer side of a view, at least
PATCH = 8  # px of a patch in a view, at least
ZOOMS, SHIFT = (0.5, 2.0), 0.375  # range of random zooms; the largest shift, as a share of the side


class View(NamedTuple):
    """The content `zoom` times as large about the centre, then moved by shares of the sides."""

    zoom: float = 1.0
    right: float = 0.0
    down: float = 0.0


def random_views(num: int) -> list[View]:
    """The whole image, and `num` random zooms and shifts."""
    draws, (low, high) = random.Random(0), map(log, ZOOMS)
    shown = [View()]
    for _ in range(num):
        zoom = exp(draws.uniform(low, high))
        shown.append(View(zoom, right=draws.uniform(-SHIFT, SHIFT), down=draws.uniform(-SHIFT, SHIFT)))
    return shown


def show(photo: Image.Image, view: View, width: int, height: int, empty: tuple[int, ...]) -> Image.Image:
    """A view of a photograph, of this size; `empty` is the colour where there is no content."""
    own = max(1, round(width * view.zoom)), max(1, round(height * view.zoom))
    left, top = (width - own[0]) / 2 + view.right * width, (height - own[1]) / 2 + view.down * height
    canvas = Image.new("RGB", (width, height), empty)
    canvas.paste(photo.resize(own, Image.Resampling.BICUBIC), (round(left), round(top)))
    return canvas


def draw_views(photo: Image.Image, chooser: Chooser, picture: Path, views: Sequence[View]) -> Iterator[Drawn]:
    """A row of views, each with the mask that the gate gives it and the tokens this makes."""
    grid = grid_for(photo, chooser)
    scale = max(TILE / max(photo.size), PATCH * max(grid.patches) / min(photo.size))
    size = round(photo.width * scale), round(photo.height * scale)
    empty = tuple(round(255 * level) for level in chooser.mean)
    most, total, tiles = chooser.num_tokens(grid.num_cells, grid), 0, []
    for view in views:
        seen = chooser.prepare(np.array(show(photo, view, grid.width, grid.height, empty)))
        cells = choose_cells(seen, chooser)
        tokens = chooser.num_tokens(int(cells.sum()), grid)
        tile = overlay(np.array(show(photo, view, *size, empty)), cells, grid.k)
        tiles.append(with_caption(tile, f"zoom {view.zoom:.2f}: {in_words(tokens, most)}"))
        total += tokens
    row = with_caption(side_by_side(tiles), "one mask per view", legend(chooser, grid))
    yield Drawn(save_png(row, picture), total, most * len(views))
