"""Pictures: fine and coarse cells differ on any image, a class has one colour, captions fit, files are whole."""


import numpy as np
import pytest

from msvit.types import IGNORE
from msvit_lab.viz import pictures
from msvit_lab.viz.pictures import colour_by_token, enlarge, label_picture, overlay, with_caption

MASK = np.array([[1, 0], [0, 1]], dtype=np.uint8)
NOISE = np.random.default_rng(0).integers(0, 200, (48, 96, 3), dtype=np.uint8)


def flat(level: int, side: int = 32) -> np.ndarray:
    return np.full((side, side, 3), level, dtype=np.uint8)


@pytest.mark.parametrize("level", [0, 60, 127, 128, 170, 200, 255])
def test_fine_and_coarse_cells_look_different_on_any_image(level: int) -> None:
    picture = overlay(flat(level), MASK, k=2).astype(int)
    fine, coarse = picture[:16, :16], picture[:16, 16:]
    assert np.abs(fine - coarse).mean() > 10
    for cell in (fine, coarse):
        assert np.ptp(cell) > 70, "lines must show"


def test_a_fine_cell_has_k_by_k_patches_of_untouched_pixels_and_a_coarse_one_is_whole() -> None:
    picture = overlay(NOISE, np.array([[1, 0, 0, 0], [0, 0, 0, 0]]), k=3)
    kept = (picture == NOISE).all(-1)[:24, :24]
    inside = np.arange(24) % 8 > 0
    assert np.array_equal(kept, inside[:, None] & inside[None, :])  # 3 x 3 patches, lines of 1 px
    coarse = picture[:24, 24:48].astype(int).mean(-1)
    assert coarse[1:23, 1:23].min() > 80 > 60 > coarse[0].max(), "one frame, nothing inside"
    large = overlay(enlarge(NOISE, 4), np.ones((2, 4)), k=3)
    assert large.shape == (192, 384, 3)
    assert np.array_equal(large[2::4, 2::4][:-1, :-1], NOISE[:-1, :-1]), "enlarged without mixing pixels"


def test_final_tokens_have_the_mean_colour_of_all_they_cover() -> None:
    image, owner = NOISE[:16, :32], np.array([[5, 5, 9, -1], [5, 7, 9, 9]])
    picture = colour_by_token(image, owner, fine=8, size=(32, 64)).astype(int)
    assert picture.shape == (32, 64, 3)
    for token in (5, 7, 9):
        here = enlarge(owner == token, 8)
        drawn = picture[::2, ::2][here]
        assert (np.abs(drawn - image[here].mean(0).round()).max(1) <= 1).mean() > 0.7, "all but lines between tokens"
    assert (picture[8:, 56:][:8] == 255).all(), "what was dropped is white"


def test_a_class_has_pascal_vocs_colour_and_ignored_pixels_are_striped_like_no_class() -> None:
    known = {0: (0, 0, 0), 1: (128, 0, 0), 7: (128, 128, 128), 15: (192, 128, 128), 20: (0, 64, 128), 64: (32, 0, 0)}
    assert {index: tuple(pictures.PALETTE[index].tolist()) for index in known} == known
    assert len(np.unique(pictures.PALETTE, axis=0)) == 256
    assert pictures.css_colour(15) == "#c08080"
    picture = label_picture(enlarge(np.array([[1, 15], [0, IGNORE]]), 16))
    for index, block in ((1, picture[:16, :16]), (15, picture[:16, 16:]), (0, picture[16:, :16])):
        assert (block == known[index]).all()
    greys = np.unique(picture[16:, 16:].reshape(-1, 3), axis=0)
    assert len(greys) == 2
    assert (greys == greys[:, :1]).all()
    assert not (greys[:, None] == pictures.PALETTE).all(-1).any()


def test_a_caption_and_its_legend_stay_inside_the_picture_and_leave_it_alone() -> None:
    picture, icon = np.full((40, 200, 3), 90, np.uint8), np.full((8, 8, 3), (255, 0, 0), np.uint8)
    long = "49 of 196 tokens (25 %) are left; each has the mean colour of what it covers"
    drawn = with_caption(picture, long, [(icon, "1 coarse token"), (icon, "4 fine tokens")])
    assert np.array_equal(drawn[:40], picture)
    strip = drawn[40:]
    assert strip[:, -3:].min() == strip[-3:].min() == 255, "nothing is cut off"
    assert with_caption(picture, "short").shape[0] < with_caption(picture, long).shape[0] < drawn.shape[0]
    assert 2 * 20**2 < (strip == (255, 0, 0)).all(-1).sum() < 2 * 40**2
