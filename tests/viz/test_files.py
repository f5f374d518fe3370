"""Photographs are drawn as a person sees them."""

from pathlib import Path

import numpy as np
from PIL import Image

from msvit.viz.files import read_image


def test_a_photograph_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 255  # light above, dark below
    exif = Image.Exif()
    exif[0x0112] = 3  # held upside down
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    seen = read_image(tmp_path / "photo.png", 32)
    assert seen[:8].mean() < 10
    assert seen[-8:].mean() > 245


def test_sixteen_bits_become_eight_and_not_white(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    seen = read_image(tmp_path / "deep.png", 32).astype(float)
    assert abs(seen.mean() - 127.5) < 2
    assert seen.max() - seen.min() > 240
