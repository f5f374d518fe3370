"""Pictures and figures: where the tokens went, and what it brought.

    pictures.py     masks drawn on images, label maps, captions: arrays (h, w, 3) uint8
    tokens.py       a photograph and a gate -> the tokens drawn on it
    views.py        the same for zooms and shifts of it
    files.py        `msvit viz`: image files and folders -> any of these
    compare.py      runs -> names for readers, numbers, one sentence
    figures.py      runs -> matplotlib figures as SVG, for the page of `msvit_lab.report`
"""
