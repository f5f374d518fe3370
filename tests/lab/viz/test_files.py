"""Photographs are drawn as a person sees them, whole folders of them, and one bad file stops nothing."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from smoke_runs import call, done

import msvit
from msvit.image_files import read_image
from msvit_lab.viz.files import draw_files
from msvit_lab.viz.tokens import Drawn


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
