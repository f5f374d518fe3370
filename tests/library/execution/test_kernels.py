"""Every Triton kernel against plain torch: on a GPU, or else in Triton's interpreter (see conftest.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import each_once, pairwise
from reference import attention_by_image
from tiny import assert_same, interpretable, mixed_mask, relative_error
from torch import Tensor

from msvit.execution.layout import pack_indices
from msvit.fast.find_kernels import kernels
from msvit.tokens.patches import patch_pixels
from msvit.types import ScaleGrid

pytestmark = pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16
LENGTHS = (5, 70, 1)
SPARE = 11


@pairwise(cells=[(2, 2, 2), (2, 7, 7), (3, 2, 3), (4, 3, 1)], has_padding=[0, 5, 1500], num_prefix=[0, 1, 5])
def test_lay_out(cells: tuple[int, int, int], has_padding: int, num_prefix: int) -> None:
    k, rows, columns = cells
    grid = ScaleGrid(rows * k * 4, columns * k * 4, fine=4, coarse=k * 4)
    mask = mixed_mask(4, rows, columns, torch.float32)
    slots = 4 * (num_prefix + grid.num_cells) + int(mask.sum()) * (k * k - 1) + has_padding
    want = pack_indices(mask, grid, num_prefix, slots)
    got = kernels.pack_indices(mask.to(DEVICE), num_prefix, rows, columns, k, slots)
    assert all(torch.equal(g.cpu(), w) for g, w in zip(got, want, strict=True))


@each_once(size=[(4, 2), (14, 2), (3, 3), (8, 4)], order=[torch.contiguous_format, torch.channels_last])
def test_gather_pixels(size: tuple[int, int], order: torch.memory_format) -> None:
    side, k = size
    grid = ScaleGrid(2 * side * k, 3 * side * k, fine=side, coarse=side * k)
    image = torch.randn(3, 3, grid.height, grid.width).contiguous(memory_format=order)
    which, patch = torch.randint(3, (15,)), torch.randint(grid.num_ids, (15,))
    got = kernels.gather_pixels(image.to(DEVICE), which.to(DEVICE), patch.to(DEVICE), side, k, torch.float32).cpu()
    assert torch.allclose(got, patch_pixels(image, grid)[which, patch], atol=1e-6)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_kernels_read_images_by_their_address(order: torch.memory_format) -> None:
    """Of the image that is passed nothing is read but shape, strides and dtype."""
    image = torch.randn(2, 3, 16, 16, device=DEVICE).contiguous(memory_format=order)
    address, like = torch.tensor(image.data_ptr(), device=DEVICE), torch.full_like(image, torch.nan)
    which, patch = torch.tensor([0, 1, 1], device=DEVICE), torch.tensor([0, 3, 7], device=DEVICE)
    given = (which, patch, 4, 2, torch.float32)
    assert torch.equal(kernels.gather_pixels(like, *given, address), kernels.gather_pixels(image, *given))
    got, want = kernels.pool_moments(like, None, None, 4, address), kernels.pool_moments(image, None, None, 4)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def begins(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


@pairwise(dim=[16, 64], dtype=[torch.float32, HALF], num_q=[LENGTHS, (2, 2, 2)], has_key_weights=[False, True])
def test_attention_and_all_its_gradients(
    dim: int, dtype: torch.dtype, num_q: tuple[int, ...], has_key_weights: bool
) -> None:
    """With weights of 1, and with any: sizes of merged tokens, and 0 for those that a policy has dropped."""
    slots, scale = sum(LENGTHS) + SPARE, dim**-0.5
    qkv = torch.randn(slots, 3, 2, dim, device=DEVICE).to(dtype).requires_grad_()
    q, k, v = qkv.unbind(1)
    if num_q != LENGTHS:
        q = torch.randn(sum(num_q), 2, dim, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randint(5, (slots,), device=DEVICE).float() if has_key_weights else torch.ones(slots, device=DEVICE)
    weight[begins(LENGTHS)[:-1].long() + (begins(LENGTHS).diff() > 1).long()] = 1  # one above 0, not always the first
    weight[sum(LENGTHS) :] = 0
    weight.requires_grad_()
    y = kernels.attention(q, k, v, weight, has_key_weights, begins(num_q), begins(LENGTHS), max(num_q), 100, scale)
    direction = torch.randn_like(y)
    (y * direction).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, weight)]
    want = attention_by_image(*exact, num_q, LENGTHS)
    (want * direction[: sum(num_q)].double()).sum().backward()
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    assert relative_error(y[: sum(num_q)].double(), want) < bound
    assert (y[sum(num_q) :] == 0).all()
    got = [q.grad if num_q != LENGTHS else qkv.grad[:, 0], qkv.grad[:, 1], qkv.grad[:, 2], weight.grad]
    assert_same([mine.double() for mine in got], [t.grad for t in exact], bound)


@pytest.mark.parametrize("shift", [-200.0, pytest.param(200.0, marks=pytest.mark.slow)])
def test_attention_with_all_scores_shifted_has_the_same_gradients(shift: float) -> None:
    """A bias of the keys may add the same to all scores of a query: softmax does not see it, but exponentials may."""
    lengths = (5, 20)
    slots, dim, bounds = sum(lengths), 16, begins(lengths)
    qkv = torch.randn(slots, 3, 2, dim, device=DEVICE)
    qkv[:, 0, :, 0], qkv[:, 1, :, 0] = 1.0, 0.0
    direction, found = torch.randn(slots, 2, dim, device=DEVICE), []
    for added in (0.0, shift):
        inputs = qkv.clone()
        inputs[:, 1, :, 0] += added
        inputs.requires_grad_()
        y = kernels.attention(*inputs.unbind(1), None, False, bounds, bounds, 20, 20, 1.0)
        (y * direction).sum().backward()
        found.append((y, inputs.grad[:, 0, :, 1:], inputs.grad[:, 1:]))
    for plain, shifted in zip(*found, strict=True):
        assert relative_error(shifted, plain) < 1e-3


@pytest.mark.parametrize("max_tiles", [65535, 2])
def test_gelu_is_the_exact_one(max_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with more rows than a grid has programs for."""
    monkeypatch.setattr(kernels.activation, "MAX_TILES", max_tiles)
    x = (4 * torch.randn(13, 1000, device=DEVICE)).requires_grad_()
    direction, found = torch.randn_like(x), []
    for function in (kernels.gelu, torch.nn.functional.gelu):
        y = function(x)
        found.append((y, *torch.autograd.grad((y * direction).sum(), x)))
    assert all(torch.allclose(got, want, atol=2e-6) for got, want in zip(*found, strict=True))


@pytest.mark.parametrize(("rows", "width"), [(0, 16), (5, 16), (300, 200)])
def test_a_linear_layer_has_the_usual_gradients(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows, and with more than its parts have; without rows they are 0."""
    monkeypatch.setattr(kernels.sums, "PARTS", 2)
    shapes, found = ((rows, 8), (width, 8), (width,)), []
    inputs = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]
    direction = torch.randn(rows, width, device=DEVICE)
    for function in (kernels.linear, torch.nn.functional.linear):
        y = function(*inputs)
        found.append([y, *torch.autograd.grad((y * direction).sum(), inputs)])
    assert_same(*found, 1e-5)


@pytest.mark.parametrize("width", [32, 96])
def test_a_norm_adds_its_shift_first(width: int) -> None:
    x, shift = torch.randn(7, width, device=DEVICE), 3 * torch.randn(width, device=DEVICE)
    weight, bias = torch.randn(2, width, device=DEVICE)
    y = torch.full_like(x, torch.nan)
    kernels.normalize_into(x, shift, weight, bias, 1e-5, y)
    assert torch.allclose(y, torch.nn.functional.layer_norm(x + shift, (width,), weight, bias, 1e-5), atol=1e-5)
    kernels.normalize_into(x, shift, None, None, 0.0, y)
    assert torch.allclose(y, x + shift)
    before = x.clone()
    kernels.normalize_then_add(x, weight, bias, 1e-5, shift, y)
    assert torch.allclose(y, torch.nn.functional.layer_norm(before, (width,), weight, bias, 1e-5), atol=1e-5)
    assert torch.allclose(x, before + shift)


@pytest.mark.parametrize("scaled", [False, True])
def test_moments_are_those_of_pooling(scaled: bool) -> None:
    image = 5 + torch.randn(2, 3, 16, 24, device=DEVICE)
    affine = torch.rand(2, 3, 1, 1, device=DEVICE) if scaled else (None, None)
    mean, variance = kernels.pool_moments(image.transpose(2, 3), *affine, 4)
    seen = (image * affine[0] + affine[1] if scaled else image).transpose(2, 3).double()
    pooled = torch.nn.functional.avg_pool2d(seen, 4)
    spread = (torch.nn.functional.avg_pool2d(seen**2, 4) - pooled**2).mean(1, keepdim=True)
    assert torch.allclose(mean.double(), pooled, atol=1e-5)
    assert torch.allclose(variance.double(), spread, atol=1e-5)


def test_pixels_of_prefix_tokens_are_zero_and_others_are_as_without_prefix() -> None:
    image, grid = torch.randn(2, 3, 16, 16, device=DEVICE), ScaleGrid(16, 16, fine=4, coarse=8)
    token = torch.tensor([0, 1, 2, 3, 6, 9, 1, 5], device=DEVICE)  # two prefix tokens, four cells, then patches
    which = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1], device=DEVICE)
    pixels = torch.full((8, 48), torch.nan, device=DEVICE)
    kernels.gather_pixels_into(image, which, token, 2, grid.fine, grid.k, pixels)
    real = token >= 2
    assert (pixels[~real] == 0).all()
    assert torch.allclose(pixels[real], patch_pixels(image, grid)[which[real], token[real] - 2], atol=1e-6)


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_that_is_not_here() -> None:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "PYTHONWARNINGS": "ignore"}
    script = Path(__file__).parents[2] / "compile_kernels.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("_kernel") >= 6
