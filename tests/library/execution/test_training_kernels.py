"""Kernels of 16-bit training that compute gradients of biases on their way, against plain torch (see test_kernels.py).

Sums are over few parts here, so that each has several tiles of rows, the last of which is not full; on a GPU there
are also as many parts and rows as in training.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import each_once
from reference import attention_by_image
from tiny import assert_same, interpretable, relative_error
from torch import Tensor

from msvit.fast.find_kernels import kernels

pytestmark = pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16
LENGTHS = (5, 70, 1)
SPARE = 11


@pytest.fixture(autouse=True)
def _few_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(kernels.activation, "PARTS", 2)
    monkeypatch.setattr(kernels.norms, "_tiles_backward", lambda block: kernels.norms.Tiles(rows=4, warps=4, parts=2))


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]


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


@pytest.mark.parametrize(("shape", "dtype"), [((3, 48), HALF), ((7, 9, 96), torch.float32), ((70, 384), torch.float32)])
def test_gelu_adds_a_bias_and_has_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = drawn(shape, shape[-1:], dtype=dtype)
    y = kernels.gelu(*inputs)
    direction = torch.randn_like(y)
    got = [y, *torch.autograd.grad((y * direction).sum(), inputs)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = F.gelu(exact[0] + exact[1])
    bound = 1e-5 if dtype is torch.float32 else 3e-3
    wanted = [want, *torch.autograd.grad((want * direction).sum(), exact)]
    assert_same([t.double() for t in got], wanted, bound)
    assert [t.dtype for t in got] == [dtype] * 3


@each_once(case=[(3, 32, True), (53, 48, True), (21, 96, False)], follows=["norm", "both", "sum"])
def test_a_norm_of_a_sum_has_the_usual_gradients(case: tuple[int, int, bool], follows: str) -> None:
    """With the bias of the branch or without, and if nothing follows the sum or the norm."""
    rows, width, added = case
    x, u, weight, bias = drawn((rows, width), (rows, width), (width,), (width,))
    (shift,) = drawn((width,))
    inputs = [x, u, weight, bias, *([shift] if added else [])]
    directions, found = torch.randn(2, rows, width, device=DEVICE), []
    summed = x + u + shift if added else x + u
    for total, y in (
        kernels.add_norm(x, u, shift if added else None, weight, bias, 1e-5, torch.float32)[:2],
        (summed, F.layer_norm(summed, (width,), weight, bias, 1e-5)),
    ):
        loss = sum((t * d).sum() for t, d, name in zip((total, y), directions, ("norm", "sum"), strict=True)
                   if follows != name)  # fmt: skip
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        found.append([total, y, *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True))])
    assert_same(*found, 1e-5)


def test_a_norm_of_a_sum_keeps_the_dtypes_of_its_inputs() -> None:
    """Float32 for the sum and the norm's weights, 16 bits for the branch and its bias."""
    x, weight, bias = drawn((9, 48), (48,), (48,))
    u, added = drawn((9, 48), (48,), dtype=HALF)
    total, y, *_ = kernels.add_norm(x, u, added, weight, bias, 1e-5, HALF)
    (total.square().sum() + y.float().square().sum()).backward()
    assert (total.dtype, y.dtype) == (torch.float32, HALF)
    exact = [t.detach().double().requires_grad_() for t in (x, u, added, weight, bias)]
    want = exact[0] + exact[1] + exact[2]
    (want.square().sum() + F.layer_norm(want, (48,), *exact[3:], 1e-5).square().sum()).backward()
    grads: list[Any] = [t.grad for t in (x, u, added, weight, bias)]
    assert [g.dtype for g in grads] == [torch.float32, HALF, HALF, torch.float32, torch.float32]
    assert_same([g.double() for g in grads], [t.grad for t in exact], 5e-3)


def begins(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "has_key_weights"),
    [(2, 16, torch.float32, False), (1, 32, HALF, True)],
)
def test_attention_of_one_tensor_and_the_gradient_of_its_bias(
    heads: int, dim: int, dtype: torch.dtype, has_key_weights: bool
) -> None:
    """Images of one token and of more than a program holds; padding has no gradient, not even of NaN."""
    slots, real = sum(LENGTHS) + SPARE, sum(LENGTHS)
    (qkv,) = drawn((slots, 3, heads, dim), dtype=dtype)
    with torch.no_grad():
        qkv[real:] = torch.nan
    (bias,) = drawn((3 * heads * dim,), dtype=dtype)
    highest = 5 if has_key_weights else 2
    weight = torch.randint(1, highest, (slots,), device=DEVICE).float()
    weight.requires_grad_()
    bounds = begins(LENGTHS)
    y = kernels.self_attention(qkv, bias, weight, has_key_weights, bounds, 100, dim**-0.5)
    direction = torch.randn_like(y)
    (y * direction).sum().backward()
    exact = [t.detach()[:real].double().requires_grad_() for t in (*qkv.unbind(1), weight)]
    want = attention_by_image(*exact, LENGTHS, LENGTHS)
    (want * direction[:real].double()).sum().backward()
    of_qkv = torch.stack([t.grad for t in exact[:3]], 1)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    assert (y[real:] == 0).all()
    assert (qkv.grad[real:] == 0).all()
    assert (weight.grad[real:] == 0).all()
    got = [y[:real], qkv.grad[:real], weight.grad[:real]]
    assert_same([t.double() for t in got], [want, of_qkv, exact[3].grad], bound)
    summed, scale = of_qkv.sum(0).flatten(), of_qkv.abs().sum(0).flatten().mean()  # that of the keys is 0 in theory
    assert ((bias.grad.double() - summed).abs().max() / scale) < bound
    assert bias.grad.dtype is dtype


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
    slots, real, bounds = sum(lengths) + 300, sum(lengths), begins(lengths)
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
