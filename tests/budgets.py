"""Photographs, images on which gates differ, and the share of the dense cost that a model has on images."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import msvit


def photo(seed: int = 0) -> Image.Image:
    """Noise of 48 x 40 px."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 48, 3), np.uint8))


@cache
def pictures(num: int, seed: int, size: int = 64) -> Tensor:
    """Noise whose strength differs from place to place, so that cells differ."""
    draw = torch.Generator().manual_seed(seed)
    strength = F.interpolate(torch.rand(num, 1, size // 8, size // 8, generator=draw), size=size, mode="nearest")
    return strength * torch.randn(num, 3, size, size, generator=draw)


@torch.no_grad()
def share_of_dense(model: msvit.MSViT, images: Tensor, unit: str) -> float:
    """The mean cost of images, counted apart from what sets it."""
    grid = model.grid(images)
    if unit == "tokens":
        num_fine = model.gate(images).mask.sum((1, 2)).long()
        return model.backbone.num_tokens(num_fine, grid).double().mean().item() / grid.num_patches
    return model.macs(images).double().mean().item() / model.backbone.dense_macs(grid)
