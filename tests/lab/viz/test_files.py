"""Photographs are drawn as a person sees them, whole folders of them, zoomed too, and one bad file stops nothing."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from smoke_runs import call, done
from tiny import tiny_host

import msvit
from msvit.image_files import read_image
from msvit.types import GateOutput
from msvit_lab.viz.files import draw_files
from msvit_lab.viz.tokens import Chooser, Drawn
from msvit_lab.viz.views import View, draw_views, show

EMPTY = (10, 20, 30)


def photo(path: Path, width: int = 96, height: int = 64) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_a_photograph_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:, :24] = 255  # light on the left, dark on the right
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright: to be turned by a quarter, clockwise
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    seen = np.asarray(read_image(tmp_path / "photo.png", upright=True))
    assert seen.shape == (48, 32, 3)
    assert seen[:8].min() == 255
    assert seen[-8:].max() == 0
    (drawn,) = draw_files([tmp_path / "photo.png"], gate="all-fine", out=tmp_path)
    with Image.open(drawn.path) as picture:
        assert picture.width < picture.height


def test_the_picture_is_the_photograph_in_its_own_size_with_cells_where_they_lie(tmp_path: Path) -> None:
    path = photo(tmp_path / "wide.png", 900, 600)
    (drawn,) = draw_files([path], gate="disc", share=0.3, out=tmp_path)
    assert isinstance(drawn, Drawn)
    assert (drawn.tokens, drawn.most) == (54 + 3 * 16, 4 * 54)  # 6 x 9 cells
    picture = np.asarray(Image.open(drawn.path))
    assert picture.shape[1] == 900
    assert picture.shape[0] > 600 + 30, "and below it what it means"
    same = (picture[:600] == np.asarray(Image.open(path))).all(-1).reshape(6, 100, 9, 100).mean((1, 3))
    mask = msvit.DiscGate(coarse=32, share=0.3)(torch.zeros(1, 3, 192, 288)).mask[0].numpy()
    assert np.array_equal(same > 0.8, mask == 1), "fine cells keep their pixels, coarse ones none"
    assert same[mask == 0].max() < 0.05


def test_folders_are_drawn_with_their_subfolders_and_one_bad_file_stops_nothing(tmp_path: Path) -> None:
    for name in ("a.png", "b.JPG", "cats/a.png"):
        photo(tmp_path / "in" / name)
    (tmp_path / "in/notes.txt").write_text("no image")
    (tmp_path / "in/b.JPG").write_bytes(b"torn")
    for _ in range(2):  # what viz draws is not drawn again
        result = call("viz", tmp_path / "in", tmp_path / "none.png", "--gate", "disc", "--out", tmp_path / "in")
        assert result.exit_code == 1
        assert "b.JPG cannot be read as an image" in result.output
        assert "none.png does not exist" in result.output
        assert result.output.count("of 216 tokens (47 %)") == 2
    drawn = {str(path.relative_to(tmp_path / "in")) for path in (tmp_path / "in").rglob("*.tokens*")}
    assert drawn == {"a.tokens.png", "cats/a.tokens.png"}


def test_pictures_lie_beside_their_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo(tmp_path / "in" / "cats" / "a.png")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done("viz", tmp_path / "in", "--gate", "disc")
    assert (tmp_path / "in/cats/a.tokens.png").is_file()
    assert not any((tmp_path / "here").iterdir())


def test_one_image_may_be_drawn_to_a_file(tmp_path: Path) -> None:
    done("viz", photo(tmp_path / "a.png"), "--gate", "disc", "--out", tmp_path / "new/x.png")
    assert (tmp_path / "new/x.png").is_file()


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


def test_a_saved_model_that_merges_is_drawn_with_what_is_left(tmp_path: Path) -> None:
    host = tiny_host(dtype=torch.float32, img_size=32)
    model = msvit.convert(host, method="auto", budget=0.8).eval()
    model.preprocessing = msvit.Preprocessing(size=32, mean=(0.5,) * 3, std=(0.5,) * 3, crop=1.0)
    msvit.save(model, tmp_path / "model")
    lines = done("viz", photo(tmp_path / "photo.png", 32, 32), "--run", tmp_path / "model").splitlines()
    image = model.preprocessing(read_image(tmp_path / "photo.png"))[None]
    assert [line.split(": ")[1].split(" tokens")[0] for line in lines] == [
        f"{int(model(image).tokens.count)} of 64"
    ], "no gate chooses cells, so that they are not drawn"
    drawn = read_image(tmp_path / "photo.reduced.png")
    said = done("predict", tmp_path / "model", tmp_path / "photo.png", "--overlay", tmp_path / "drawn", "--json")
    left = read_image(tmp_path / "drawn" / "photo.reduced.png")
    assert (np.array(left) == np.array(drawn)).all(), "predict draws it, too"
    assert "photo.tokens.png" in said
    assert "photo.reduced.png" in said


@pytest.mark.slow
def test_the_default_gate_needs_neither_timm_nor_torchvision(tmp_path: Path) -> None:
    """They take longer to import than all that viz does."""
    path = photo(tmp_path / "a.png")
    script = (
        f"import sys; from pathlib import Path; from msvit_lab.viz.files import draw_files; "
        f"assert len(list(draw_files(['{path}'], out=Path('{tmp_path}')))) == 1; "
        f"print([name for name in ('timm', 'torchvision', 'torchmetrics', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
