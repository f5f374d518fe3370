"""Pictures: where the tokens went, and what it brought.

    picture = overlay(image, mask, coarse=32, fine=16)     # coarse cells veiled, fine ones with their grid
    picture = colour_by_token(image, owner, fine=16)       # what a reducer has left, each token in its mean colour
    save_png(contact_sheet([picture, ...], columns=4), "masks.png")
    picture = label_picture(labels)                        # a colour for each class, ignored pixels hatched
    plot = token_histogram(edges, counts, num_dense=196)   # plot.svg, plot.caption, for a page

`msvit.lab.report.write_report` puts them all on one page.
"""

from msvit.lab.viz.figures import (
    Plot,
    Point,
    accuracy_against_gmacs,
    accuracy_against_speed_up,
    class_bars,
    mask_statistics,
    priors_over_training,
    token_histogram,
    training_curves,
)
from msvit.lab.viz.label_map import label_picture
from msvit.lab.viz.overlay import colour_by_token, contact_sheet, image_bytes, overlay, save_png

__all__ = [
    "Plot",
    "Point",
    "accuracy_against_gmacs",
    "accuracy_against_speed_up",
    "class_bars",
    "colour_by_token",
    "contact_sheet",
    "image_bytes",
    "label_picture",
    "mask_statistics",
    "overlay",
    "priors_over_training",
    "save_png",
    "token_histogram",
    "training_curves",
]
