"""Colour: photometric distortion as one affine map of colours an image.

    draw = uniform(seed, epoch, index, NUM_DRAWS, COLOUR)     # (b, 8) numbers in [0, 1)
    transform = colour_transform(draw)
    transform.matrix, transform.offset                        # (b, 3, 3), (b, 3): x -> matrix @ x + offset
    apply(transform, images)                                  # (b, 3, h, w), grey levels 0 to 255

Brightness, contrast, saturation and hue are changed in this order, each in half of the images. Saturation scales the
colours' distance from the grey of the same brightness, hue turns them about the axis of greys.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

NUM_DRAWS = 8
BRIGHTNESS = 32.0  # grey levels, up or down
CONTRAST = (0.5, 1.5)
SATURATION = (0.5, 1.5)
HUE = 18.0  # degrees, either way

GREY = np.array([0.299, 0.587, 0.114])  # how bright red, green and blue are
YIQ = np.array([GREY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])  # brightness and the plane of colours


class ColourTransform(NamedTuple):
    """x -> matrix @ x + offset for each image's colours."""

    matrix: Float[np.ndarray, "b 3 3"]
    offset: Float[np.ndarray, "b 3"]


def colour_transform(draw: Float[np.ndarray, "b 8"]) -> ColourTransform:
    """Eight numbers in [0, 1): whether each of the four is done, then how much."""
    done, amount = draw[:, :4] < 0.5, 2 * draw[:, 4:] - 1  # amount in [-1, 1)
    amount = np.where(done, amount, 0.0)  # (b, 4); 0 changes nothing
    brightness = BRIGHTNESS * amount[:, 0]
    contrast = between(CONTRAST, amount[:, 1])
    saturation = saturate(between(SATURATION, amount[:, 2]))
    matrix = contrast[:, None, None] * turn(np.deg2rad(HUE) * amount[:, 3]) @ saturation
    return ColourTransform(matrix=matrix, offset=matrix.sum(2) * brightness[:, None])


def between(ends: tuple[float, float], amount: Float[np.ndarray, " b"]) -> Float[np.ndarray, " b"]:
    """-1 is the lower end, 0 the middle, 1 the upper end."""
    return (ends[0] + ends[1]) / 2 + (ends[1] - ends[0]) / 2 * amount


def saturate(factor: Float[np.ndarray, " b"]) -> Float[np.ndarray, "b 3 3"]:
    grey = np.tile(GREY, (3, 1))  # every channel becomes the brightness
    return grey + factor[:, None, None] * (np.eye(3) - grey)


def turn(angle: Float[np.ndarray, " b"]) -> Float[np.ndarray, "b 3 3"]:
    """A rotation of the plane of colours; greys and the brightness stay."""
    cos, sin, zero, one = np.cos(angle), np.sin(angle), np.zeros_like(angle), np.ones_like(angle)
    rotation = np.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).reshape(-1, 3, 3)
    return np.linalg.inv(YIQ) @ rotation @ YIQ


def apply(transform: ColourTransform, image: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 h w"]:
    """The distorted images, within grey levels 0 to 255."""
    both = np.concatenate([transform.offset[:, :, None], transform.matrix], 2).astype(np.float32)
    moved = torch.from_numpy(both).to(image.device, non_blocking=True)  # (b, 3, 4)
    colours = torch.baddbmm(moved[:, :, :1], moved[:, :, 1:], image.flatten(2))
    return colours.clamp_(0, 255).unflatten(2, image.shape[2:])
