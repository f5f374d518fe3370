"""What is written below a picture can be read."""

import numpy as np
from PIL import ImageFont

from msvit.lab.viz.caption import with_caption, wrapped


def test_text_and_legend_stay_inside_the_picture_and_leave_it_alone() -> None:
    picture = np.full((40, 200, 3), 90, np.uint8)
    icon = np.full((8, 8, 3), (255, 0, 0), np.uint8)
    long = "49 of 196 tokens (25 %) are left; each has the mean colour of what it covers"
    drawn = with_caption(picture, long, [(icon, "1 coarse token"), (icon, "4 fine tokens")])
    assert np.array_equal(drawn[:40], picture)
    strip = drawn[40:]
    assert strip[:, -3:].min() == 255, "nothing is cut off on the right"
    assert strip[-3:].min() == 255
    assert with_caption(picture, "short").shape[0] < with_caption(picture, long).shape[0] < drawn.shape[0]
    red = (strip == (255, 0, 0)).all(-1)
    assert 2 * 20**2 < red.sum() < 2 * 40**2


def test_lines_are_as_long_as_they_may_be() -> None:
    font = ImageFont.load_default(14)
    lines = wrapped("a few words for several lines", font, 80)
    assert " ".join(lines) == "a few words for several lines"
    assert len(lines) > 1
    assert all(font.getlength(line) <= 80 for line in lines)
    assert wrapped("unbreakable", font, 10) == ["unbreakable"]
