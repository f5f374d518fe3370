"""Products with bias, GELU or residual, by PyTorch and, on a GPU, by cuBLASLt without a workspace."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import relative_error
from torch import Tensor

from msvit.compiling import products
from msvit.compiling.products import Library, find_library, fits, multiply

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_there_is_no_library() -> None:
    assert find_library.__wrapped__(0) is None


@pytest.mark.parametrize("wrong", [None, "declines", "transposed", "no bias", "does not add"])
def test_a_library_that_computes_something_else_is_not_used(wrong: str | None) -> None:
    class Other:
        def multiply(self, x: Tensor, weight: Tensor, y: Tensor, bias: Tensor | None, gelu: bool, add: bool) -> bool:
            weight = weight.T.reshape(weight.shape) if wrong == "transposed" else weight
            found = x @ weight.T + (0 if bias is None or wrong == "no bias" else bias)
            y.copy_(y + found if add and wrong != "does not add" else found)
            return wrong != "declines"

    assert products.is_right(Other(), "cpu") == (wrong is None)


def test_what_a_library_could_not_check_is_left_to_pytorch() -> None:
    """Of another dtype or shape, or not contiguous: it sees pointers only."""
    x, weight, bias, y = (aligned(t) for t in inputs(4, torch.bfloat16, "cpu"))
    assert fits(x, weight, y)
    assert fits(x, weight, y, bias)
    assert not fits(x.float(), weight.float(), y.float())
    assert not fits(x, weight.float(), y)
    assert not fits(x, weight, y, bias.float())
    assert not fits(x, aligned(weight[:, :32].contiguous()), y)
    assert not fits(x, weight, aligned(y[:3].contiguous()))
    assert not fits(x, weight, y, aligned(bias[:1].contiguous()))
    assert not fits(x, weight.T.contiguous().T, y)
    assert not fits(x, weight, y, bias.to("meta"))


def aligned(tensor: Tensor) -> Tensor:
    """A copy at a multiple of 256 bytes."""
    memory = torch.empty(tensor.numel() + 256, dtype=tensor.dtype)
    start = (-memory.data_ptr() % products.OPERAND_BYTES) // tensor.element_size()
    return memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


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
    assert find_library(0) is not None  # before it is watched: it is tried when it is found
    done, own = [], Library.multiply

    def watched(*args: Any) -> bool:
        done.append(own(*args))
        return done[-1]

    monkeypatch.setattr(Library, "multiply", watched)
    got, want = multiplied(kind, x, *others)
    assert relative_error(got, want) < 1e-2
    assert done == [True] * (case == "whole")


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
