"""Augmentation: what DeiT's training does to images of classification besides cropping and flipping them.

    deit = Augmentation(rand_augment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0, repeats=3)
    batches(source, train=True, augmentation=deit, ...)
    augment = make_rand_augment("rand-m9-mstd0.5-inc1", side=224, mean=(0.5,) * 3, interpolation="bicubic")
    augment(image, key)                                   # (3, 224, 224) uint8, in the workers
    erase(images, key, probability=0.25)                  # (b, 3, 224, 224) normalised, in place, on its device
    with seeded(seeds(key, MIXING)[0]):
        make_mixup(deit, num_classes=1000)(images, labels)    # images, and shares of classes (b, 1000)

RandAugment, erasing and mixing are timm's. They draw from the global generators of Python, numpy and torch, which are
seeded from the key for each call and put back afterwards.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from msvit.preprocessing import FILTERS
from msvit_lab.data.transforms import ERASING, RAND_AUGMENT, Key, random_bits


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Settings of DeiT's augmentations; by default none."""

    rand_augment: str | None = None  # timm's configuration, such as rand-m9-mstd0.5-inc1
    erasing: float = 0.0  # probability of random erasing
    mixup: float = 0.0  # alpha; 0 for none
    cutmix: float = 0.0  # alpha; 0 for none. With mixup, half of the batches
    smoothing: float = 0.0  # of labels, where they are mixed
    repeats: int = 1  # views of an image in one epoch

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the global generators of Python and numpy begin at this seed; afterwards they go on as before.

    They belong to the process, so no other thread may draw from them meanwhile.
    """
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed >> 32)  # it takes 32 bits
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def seeds(key: Key, stream: int) -> list[int]:
    """A seed of 64 bits for every image."""
    return random_bits(key, 1, stream)[:, 0].tolist()


class SeededRandAugment:
    """timm's RandAugment of one image, drawn from a key."""

    def __init__(self, augment: Any) -> None:
        self.augment = augment

    def __call__(self, image: UInt8[np.ndarray, "3 h w"], key: Key) -> UInt8[np.ndarray, "3 h w"]:
        with seeded(seeds(key, RAND_AUGMENT)[0]):
            changed = self.augment(Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))))
        return np.asarray(changed).transpose(2, 0, 1)


def make_rand_augment(
    config: str | None, *, side: int, mean: tuple[float, ...], interpolation: str
) -> SeededRandAugment | None:
    """RandAugment with the settings of timm's training; `mean` is the colour of what is moved in from outside."""
    if config is None:
        return None
    from timm.data.auto_augment import posterize, rand_augment_transform  # slow to import

    colour = tuple(min(255, round(255 * value)) for value in mean)
    options = {"translate_const": int(0.45 * side), "img_mean": colour, "interpolation": FILTERS[interpolation]}
    try:
        augment = rand_augment_transform(config, options)
    except (AssertionError, ValueError) as error:
        raise ValueError(
            f"rand_augment is {config!r}, which timm cannot read ({str(error) or 'it must begin with rand'}); "
            f"DeiT's is rand-m9-mstd0.5-inc1"
        ) from None
    for op in augment.ops:
        if op.aug_fn is posterize:
            op.aug_fn = posterize_to_one_bit
    return SeededRandAugment(augment)


def posterize_to_one_bit(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """timm's posterize with at least one bit per channel.

    At the largest magnitude timm leaves none: a black image in earlier versions of Pillow, an error in later ones.
    """
    from timm.data.auto_augment import posterize

    return posterize(image, max(bits, 1), **options)


def erase(image: Float[Tensor, "b 3 h w"], key: Key, probability: float) -> None:
    """Random erasing in place: a rectangle of each drawn image becomes normal noise.

    Another kind of device draws other noise, in the same rectangle.
    """
    from timm.data.random_erasing import RandomErasing  # slow to import

    erasing = RandomErasing(probability, mode="pixel", device=str(image.device))
    noise = torch.cuda.default_generators[image.device.index] if image.is_cuda else torch.default_generator
    with seeded(0), torch.random.fork_rng([image.device] if image.is_cuda else []):
        for pixels, seed in zip(image, seeds(key, ERASING), strict=True):
            random.seed(seed)
            noise.manual_seed(seed)  # torch.manual_seed takes 0.2 ms
            erasing(pixels)


def make_mixup(augmentation: Augmentation, num_classes: int) -> Any:
    """timm's Mixup as in DeiT, None for no mixing: every batch, one share for all of its images, half the time either
    if both are wanted."""
    if not augmentation.mixes:
        return None
    from timm.data import Mixup  # slow to import

    alphas = {"mixup_alpha": augmentation.mixup, "cutmix_alpha": augmentation.cutmix}
    return Mixup(**alphas, label_smoothing=augmentation.smoothing, num_classes=num_classes)
