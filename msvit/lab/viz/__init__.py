"""Pictures and figures: where the tokens went, and what it brought.

    pictures.py     masks drawn on images, label maps, captions: arrays (h, w, 3) uint8
    files.py        `msvit viz`: image files and folders -> pictures
    compare.py      runs -> names for readers, numbers, one sentence
    figures.py      runs -> matplotlib figures as SVG, for the page of `msvit.lab.report`
"""
