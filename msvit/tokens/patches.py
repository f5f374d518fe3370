"""The pixels and the position of a token, at both scales (Eqs. 4 and 5).

A coarse cell is shrunk to the size of a fine patch by the mean of k x k pixels, then embedded by the same
weights. Its position is the fine grid's, linearly interpolated at the centre of the cell. For k = 2 both are
exactly bilinear interpolation without antialiasing.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.fast.find_kernels import kernels
from msvit.shapes import Float, Int
from msvit.types import ScaleGrid


def active_pixels(
    image: Float[Tensor, "b c h w"], which: Int[Tensor, " n"], patch: Int[Tensor, " n"], grid: ScaleGrid
) -> Float[Tensor, "n pixels"]:
    """Return flattened pixels of the given tokens, all of fine patch size: coarse cells are shrunk by k.

    Row i is token `patch[i]` of image `which[i]`; ids count cells first, then fine patches, without prefix tokens.
    """
    plain = image.dtype is torch.float64 or (torch.is_grad_enabled() and image.requires_grad)
    if image.is_cuda and kernels is not None and not plain:
        return gather_pixels(image, which, patch, grid)
    return patch_pixels(image, grid)[which, patch]


def gather_pixels(
    image: Tensor, which: Tensor, patch: Tensor, grid: ScaleGrid, address: Tensor | None = None
) -> Tensor:
    """Gather `active_pixels` by a kernel; of the images that lie at the address when it runs, if one is given."""
    half = torch.is_autocast_enabled("cuda") and image.dtype is torch.float32
    dtype = torch.get_autocast_dtype("cuda") if half else image.dtype  # what the embedding would convert to
    return kernels.gather_pixels(image, which, patch, grid.fine, grid.k, dtype, address)


def patch_pixels(image: Float[Tensor, "b c h w"], grid: ScaleGrid) -> Float[Tensor, "b ids pixels"]:
    """Return the pixels of every token there could be: coarse cells (shrunk), then fine patches."""
    coarse = image
    for axis in (2, 3):  # sums of k rows, then of k columns: on a CPU several times faster than avg_pool2d
        coarse = reduce(torch.add, coarse.unflatten(axis, (-1, grid.k)).unbind(axis + 1))
    coarse = coarse * (1 / grid.k**2)
    return torch.cat([cut_patches(coarse, grid.fine), cut_patches(image, grid.fine)], dim=1)


def cut_patches(image: Float[Tensor, "b c h w"], side: int) -> Float[Tensor, "b patches pixels"]:
    """Cut squares of `side` px, in raster order."""
    rows = image.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # (b, c, rows, side, columns, side)
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (b, rows columns, c side side)


def coarse_positions(fine: Float[Tensor, "patches d"], grid: ScaleGrid) -> Float[Tensor, "cells d"]:
    """Interpolate the fine grid's positions linearly at the centre of each cell."""
    table = fine.T.reshape(1, -1, *grid.patches)  # (1, d, hf, wf)
    return F.interpolate(table, size=grid.cells, mode="bilinear", align_corners=False).flatten(2)[0].T
