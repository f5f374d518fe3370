"""LayerNorm and GELU to rows in FP8, against plain torch: on a GPU, or else in Triton's interpreter.

The interpreter converts to FP8 wrongly (7.9 becomes 4, NaN 384), so that there the rows are written in float32, and
what is compared are the numbers before they are rounded.
"""

import pytest
import torch
import torch.nn.functional as F
from tiny import interpretable
from torch import Tensor

from msvit.fast.find_kernels import kernels
from msvit.fast.fp8_encoder import FP8, quantize_rows

pytestmark = [
    pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy, about NaN
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WRITTEN = FP8 if DEVICE == "cuda" else torch.float32
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


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


@pytest.mark.parametrize(("rows", "width"), [(67, 64), (3, 48), (1, 2064)])
def test_gelu_in_fp8_is_the_tanh_approximation(rows: int, width: int) -> None:
    x = (4 * torch.randn(rows, width, device=DEVICE)).to(HALF)
    y, scale = empty_rows(rows, width)
    kernels.gelu_fp8_into(x, y, scale)
    assert_rows(y, scale, F.gelu(x.float(), approximate="tanh"))


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
