"""Tokens cover the image exactly once, and can be turned into a map and back."""

import random

import pytest
import torch
from tiny import KINDS, images, tiny_host

import msvit
from msvit.execution import MODES


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mode", MODES)
def test_any_mask_covers_every_pixel_once_and_its_map_can_be_undone(seed: int, mode: str) -> None:
    """Grids of any shape, cells of any number of patches, with and without prefix tokens, drawn anew for each seed."""
    draw = random.Random(seed)
    k, rows, columns, batch = (draw.randint(*bounds) for bounds in ((2, 4), (1, 4), (1, 4), (1, 4)))
    name, share = draw.choice((KINDS[0], KINDS[1], KINDS[5])), draw.choice((0.0, 0.3, 0.7, 1.0))
    mask = (torch.rand(batch, rows, columns, generator=torch.Generator().manual_seed(seed)) < share).double()
    model = msvit.convert(tiny_host(name), coarse=4 * k, mode=mode)
    with torch.no_grad():
        tokens = model(images(batch, 4 * k * rows, 4 * k * columns), mask=mask).tokens
    assert tokens.count.tolist() == (rows * columns + (k * k - 1) * mask.sum((1, 2))).int().tolist()

    covered = torch.zeros(batch, k * rows, k * columns)  # in fine patches
    for slot in tokens.layout.valid.nonzero().flatten().tolist():
        cell, image = int(tokens.layout.cell[slot]), int(tokens.layout.image[slot])
        if cell < 0:
            continue
        top, left, side = cell // columns * k, cell % columns * k, k
        assert tokens.layout.fine[slot] == mask[image].flatten()[cell]
        if tokens.layout.fine[slot]:
            number = int(tokens.layout.token[slot]) - tokens.layout.num_prefix - rows * columns
            top, left, side = *divmod(number, k * columns), 1
        covered[image, top : top + side, left : left + side] += 1
        assert tokens.layout.area[slot] == side * side
    assert (covered == 1).all()

    dense, slots = msvit.dense_map(tokens), tokens.layout.patch_slots
    active = tokens.layout.valid[slots]
    assert torch.equal(msvit.from_dense(dense, tokens.layout)[active], tokens.x[slots][active])
    cells = dense.unflatten(3, (-1, k)).unflatten(2, (-1, k)).permute(0, 2, 4, 3, 5, 1)[mask == 0]  # (n, k, k, d)
    assert torch.equal(cells, cells[:, :1, :1].expand_as(cells)), "a coarse cell has one feature"


def test_a_map_is_read_at_the_first_patch_of_each_token() -> None:
    gate, grid = msvit.GateOutput.from_mask(torch.tensor([[[0, 1]]])), msvit.ScaleGrid(8, 16, fine=4, coarse=8)
    numbers = torch.arange(8.0).view(1, 1, 2, 4)  # of patches
    assert msvit.from_dense(numbers, MODES["packed"](gate, grid, 1)).flatten().tolist() == [0, 2, 3, 6, 7]
