"""Products with bias, GELU or residual, by PyTorch and, on a GPU, by cuBLASLt without a workspace."""

import pytest
import torch
import torch.nn.functional as F
from tiny import relative_error
from torch import Tensor

from msvit.compiling import products
from msvit.compiling.products import Library, find_library, multiply

KINDS = ["plain", "bias", "gelu", "add"]


def multiplied(kind: str, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What it is, and what it should be."""
    wide = [t.double() for t in (x, weight, bias, y)]
    want = wide[0] @ wide[1].T + {"plain": 0, "add": wide[3]}.get(kind, wide[2])
    multiply(x, weight, y, bias if kind in ("bias", "gelu") else None, gelu=kind == "gelu", add=kind == "add")
    return y.double(), F.gelu(want, approximate="tanh") if kind == "gelu" else want


def inputs(rows: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    shapes = ((rows, 48), (64, 48), (64,), (rows, 64))
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


@pytest.mark.parametrize("kind", KINDS)
def test_products_on_a_cpu(kind: str) -> None:
    got, want = multiplied(kind, *inputs(5, torch.float32, "cpu"))
    assert relative_error(got, want) < (1e-3 if kind == "gelu" else 1e-5)  # a CPU has the exact one


def test_without_a_device_there_is_no_library() -> None:
    if not torch.cuda.is_available():
        assert find_library.__wrapped__(0) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["whole", "unaligned", "few rows"])
def test_products_on_a_gpu(
    dtype: torch.dtype, kind: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library where its conditions are met, else by PyTorch."""
    rows = products.LEAST_ROWS - (case == "few rows")
    x, *others = inputs(rows, dtype, "cuda")
    if case == "unaligned":
        x = torch.cat([x.flatten()[:8], x.flatten()])[8:].view(x.shape)
    calls, own = [], Library.multiply
    monkeypatch.setattr(Library, "multiply", lambda *args: calls.append(args) or own(*args))
    got, want = multiplied(kind, x, *others)
    assert relative_error(got, want) < 1e-2
    assert len(calls) == (case == "whole")


@pytest.mark.gpu
def test_a_captured_product_follows_its_inputs() -> None:
    x, weight, bias, y = inputs(4096, torch.bfloat16, "cuda")
    assert find_library(0) is not None
    multiply(x, weight, y, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(x, weight, y, bias)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert relative_error(y.double(), x.double() @ weight.double().T + bias.double()) < 1e-2
