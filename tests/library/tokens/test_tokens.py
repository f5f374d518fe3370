"""Tokens cover the image exactly once, and can be turned into a map and back."""

import pytest
import torch
from tiny import images, mixed_mask, tiny_host

import msvit
from msvit.execution import MODES
from msvit.tokens.patches import patch_pixels

SHAPES = [(24, 24, 2), (24, 48, 2), (48, 24, 3), (24, 72, 3), (48, 48, 4), (16, 48, 4)]


def run(height: int, width: int, k: int, mode: str) -> tuple[msvit.MSViTOutput, torch.Tensor]:
    model = msvit.convert(tiny_host(), coarse=4 * k, mode=mode)
    mask = mixed_mask(4, height // model.coarse, width // model.coarse)
    with torch.no_grad():
        return model(images(4, height, width), mask=mask), mask


@pytest.mark.parametrize(("height", "width", "k"), SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_every_pixel_is_in_exactly_one_token(height: int, width: int, k: int, mode: str) -> None:
    out, mask = run(height, width, k, mode)
    tokens = out.tokens
    covered = torch.zeros(4, height, width)
    columns = width // (4 * k)
    for slot in tokens.valid.nonzero().flatten().tolist():
        cell, image = int(tokens.cell[slot]), int(tokens.layout.image[slot])
        if cell < 0:
            continue
        top, left, side = cell // columns * 4 * k, cell % columns * 4 * k, 4 * k
        if tokens.fine[slot]:
            number = int(tokens.layout.token[slot]) - 1 - tokens.layout.grid.num_cells
            top, left, side = number // (width // 4) * 4, number % (width // 4) * 4, 4
            assert mask[image].flatten()[cell] == 1
        covered[image, top : top + side, left : left + side] += 1
        assert tokens.area[slot] * 16 == side * side
    assert torch.equal(covered, torch.ones_like(covered))


@pytest.mark.parametrize(("height", "width", "k"), SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_to_map_to_tokens_is_exact(height: int, width: int, k: int, mode: str) -> None:
    out, mask = run(height, width, k, mode)
    tokens = out.tokens
    dense = msvit.dense_map(tokens)
    assert dense.shape == (4, 32, height // 4, width // 4)
    slots = tokens.layout.patch_slots
    active = tokens.valid[slots]
    assert torch.equal(msvit.from_dense(dense, tokens.layout)[active], tokens.x[slots][active])
    coarse = mask == 0  # a coarse cell's k x k places hold one feature
    cells = dense.unflatten(3, (-1, k)).unflatten(2, (-1, k)).permute(0, 2, 4, 3, 5, 1)[coarse]  # (n, k, k, d)
    assert torch.equal(cells, cells[:, :1, :1].expand_as(cells))


def test_the_count_is_cells_plus_three_for_every_fine_one() -> None:
    for mode in MODES:
        out, mask = run(24, 48, 2, mode)
        assert out.tokens.count.tolist() == (18 + 3 * mask.sum((1, 2))).int().tolist()


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_coarse_cell_is_seen_as_the_mean_of_its_pixels(k: int) -> None:
    image = images(2, 4 * k, 8 * k)
    grid = msvit.ScaleGrid(4 * k, 8 * k, fine=4, coarse=4 * k)
    pixels = patch_pixels(image, grid)[:, : grid.num_cells].view(2, 2, 3, 4, 4)
    cell = image[:, :, :, 4 * k :].unflatten(3, (4, k)).unflatten(2, (4, k)).mean((3, 5))
    torch.testing.assert_close(pixels[:, 1], cell)


def test_only_active_tokens_are_embedded() -> None:
    seen = []
    host = tiny_host()
    model = msvit.convert(host, coarse=8, gate=msvit.AllCoarse(coarse=8))
    project = model.backbone.project
    model.backbone.project = lambda pixels: seen.append(len(pixels)) or project(pixels)
    model(images(3))
    assert seen == [3 * 4]
