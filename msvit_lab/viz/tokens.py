"""Tokens on a photograph: a gate chooses cells, and they are drawn where they lie.

    chooser = choose(run=None, gate="default", share=None, size=None)
    for drawn in draw_tokens(photo, chooser, Path("photo.tokens.png")):
        print(drawn)                     # photo.tokens.png: 103 of 216 tokens (48 %)

A photograph keeps its shape: it gets as many cells as the model's square has, about, in rows and columns that go with
its sides. The picture is the photograph itself with these cells drawn on it. A gate alone needs neither host nor timm.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp, floor, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from msvit.gates import AllFine, Gate, LogitGate
from msvit.gates.base import check_share
from msvit.gates.ranking import top_share
from msvit.types import ScaleGrid
from msvit_lab.gate_names import find_gate
from msvit_lab.viz.pictures import colour_by_token, overlay, save_png, with_caption

SHOWN = (640, 1280)  # px: the longer side of a picture, least and most
CELLS, K = 7, 2  # without a run: cells in a row, with K x K patches each
SHAPE = 4  # how much more the shape of a photograph counts than its number of cells
SAMPLE = (150, 180, 215)  # the colour of cells in the legend
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


class Drawn(NamedTuple):
    """A picture that was written."""

    path: Path
    tokens: int  # of several views, of all together
    most: int  # tokens with all cells fine

    def __str__(self) -> str:
        return f"{self.path}: {in_words(self.tokens, self.most)}"


@dataclass(frozen=True)
class Chooser:
    """A gate, and how images must be prepared for it. Raises ValueError unless its cells fit into the side."""

    gate: Gate
    side: int  # px: an image that is square has this side
    fine: int
    share: float | None = None  # of fine cells in each image, where the gate's own threshold shall not decide
    model: Any = None  # what the gate decides for, where that is known
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    def __post_init__(self) -> None:
        ScaleGrid(self.side, self.side, fine=self.fine, coarse=self.gate.coarse)

    def num_tokens(self, num_fine: int, grid: ScaleGrid) -> int:
        if self.model is None:
            return grid.num_cells + (grid.k**2 - 1) * num_fine
        return int(self.model.backbone.num_tokens(torch.tensor(num_fine), grid))

    def prepare(self, image: np.ndarray) -> Tensor:
        """(h, w, 3) uint8 -> (1, 3, h, w), normalised."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return (torch.from_numpy(image).permute(2, 0, 1)[None] / 255 - mean) / std


def choose(run: Path | None, gate: str, share: float | None, size: int | None) -> Chooser:
    share = None if share is None else check_share("share", share)
    if run is not None and gate != "default":
        raise ValueError(f"the run {run} has its own gate; leave out --run or --gate")
    if run is None and (Path(gate) / "config.json").is_file():
        run = Path(gate)
    if run is not None:
        from msvit.model import inner_msvit
        from msvit.prediction import resolve
        from msvit_lab.hosts import read_model

        model, config = read_model(run)
        own = inner_msvit(model) or model
        if config is None:
            prepare = resolve(own, size, None, None)
            return Chooser(own.gate, prepare.size, own.fine, share, own.eval(), prepare.mean, prepare.std)
        data = config.data
        assert data.mean is not None, "a run has resolved it"
        assert data.std is not None, "a run has resolved it"
        return Chooser(own.gate, size or data.img_size, own.fine, share, own.eval(), data.mean, data.std)
    if gate in ("learned", "context"):
        raise ValueError(
            f"a {gate} gate has to be trained before it is drawn; give a run by --run, or --gate default for the one "
            f"that comes with msvit"
        )
    found = find_gate(gate, None, share).eval()
    known = found.input_normalization  # ImageNet's where that is not recorded
    mean, std = (MEAN, STD) if known is None else (tuple(known.mean), tuple(known.std))
    return Chooser(found, size or CELLS * found.coarse, max(1, found.coarse // K), share, mean=mean, std=std)


def draw_tokens(photo: Image.Image, chooser: Chooser, picture: Path) -> Iterator[Drawn]:
    grid = grid_for(photo, chooser)
    seen = np.array(photo.resize((grid.width, grid.height), Image.Resampling.BICUBIC))
    shown = np.array(for_display(photo))
    image = chooser.prepare(seen)
    reduces = chooser.model is not None and chooser.model.reducer is not None
    chooses = not (reduces and isinstance(chooser.gate, AllFine))
    if chooses:
        cells = choose_cells(image, chooser)
        tokens, most = (chooser.num_tokens(num, grid) for num in (int(cells.sum()), grid.num_cells))
        drawn = with_caption(overlay(shown, cells, grid.k), in_words(tokens, most), legend(chooser, grid))
        yield Drawn(save_png(drawn, picture), tokens, most)
    if reduces:
        path = reduced_beside(picture) if chooses or picture.name.endswith(".tokens.png") else picture
        yield draw_reduced(chooser.model, image, seen, shown.shape[:2], path)


def reduced_beside(picture: Path) -> Path:
    return picture.with_name(f"{picture.name.removesuffix('.png').removesuffix('.tokens')}.reduced.png")


@torch.inference_mode()
def draw_reduced(model: Any, image: Tensor, seen: np.ndarray, size: tuple[int, int], path: Path) -> Drawn:
    """What a reducer leaves of an image (1, 3, h, w), `seen` (h, w, 3) before its normalisation."""
    left = model(image).tokens
    grid, count = left.layout.grid, int(left.count)
    most = int(model.backbone.num_tokens(torch.tensor(grid.num_cells), grid))
    drawn = colour_by_token(seen, left.layout.owner[0].view(grid.patches).cpu().numpy(), grid.fine, size)
    text = f"{in_words(count, most)} are left; each has the mean colour of what it covers"
    return Drawn(save_png(with_caption(drawn, text), path), count, most)


def grid_for(photo: Image.Image, chooser: Chooser) -> ScaleGrid:
    coarse = chooser.gate.coarse
    rows, columns = cells_for(photo.width, photo.height, chooser.side // coarse)
    return ScaleGrid(rows * coarse, columns * coarse, fine=chooser.fine, coarse=coarse)


@torch.inference_mode()
def choose_cells(image: Tensor, chooser: Chooser) -> np.ndarray:
    """The mask (hc, wc), 1 = fine, of an image (1, 3, h, w)."""
    choice = chooser.gate(image)
    by_share = chooser.share is not None and isinstance(chooser.gate, LogitGate)
    mask = top_share(choice.logits, chooser.share or 0.0)[0] if by_share else choice.mask[0]
    return mask.byte().numpy()


def cells_for(width: int, height: int, side: int) -> tuple[int, int]:
    """Rows and columns of about `side` x `side` cells, such that a cell covers nearly a square of the photograph."""

    def cost(cells: tuple[int, int]) -> float:
        rows, columns = cells
        return SHAPE * log(columns * height / (rows * width)) ** 2 + log(rows * columns / side**2) ** 2

    found = []
    for rows in range(1, side**2 + 1):  # for each, the best number of columns if it could be a fraction, rounded
        best = exp((SHAPE * log(rows * width / height) + log(side**2 / rows)) / (SHAPE + 1))
        found += [(rows, max(1, floor(best))), (rows, max(1, ceil(best)))]
    return min(found, key=cost)


def for_display(photo: Image.Image) -> Image.Image:
    """A small one enlarged, smoothly, a huge one reduced."""
    longer = max(photo.size)
    scale = min(max(longer, SHOWN[0]), SHOWN[1]) / longer
    width, height = (max(1, round(side * scale)) for side in photo.size)
    return photo if scale == 1 else photo.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)


def legend(chooser: Chooser, grid: ScaleGrid) -> list[tuple[np.ndarray, str]]:
    """What the squares of a picture mean."""
    none, one = (chooser.num_tokens(num, grid) for num in (0, 1))
    coarse = none // grid.num_cells
    sample = np.full((160, 160, 3), SAMPLE, np.uint8)
    return [
        (overlay(sample, np.array([[cell]]), grid.k), f"{num} {word} token{'' if num == 1 else 's'}")
        for cell, num, word in ((0, coarse, "coarse"), (1, coarse + one - none, "fine"))
    ]


def in_words(tokens: int, most: int, reduced: bool = False) -> str:
    """`reduced`: they are those after the last block."""
    return f"{tokens} of {most} tokens{' at the end' if reduced else ''} ({tokens / most:.0%})".replace("%", " %")
