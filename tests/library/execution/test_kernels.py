"""Every Triton kernel against plain torch: on a GPU, or else in Triton's interpreter (see conftest.py).

Sums are over few parts here, so that each has several tiles of rows, the last of which is not full; on a GPU there
are also as many parts and rows as in training.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import each_once, pairwise
from tiny import DEVICE, HALF, assert_same, mixed_mask, needs_kernels, relative_error
from torch import Tensor

from msvit.execution.layout import pack_indices
from msvit.fast import gates as fast_gates
from msvit.fast.find_kernels import kernels
from msvit.fast.fp8_encoder import FP8, quantize_rows
from msvit.gates import ContextGate, LearnedGate
from msvit.gates.logits import LogitGate
from msvit.tokens.patches import patch_pixels
from msvit.types import ScaleGrid

pytestmark = needs_kernels
GATE_BOUND = 0.05 if DEVICE == "cuda" else 0.02
# The interpreter converts to FP8 wrongly (7.9 becomes 4, NaN 384): there rows are compared before they are rounded.
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, about NaN and overflow
WRITTEN = FP8 if DEVICE == "cuda" else torch.float32


@pytest.fixture(autouse=True)
def _few_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(kernels.activation, "PARTS", 2)
    monkeypatch.setattr(kernels.norms, "_tiles_backward", lambda block: kernels.norms.Tiles(rows=4, warps=4, parts=2))


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]


@pairwise(cells=[(2, 2, 2), (2, 7, 7), (3, 2, 3), (4, 3, 1)], has_padding=[0, 5, 1500], num_prefix=[0, 1, 5])
def test_lay_out(cells: tuple[int, int, int], has_padding: int, num_prefix: int) -> None:
    k, rows, columns = cells
    grid = ScaleGrid(rows * k * 4, columns * k * 4, fine=4, coarse=k * 4)
    mask = mixed_mask(4, rows, columns, torch.float32)
    slots = 4 * (num_prefix + grid.num_cells) + int(mask.sum()) * (k * k - 1) + has_padding
    want = pack_indices(mask, grid, num_prefix, slots)
    got = kernels.pack_indices(mask.to(DEVICE), num_prefix, rows, columns, k, slots)
    assert all(torch.equal(g.cpu(), w) for g, w in zip(got, want, strict=True))


def by_address(image: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """What to pass so that an image is read where it lies: of another one shape, strides and dtype, and the address."""
    if not wanted:
        return image, None
    return torch.full_like(image, torch.nan), torch.tensor(image.data_ptr(), device=DEVICE)


@pairwise(
    size=[(4, 2), (14, 2), (3, 3), (8, 4)],
    order=[torch.contiguous_format, torch.channels_last],
    addressed=[False, True],
)
def test_pixels_are_gathered_and_those_of_prefix_tokens_are_zero(
    size: tuple[int, int], order: torch.memory_format, addressed: bool
) -> None:
    side, k = size
    grid = ScaleGrid(2 * side * k, 3 * side * k, fine=side, coarse=side * k)
    image = torch.randn(3, 3, grid.height, grid.width, device=DEVICE).contiguous(memory_format=order)
    which, patch = torch.randint(3, (15,), device=DEVICE), torch.randint(grid.num_ids, (15,), device=DEVICE)
    want = patch_pixels(image, grid)[which, patch]
    given, address = by_address(image, addressed)
    got = kernels.gather_pixels(given, which, patch, side, k, torch.float32, address)
    assert torch.allclose(got, want, atol=1e-6)
    token, pixels = patch + 2, torch.full_like(want, torch.nan)
    token[:4] = torch.tensor([0, 1, 1, 0])  # of two prefix tokens
    kernels.gather_pixels_into(given, which, token, 2, side, k, pixels, address)
    assert (pixels[:4] == 0).all()
    assert torch.allclose(pixels[4:], want[4:], atol=1e-6)


@pytest.mark.parametrize(("scaled", "addressed"), [(False, False), (True, False), (False, True)])
def test_moments_are_those_of_pooling(scaled: bool, addressed: bool) -> None:
    image = 5 + torch.randn(2, 3, 16, 24, device=DEVICE)
    affine = torch.rand(2, 3, 1, 1, device=DEVICE) if scaled else (None, None)
    given, address = by_address(image, addressed)
    mean, variance = kernels.pool_moments(given.transpose(2, 3), *affine, 4, address)
    seen = (image * affine[0] + affine[1] if scaled else image).transpose(2, 3).double()
    pooled = F.avg_pool2d(seen, 4)
    spread = (F.avg_pool2d(seen**2, 4) - pooled**2).mean(1, keepdim=True)
    assert torch.allclose(mean.double(), pooled, atol=1e-5)
    assert torch.allclose(variance.double(), spread, atol=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(0, 16), (5, 16), (300, 200)])
def test_a_linear_layer_has_the_usual_gradients(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows, and with more than its parts have; without rows they are 0."""
    monkeypatch.setattr(kernels.sums, "PARTS", 2)
    shapes, found = ((rows, 8), (width, 8), (width,)), []
    inputs = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]
    direction = torch.randn(rows, width, device=DEVICE)
    for function in (kernels.linear, F.linear):
        y = function(*inputs)
        found.append([y, *torch.autograd.grad((y * direction).sum(), inputs)])
    assert_same(*found, 1e-5)


@pytest.mark.parametrize("width", [32, 96])
def test_a_norm_adds_its_shift_first(width: int) -> None:
    x, shift = torch.randn(7, width, device=DEVICE), 3 * torch.randn(width, device=DEVICE)
    weight, bias = torch.randn(2, width, device=DEVICE)
    y = torch.full_like(x, torch.nan)
    kernels.normalize_into(x, shift, weight, bias, 1e-5, y)
    assert torch.allclose(y, F.layer_norm(x + shift, (width,), weight, bias, 1e-5), atol=1e-5)
    kernels.normalize_into(x, shift, None, None, 0.0, y)
    assert torch.allclose(y, x + shift)
    before = x.clone()
    kernels.normalize_then_add(x, weight, bias, 1e-5, shift, y)
    assert torch.allclose(y, F.layer_norm(before, (width,), weight, bias, 1e-5), atol=1e-5)
    assert torch.allclose(x, before + shift)


@pytest.mark.parametrize(("parts", "columns", "split"), [(1, 5, 5), (300, 48, 48), (131, 96, 64)])
def test_parts_are_summed_in_float32(parts: int, columns: int, split: int) -> None:
    """The sums of the first columns to one tensor, of the others to another of another dtype."""
    (x,) = drawn((parts, columns))
    first = torch.full((split,), torch.nan, device=DEVICE)
    second = torch.full((columns - split,), torch.nan, dtype=HALF, device=DEVICE) if split < columns else None
    kernels.sums.add_parts(x.detach(), first, second)
    want = x.detach().double().sum(0)
    assert relative_error(first.double(), want[:split]) < 1e-6
    assert second is None or relative_error(second.double(), want[split:]) < 2e-3


@pytest.mark.parametrize(
    ("shape", "dtype", "adds", "max_tiles"),
    [((13, 1000), torch.float32, False, 2), ((3, 48), HALF, True, 65535), ((7, 9, 96), torch.float32, True, 65535)]
    + [((70, 384), torch.float32, adds, 65535) for adds in (False, True)],
)
def test_gelu_is_the_exact_one_and_adds_a_bias_with_its_gradient(
    shape: tuple[int, ...], dtype: torch.dtype, adds: bool, max_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with more rows than a grid has programs for."""
    monkeypatch.setattr(kernels.activation, "MAX_TILES", max_tiles)
    inputs = drawn(shape, shape[-1:], dtype=dtype)[: 2 if adds else 1]
    y = kernels.gelu(*inputs)
    direction = torch.randn_like(y)
    got = [y, *torch.autograd.grad((y * direction).sum(), inputs)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = F.gelu(exact[0] + exact[1] if adds else exact[0])
    bound = 1e-5 if dtype is torch.float32 else 3e-3
    wanted = [want, *torch.autograd.grad((want * direction).sum(), exact)]
    assert_same([t.double() for t in got], wanted, bound)
    assert {t.dtype for t in got} == {dtype}


@each_once(
    case=[(3, 32, True, torch.float32), (53, 48, True, torch.float32), (21, 96, False, torch.float32),
          (9, 48, True, HALF)],
    follows=["norm", "both", "sum"],
)  # fmt: skip
def test_a_norm_of_a_sum_has_the_usual_gradients(case: tuple[int, int, bool, torch.dtype], follows: str) -> None:
    """With the bias of the branch or without, if nothing follows the sum or the norm, the branch in 16 bits or not."""
    rows, width, adds, dtype = case
    x, weight, bias = drawn((rows, width), (width,), (width,))
    u, shift = drawn((rows, width), (width,), dtype=dtype)
    inputs = [x, u, weight, bias, *([shift] if adds else [])]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    summed, directions, found = sum(exact[4:], exact[0] + exact[1]), torch.randn(2, rows, width, device=DEVICE), []
    for leaves, total, y in (
        (inputs, *kernels.add_norm(x, u, shift if adds else None, weight, bias, 1e-5, dtype)[:2]),
        (exact, summed, F.layer_norm(summed, (width,), *exact[2:4], 1e-5)),
    ):
        loss = sum((t * d).sum() for t, d, name in zip((total, y), directions, ("norm", "sum"), strict=True)
                   if follows != name)  # fmt: skip
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        found.append([total, y, *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True))])
    assert [t.dtype for t in found[0]] == [torch.float32, dtype, *(t.dtype for t in inputs)]
    assert_same([t.double() for t in found[0]], found[1], 1e-5 if dtype is torch.float32 else 5e-3)


def assert_rows(y: Tensor, scale: Tensor, want: Tensor) -> None:
    """That the largest number of each row has become 448, and others the nearest number that there is."""
    assert torch.allclose(448 * scale, want.abs().amax(1, keepdim=True), rtol=1e-5)
    exact = want / scale
    half_a_step = (exact.abs() / 16).clamp(min=2**-10) if y.dtype is FP8 else 1e-5 * exact.abs()
    assert ((y.float() - exact).abs() <= 1.01 * half_a_step + 1e-3).all()
    assert torch.allclose(y.float().abs().amax(1), torch.full_like(scale[:, 0], 448.0), rtol=1e-5)


def empty_rows(rows: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, width, device=DEVICE).to(WRITTEN), torch.full((rows, 1), torch.nan, device=DEVICE)


@pytest.mark.parametrize(("rows", "width"), [(67, 32), (3, 48), (1, 1040)])
@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_in_fp8_adds_to_the_residual_first_and_its_shift_then(rows: int, width: int, adds: bool) -> None:
    x, added = 3 * torch.randn(2, rows, width, device=DEVICE)
    shift, weight, bias = torch.randn(3, width, device=DEVICE)
    total = x + added if adds else x.clone()
    y, scale = empty_rows(rows, width)
    kernels.normalize_fp8_into(x, added if adds else None, shift, weight, bias, 1e-5, y, scale)
    assert torch.equal(x, total)
    assert_rows(y, scale, F.layer_norm(total + shift, (width,), weight, bias, 1e-5))


@QUIET
@pytest.mark.parametrize(("rows", "width"), [(67, 64), (3, 48), (1, 2064)])
def test_gelu_in_fp8_is_the_tanh_approximation(rows: int, width: int) -> None:
    x = (4 * torch.randn(rows, width, device=DEVICE)).to(HALF)
    y, scale = empty_rows(rows, width)
    kernels.gelu_fp8_into(x, y, scale)
    assert_rows(y, scale, F.gelu(x.float(), approximate="tanh"))


@QUIET
@pytest.mark.parametrize("name", ["norm", "gelu"])
def test_rows_with_nan_or_inf_have_nan_others_do_not_and_zeros_stay(name: str) -> None:
    x = torch.randn(5, 48, device=DEVICE)
    x[0, 7], x[1, 8], x[2, 9], x[3] = torch.nan, torch.inf, -torch.inf, 0.0
    y, scale = empty_rows(5, 48)
    if name == "gelu":
        kernels.gelu_fp8_into(x, y, scale)
    else:
        zeros, ones = torch.zeros(48, device=DEVICE), torch.ones(48, device=DEVICE)
        kernels.normalize_fp8_into(x, None, zeros, ones, zeros, 1e-5, y, scale)
    restored = y.float() * scale
    assert restored.isnan().any(1).tolist() == [True, True, True, False, False]
    assert (restored[3] == 0).all()
    assert restored[4].abs().max() > 0.1


def test_weights_in_fp8_have_a_scale_per_output_channel() -> None:
    weight = torch.randn(6, 48) * 10.0 ** torch.arange(-3, 3)[:, None]
    assert_rows(*quantize_rows(weight), weight)
    weight[0], weight[1, 3], weight[2, 3] = 0.0, torch.nan, torch.inf
    value, scale = quantize_rows(weight)
    assert (value.float() * scale).isnan().any(1).tolist() == [False, True, True, False, False, False]
    assert (value[0].float() == 0).all()


# Gates


def gate_in_half(kind: type[LogitGate], coarse: int, affine: bool, **options: Any) -> LogitGate:
    """With weights that all matter, each a number of 16 bits."""
    torch.manual_seed(0)
    gate = kind(coarse=coarse, grid=(2, 3), **options).eval()
    for parameter in gate.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter)).copy_(parameter.data.half())
    if affine:
        gate = gate.with_normalization(mean=(0.5,) * 3, std=(0.5,) * 3)
        gate = gate.for_normalization(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    return gate.to(DEVICE, HALF)


def cells_of(coarse: int, cells: tuple[int, int] = (2, 3)) -> Tensor:
    """The second is hardly textured, and far from 0."""
    image = torch.randn(2, 3, coarse * cells[0], coarse * cells[1], device=DEVICE).to(HALF)
    image[1] = image[1] / 16 + 3
    return image


MORE = {"widths": (16, 64, 16), "depth": 1}  # with more cells than a program takes
CASES = [
    (LearnedGate, 16, (2, 3), False, True, {"widths": (24, 32, 16)}),
    (LearnedGate, 8, (3, 2), True, False, {}),
    (ContextGate, 16, (2, 1), True, False, {"widths": (16, 16, 32), "depth": 1}),
    (ContextGate, 8, (3, 3), False, True, MORE),
    pytest.param(ContextGate, 8, (9, 8), False, False, MORE, marks=pytest.mark.slow),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "coarse", "cells", "affine", "few", "options"), CASES)
def test_logits_by_kernels_are_those_of_the_layers(
    kind: type[LogitGate], coarse: int, cells: tuple[int, int], affine: bool, few: bool, options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(kernels.gates, "FEW_PLACES", 1024 if few else 0)
    gate, image = gate_in_half(kind, coarse, affine, **options), cells_of(coarse, cells)
    monkeypatch.setattr(fast_gates, "runs_kernels", lambda image: False)
    want = gate.double()(image.double()).logits
    monkeypatch.setattr(fast_gates, "runs_kernels", lambda image: True)
    monkeypatch.setattr(kernels.gates, "MIN_CELLS", 1)
    gate = gate.to(HALF)
    assert fast_gates.has_kernels(gate, image)
    got = gate(image).logits
    for each in range(2):
        assert relative_error(got[each].double() - want.mean(), want[each] - want.mean()) < GATE_BOUND
    assert want.std() > 10 * (got - want).abs().max()
    address, like = torch.tensor(image.data_ptr(), device=DEVICE), torch.full_like(image, torch.nan)
    assert torch.equal(fast_gates.compute_logits(gate, like, address).float(), got)


class Adapted(torch.nn.Linear):
    """As a low-rank adapter would be."""


class Other(ContextGate):
    def logits(self, image: Tensor) -> Tensor:
        return super().logits(image) + 1


OTHERS = [
    (Other, {"coarse": 16}),
    (LearnedGate, {"coarse": 128}),  # a step of the kernel would be a part of a row
    (LearnedGate, {"coarse": 8, "widths": (200, 32, 16)}),
    (ContextGate, {"coarse": 8, "widths": (64, 128, 256)}),  # more shared memory than there is
    (ContextGate, {"coarse": 8, "in_chans": 8}),
    (ContextGate, {"coarse": 8, "depth": 0}),
    (LearnedGate, {"coarse": 8}),  # with a layer of another class
    (ContextGate, {"coarse": 8}),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "options"), OTHERS)
def test_what_kernels_do_not_take_runs_by_the_layers(
    kind: type[LogitGate], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_gates, "runs_kernels", lambda image: True)
    monkeypatch.setattr(kernels.gates, "MIN_CELLS", 1)
    for name in ("_cell_mlp_kernel", "_stem_kernel", "_downsample_kernel", "_mix_kernel"):
        monkeypatch.setattr(kernels.gates, name, None)
    gate = kind(**options).eval().to(DEVICE, HALF)
    if options == {"coarse": 8}:
        gate.head = Adapted(gate.head.in_features, 1).to(DEVICE, HALF)
    side = 2 * options["coarse"]
    assert gate(torch.randn(1, gate.in_chans, side, side, device=DEVICE).to(HALF)).logits.isfinite().all()


# For a GPU


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_that_is_not_here() -> None:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "PYTHONWARNINGS": "ignore"}
    script = Path(__file__).parents[2] / "compile_kernels.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("_kernel") >= 6


@pytest.mark.gpu
@pytest.mark.parametrize("width", [384, 768, 1000])
def test_many_rows_have_the_usual_gradients_and_always_the_same_bits(width: int) -> None:
    rows = 30_011
    x, weight, bias = drawn((rows, width), (width,), (width,))
    u, added = drawn((rows, width), (width,), dtype=HALF)
    norm_inputs, gelu_inputs = [x, u, added, weight, bias], [u, added]
    directions = torch.randn(2, rows, width, device=DEVICE)

    def gradients(wide: bool) -> list[Tensor]:
        inputs = [t.detach().double().requires_grad_() if wide else t for t in norm_inputs]
        x, u, added, weight, bias = inputs
        if wide:
            total = x + u + added
            y, z = F.layer_norm(total, (width,), weight, bias, 1e-5), F.gelu(u + added)
        else:
            total, y, *_ = kernels.add_norm(x, u, added, weight, bias, 1e-5, HALF)
            z = kernels.gelu(u, added)
        norm_grads = torch.autograd.grad((total * directions[0] + y * directions[1]).sum(), inputs)
        return [*norm_grads, *torch.autograd.grad((z * directions[1]).sum(), inputs[1:3])]

    got, again, want = gradients(False), gradients(False), gradients(True)
    assert all(map(torch.equal, got, again))
    assert_same([t.double() for t in got], want, 1e-2)
    assert [t.dtype for t in got] == [t.dtype for t in norm_inputs + gelu_inputs]


@pytest.mark.gpu
def test_attention_of_many_images_sums_its_bias_with_always_the_same_bits() -> None:
    lengths = tuple(torch.randint(1, 198, (256,)).tolist())
    slots, real = sum(lengths) + 300, sum(lengths)
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    (qkv,) = drawn((slots, 3, 6, 64), dtype=HALF)
    (bias,) = drawn((1152,), dtype=HALF)
    direction, found = torch.randn(slots, 6, 64, device=DEVICE).to(HALF), []
    for _ in range(2):
        y = kernels.self_attention(qkv, bias, None, False, bounds, 197, 0.125)
        found.append(torch.autograd.grad((y * direction).sum(), (qkv, bias)))
    assert all(map(torch.equal, *found))
    q, k, v = (t.detach().requires_grad_() for t in qkv.unbind(1))
    y = kernels.attention(q, k, v, None, False, bounds, bounds, 197, 197, 0.125)
    apart = torch.stack(torch.autograd.grad((y * direction).sum(), (q, k, v)), 1)
    of_qkv, of_bias = found[0]
    assert relative_error(of_qkv.double(), apart.double()) < 1e-3
    assert (of_qkv[real:] == 0).all()
    scale = apart.double().square().sum(0).sqrt().flatten()  # of sums of numbers of any sign
    assert ((of_bias.double() - apart.double().sum(0).flatten()).abs() / scale).max() < 0.05
