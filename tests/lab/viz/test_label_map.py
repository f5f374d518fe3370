"""Label maps: a class has one colour, and what is ignored looks like no class."""

import numpy as np
import pytest

from msvit.lab.viz.label_map import PALETTE, colour_of, css_colour, label_picture
from msvit.types import IGNORE


def test_colours_are_those_of_pascal_voc_and_no_two_classes_share_one() -> None:
    known = {0: (0, 0, 0), 1: (128, 0, 0), 7: (128, 128, 128), 15: (192, 128, 128), 20: (0, 64, 128), 64: (32, 0, 0)}
    assert {index: colour_of(index) for index in known} == known
    assert len(np.unique(PALETTE, axis=0)) == 256
    assert css_colour(15) == "#c08080"


def test_a_picture_has_its_classes_colours_pixel_by_pixel_and_stripes_where_ignored() -> None:
    labels = np.array([[0, 1], [15, IGNORE]], dtype=np.uint8)
    picture = label_picture(labels, scale=16)
    assert picture.shape == (32, 32, 3)
    for row, column, index in ((0, 0, 0), (0, 1, 1), (1, 0, 15)):
        block = picture[16 * row : 16 * (row + 1), 16 * column : 16 * (column + 1)]
        assert (block == colour_of(index)).all()
    ignored = picture[16:, 16:]
    greys = np.unique(ignored.reshape(-1, 3), axis=0)
    assert len(greys) == 2, "stripes of two greys"
    assert (greys == greys[:, :1]).all()
    assert not (greys[:, None] == PALETTE).all(-1).any(), "and neither is a class"


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.zeros((2, 2, 3), int), r"\(2, 2, 3\)"),
        (np.full((2, 2), -1), "got .* -1 to -1"),
        (np.full((2, 2), 256), "256"),
        (np.zeros((0, 2), int), "nothing"),
    ],
)
def test_what_is_no_label_map_is_refused(labels: np.ndarray, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        label_picture(labels)
