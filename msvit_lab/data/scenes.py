"""Scenes: made-up images on which "does the gate look where it matters" is a number.

    scenes = Scenes(num_images=4096, size=64, seed=0)      # a Source
    scenes[7].image, scenes[7].label, scenes[7].object_mask          # the same for ever
    Scenes(num_images=4096, target="label_map")[7].label_map         # the ground is 0, an object 1 + its class

A small woven object lies somewhere on a smooth ground. The class is the weave: light and dark pixels in one of
eight patterns, each with as much light as dark in every 2 x 2 pixels. At the coarse scale the object is still seen,
but its weave is a flat mean. Brightness, colour, shading, place, size and contrast are drawn without regard to the
class, so none of them helps.
"""

import numpy as np
from PIL import Image

from msvit_lab.data.items import Item, Source

# 4 x 4 pixels, tiled from the image's corner. Each 2 x 2 block is two light (1) and two dark (0) pixels.
WEAVES: dict[str, str] = {
    "upright": "1010 1010 1010 1010",
    "level": "1111 0000 1111 0000",
    "checked": "1001 0110 1001 0110",
    "brick": "1010 0101 0101 1010",
    "ladder": "1011 1000 1011 1000",
    "basket": "1110 0010 1011 1000",
    "twill": "1001 1001 0110 0110",
    "maze": "1110 0010 0001 1101",
}


class Scenes(Source):
    """`num_images` scenes of `size` px. Image i depends on (seed, i) and nothing else; classes take turns."""

    def __init__(self, num_images: int, size: int = 64, seed: int = 0, target: str = "class") -> None:
        if num_images < 1 or size < 32:
            raise ValueError(f"num_images is {num_images} and size is {size}, but they must be at least 1 and 32")
        self.num_images, self.size, self.seed, self.target = num_images, size, seed, target
        self.classes = list(WEAVES) if target == "class" else ["ground", *WEAVES]

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self.num_images:  # which ends `for item in scenes`
            raise IndexError(f"scene {index} of {self.num_images}")
        rng = np.random.default_rng((self.seed, index))
        label = index % len(WEAVES)
        y, x = np.mgrid[: self.size, : self.size].astype(np.float32)
        place = object_mask(rng, x, y)
        image = ground(rng, x, y)
        contrast = rng.uniform(45, 75) * weave(list(WEAVES)[label], self.size)  # (h, w)
        image[place] = rng.uniform(60, 195, 3) + contrast[place][:, None]
        image += 8 * rng.standard_normal(image.shape, dtype=np.float32)
        shown, name = Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)), f"scenes[{index}]"
        if self.target == "class":
            return Item(shown, name, label=label, object_mask=place)
        return Item(shown, name, label_map=np.where(place, 1 + label, 0).astype(np.uint8))


def ground(rng: np.random.Generator, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A smooth, softly shaded surface of any brightness and colour, (h, w, 3) float."""
    size = x.shape[0]
    image = np.broadcast_to(rng.uniform(15, 240, 3), (*x.shape, 3)).astype(np.float32)
    for _ in range(rng.integers(1, 4)):  # broad waves: shading without detail
        angle, length = rng.uniform(0, 2 * np.pi), rng.uniform(0.7, 2.5) * size
        wave = np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / length + rng.uniform(0, 2 * np.pi))
        image = image + wave[..., None] * rng.uniform(-35, 35, 3)
    return image


def object_mask(rng: np.random.Generator, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """An ellipse somewhere in the image, whole, (h, w) bool."""
    size = x.shape[0]
    a, b = rng.uniform(0.11, 0.16, 2) * size
    reach = max(a, b)
    cx, cy = rng.uniform(reach, size - 1 - reach, 2)
    angle = rng.uniform(0, np.pi)
    u = (x - cx) * np.cos(angle) + (y - cy) * np.sin(angle)
    v = -(x - cx) * np.sin(angle) + (y - cy) * np.cos(angle)
    return (u / a) ** 2 + (v / b) ** 2 <= 1


def weave(name: str, size: int) -> np.ndarray:
    """+1 where a weave is light and -1 where it is dark, (size, size)."""
    tile = np.array([[int(pixel) for pixel in row] for row in WEAVES[name].split()]) * 2 - 1
    return np.tile(tile, (-(-size // 4), -(-size // 4)))[:size, :size]
