"""A tiny saved model and a folder of photographs, some of them damaged, for tests of predictions."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tiny import tiny_model

import msvit


def write_model(folder: Path, seed: int = 0) -> Path:
    """A classifier whose gate decides by contrast: numbers of tokens differ from image to image."""
    torch.manual_seed(seed)
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2))
    model = tiny_model(dtype=torch.float32, gate=gate).eval()
    model.classes = list("abcde")
    model.preprocessing = msvit.Preprocessing(size=16, mean=(0.5,) * 3, std=(0.25,) * 3, crop=1.0)
    with torch.inference_mode():
        gate.threshold = float(gate(torch.randn(64, 3, 16, 16)).logits.median())
    return msvit.save(model, folder)


def write_photos(folder: Path, num: int) -> Path:
    """i.png and below/i.jpg in turn; the second is no image, and of the last one half is missing."""
    (folder / "below").mkdir(parents=True)
    for i in range(num):
        path = folder / (f"{i}.png" if i % 2 == 0 else f"below/{i}.jpg")
        draw = np.random.default_rng(i)
        pixels = draw.normal(draw.uniform(60, 190), draw.uniform(1, 60), (24, 30, 3)).clip(0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        if i == 1:
            path.write_bytes(b"no image")
        elif i == num - 1:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return folder
