"""Masks drawn on images: fine and coarse cells are told apart on any image, and files are whole."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from msvit.lab.viz import colour_by_token, contact_sheet, overlay, save_png

MASK = np.array([[1, 0], [0, 1]], dtype=np.uint8)


def flat(level: int, side: int = 32) -> np.ndarray:
    return np.full((side, side, 3), level, dtype=np.uint8)


@pytest.mark.parametrize("level", [0, 60, 127, 128, 170, 200, 255])
def test_fine_and_coarse_cells_look_different_on_any_image(level: int) -> None:
    picture = overlay(flat(level), MASK, coarse=16, fine=8).astype(int)
    fine, coarse = picture[:16, :16], picture[:16, 16:]
    assert np.abs(fine - coarse).mean() > 10
    for cell in (fine, coarse):
        assert np.ptp(cell) > 70, "lines must show"


def test_a_fine_cell_has_k_by_k_patches_of_untouched_pixels_and_a_coarse_one_is_whole() -> None:
    image = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    picture = overlay(image, np.array([[1, 0], [0, 0]]), coarse=24, fine=8)
    kept = (picture == image).all(-1)[:24, :24]
    inside = np.arange(24) % 8 > 0
    assert np.array_equal(kept, inside[:, None] & inside[None, :])  # 3 x 3 patches, lines of 1 px
    coarse = picture[:24, 24:].astype(int).mean(-1)
    assert coarse[1:23, 1:23].min() > 80 > 60 > coarse[0].max(), "one frame, nothing inside"


def test_scale_enlarges_without_mixing_pixels() -> None:
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    picture = overlay(image, np.ones((2, 2), dtype=bool), coarse=16, fine=8, scale=4)
    assert picture.shape == (128, 128, 3)
    assert np.array_equal(picture[2::4, 2::4][:-1, :-1], image[:-1, :-1])  # lines: first pixels of a patch, and the end


def test_an_image_that_is_not_square_keeps_its_sides() -> None:
    mask = np.zeros((1, 3))
    mask[0, 2] = 1
    picture = overlay(np.zeros((16, 48, 3), dtype=np.uint8), mask, coarse=16, fine=8)
    assert picture.shape == (16, 48, 3)
    assert picture[4, 44].max() == 0 < picture[4, 8].min()


@pytest.mark.parametrize(
    ("image", "mask", "scale", "words"),
    [
        (flat(0), np.zeros((2, 3)), 1, r"\(2, 3\).*\(2, 2\)"),
        (flat(0), np.full((2, 2), 0.5), 1, "0.5.*threshold"),
        (flat(0).astype(float), MASK, 1, "float64"),
        (flat(0)[..., 0], MASK, 1, r"\(32, 32\)"),
        (flat(0, 40), MASK, 1, "40x40.*16"),
        (flat(0), MASK, 0, "scale is 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(
    image: np.ndarray, mask: np.ndarray, scale: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        overlay(image, mask, coarse=16, fine=8, scale=scale)


def test_a_contact_sheet_holds_every_picture_once_row_by_row() -> None:
    sheet = contact_sheet([flat(10, 8), flat(20, 8), flat(30, 6)], columns=2, gap=2)
    assert sheet.shape == (2 * 10 + 2, 2 * 10 + 2, 3)
    assert [int((sheet == level).all(-1).sum()) for level in (10, 20, 30)] == [64, 64, 36]
    assert sheet[5, 5, 0] == 10
    assert sheet[5, 15, 0] == 20
    assert sheet[15, 5, 0] == 30
    with pytest.raises(ValueError, match="0 images for 2 columns"):
        contact_sheet([], columns=2)


def test_a_saved_png_is_the_array_and_replaces_the_old_one_whole(tmp_path: Path) -> None:
    picture = overlay(flat(90), MASK, coarse=16, fine=8)
    path = save_png(flat(0), tmp_path / "new" / "a.png")
    assert save_png(picture, path) == path
    assert np.array_equal(np.asarray(Image.open(path)), picture)
    with pytest.raises(ValueError, match="float64"):
        save_png(picture / 255, path)
    assert np.array_equal(np.asarray(Image.open(path)), picture)
    assert [entry.name for entry in path.parent.iterdir()] == ["a.png"]


def test_final_tokens_have_the_mean_colour_of_all_they_cover() -> None:
    image = np.random.default_rng(0).integers(0, 200, (16, 32, 3), dtype=np.uint8)
    owner = np.array([[5, 5, 9, -1], [5, 7, 9, 9]])
    picture = colour_by_token(image, owner, fine=8, scale=2).astype(int)
    assert picture.shape == (32, 64, 3)
    for token in (5, 7, 9):
        here = (owner == token).repeat(8, 0).repeat(8, 1)
        want = image[here].mean(0).round()
        drawn = picture[::2, ::2][here]
        assert (np.abs(drawn - want).max(1) <= 1).mean() > 0.7, "all but lines between tokens"
    assert (picture[8:, 56:][:8] == 255).all(), "what was dropped is white"
    with pytest.raises(ValueError, match=r"owner is \(2, 2\).*\(2, 4\) patches of 8px"):
        colour_by_token(image, owner[:, :2], fine=8)
