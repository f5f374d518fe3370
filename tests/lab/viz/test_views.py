"""Zooms and shifts of a photograph, each with a mask of its own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from smoke_runs import done

from msvit.types import GateOutput
from msvit_lab.viz.files import draw_files
from msvit_lab.viz.tokens import Chooser
from msvit_lab.viz.views import View, draw_views, show

EMPTY = (10, 20, 30)


def quarters() -> Image.Image:
    """64 x 64 px: a red upper left quarter, the rest white."""
    pixels = np.full((64, 64, 3), 255, np.uint8)
    pixels[:32, :32] = (255, 0, 0)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("view", "corners"),
    [
        (View(), ("red", "white", "white", "white")),
        (View(zoom=0.5), ("empty", "empty", "empty", "empty")),
        (View(zoom=2.0, right=0.5, down=0.5), ("red", "red", "red", "red")),
        (View(right=0.3), ("empty", "white", "empty", "white")),
        (View(down=-0.6), ("white", "white", "empty", "empty")),
    ],
)
def test_a_view_is_zoomed_about_the_centre_then_moved(view: View, corners: tuple[str, ...]) -> None:
    seen = np.asarray(show(quarters(), view, 80, 80, EMPTY))
    colours = {"red": (255, 0, 0), "white": (255, 255, 255), "empty": EMPTY}
    found = [tuple(int(value) for value in seen[place]) for place in ((2, 2), (2, -3), (-3, 2), (-3, -3))]
    assert found == [colours[name] for name in corners]


class RedGate(torch.nn.Module):
    """Cells are fine where they are red."""

    coarse = 16

    def forward(self, image: torch.Tensor) -> GateOutput:
        cells = torch.nn.functional.avg_pool2d(image, self.coarse)
        return GateOutput.from_mask((cells[:, 0] - cells[:, 1] > 0.5).float())


def test_each_view_has_the_mask_that_the_gate_gives_it(tmp_path: Path) -> None:
    gate: object = RedGate()
    chooser = Chooser(gate, 64, 8, mean=(0.5, 0.5, 0.5), std=(1.0, 1.0, 1.0))  # type: ignore[arg-type]
    views = [View(), View(zoom=2.0, right=0.5, down=0.5), View(right=0.9)]
    (drawn,) = draw_views(quarters(), chooser, tmp_path / "a.png", views)
    assert (drawn.tokens, drawn.most) == ((16 + 3 * 4) + 4 * 16 + 16, 3 * 64)  # a quarter, all, none
    picture = np.asarray(Image.open(drawn.path))
    side = (picture.shape[1] - 2 * 8) // 3
    red = [
        (picture[:side, start : start + side] == (255, 0, 0)).all(-1).mean() for start in (0, side + 8, 2 * (side + 8))
    ]
    assert 0.15 < red[0] < 0.25
    assert red[1] > 0.6
    assert red[2] == 0


def test_msvit_viz_zoom_writes_one_row_for_each_image(tmp_path: Path) -> None:
    quarters().resize((90, 60)).save(tmp_path / "photo.png")
    (plain,) = draw_files([tmp_path / "photo.png"], gate="disc", out=tmp_path)
    for _ in range(2):  # what it draws is not drawn again
        said = done("viz", tmp_path, "--gate", "disc", "--zoom", 2, "--out", tmp_path)
        assert f"photo.zoom.png: {3 * plain.tokens} of {3 * plain.most} tokens" in said
    assert {path.name for path in tmp_path.iterdir()} == {"photo.png", "photo.tokens.png", "photo.zoom.png"}
