"""Attention of ragged images is Eq. 10: images of like length in one call, image by image, and by Triton's kernel."""

from dataclasses import replace

import pytest
import torch
from cases import pairwise
from reference import attention_by_image
from tiny import DEVICE, HALF, assert_same, interpretable
from torch import Tensor

from msvit.execution import attend, attention
from msvit.execution.layout import packed_layout
from msvit.types import PackedLayout, ScaleGrid

LENGTHS = [5, 9, 30, 8, 9, 3, 29, 1, 9]
FORMS = [(8, torch.float64), (16, torch.float32), (64, torch.float32), (16, HALF), (64, HALF)]  # of heads
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5, HALF: 1e-2}


def ragged_layout(
    lengths: list[int], dtype: torch.dtype, device: str = "cpu", kind: str = "plain", spare: int = 0
) -> PackedLayout:
    """With sizes of merged tokens, with tokens of weight 0 (but one of each image), with slots to spare."""
    num, slots = torch.tensor(lengths), sum(lengths) + spare
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    image = torch.cat([torch.arange(len(num)).repeat_interleave(num), num.new_zeros(spare)])
    weight = (torch.rand(slots) < (0.6 if "holes" in kind else 2)).double()
    weight[cu_seqlens[:-1] + (num > 1)] = 1
    weight[sum(lengths) :] = 0
    size = torch.randint(1, 5, (slots,)).to(device, dtype) if "sizes" in kind else None
    weight, token = weight.to(device, dtype).requires_grad_(), torch.zeros_like(image).to(device)
    given = (token, image.to(device), weight, cu_seqlens.to(device), spare > 0, "holes" in kind, size)
    return packed_layout(ScaleGrid(20, 20, fine=2, coarse=4), 1, *given)


def is_a_case(backend: str, num_queries: int | None, form: tuple[int, torch.dtype], kind: str, spare: int) -> bool:
    if kind == "shifted" and form[1] is HALF:
        return False
    if not backend.startswith("triton"):
        return form == FORMS[0]
    return interpretable() and form != FORMS[0] and spare > 0 and (backend == "triton" or not num_queries)


@pairwise(
    is_a_case,
    backend=["by image", "by bucket", "triton", "triton, of one tensor"], num_queries=[None, 2], form=FORMS,
    kind=["plain", "sizes", "holes", "sizes and holes", "shifted"], spare=[0, 11],
)  # fmt: skip
def test_attention_of_ragged_images_is_the_definition(
    backend: str, num_queries: int | None, form: tuple[int, torch.dtype], kind: str, spare: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Values with and without gradient, and all gradients; what is in slots to spare is nothing, not even if NaN.

    "Shifted": a bias of the keys may add the same to all scores of a query. Exponentials see it, and softmax does not.
    """
    for name in ("SHORT", "SHORT_TRAINED"):
        monkeypatch.setattr(attention, name, 1000 if backend == "by bucket" else 0)
    (dim, dtype), ours = form, backend.startswith("triton")
    lengths, device = ([5, 70, 1], DEVICE) if ours else (LENGTHS, "cpu")
    layout = ragged_layout(lengths, torch.promote_types(dtype, torch.float32), device, kind, spare)
    slots, queries = len(layout.token), lengths if num_queries is None else [num_queries] * len(lengths)
    num = slots if num_queries is None else sum(queries)
    q, k, v = (torch.randn(n, 2, dim, device=device).to(dtype) for n in (num, slots, slots))
    if kind == "shifted":
        q[..., 0], k[..., 0] = 1.0, dim**0.5 * torch.tensor([-200.0, 200.0], device=device)
    bound = BOUNDS[dtype] * (100 if kind == "shifted" else 1)
    for t in (q, k, v) if num == slots else (k, v):
        t[sum(lengths) :] = torch.nan
    inputs = [t.requires_grad_() for t in (q, k, v, layout.weight)]
    bias = torch.zeros(6 * dim, dtype=dtype, device=device, requires_grad=True)

    def run() -> Tensor:
        if backend == "triton, of one tensor":
            return attention.attend_among(torch.stack([q, k, v], 1), bias, layout)
        return attend(q, k, v, layout, num_queries)

    with attention.force_backend("triton" if ours else "sdpa"):
        y = run()
        with torch.no_grad():
            plain = run()
    assert y.shape == q.shape
    assert num_queries or not y[sum(lengths) :].any()
    exact = [t.detach().double().requires_grad_() for t in inputs]
    weight = attention.key_weight(replace(layout, weight=exact[3]))
    want = attention_by_image(*exact[:3], weight, queries, lengths)
    y, plain, direction = y[: len(want)], plain[: len(want)], torch.randn_like(want)
    *grads, of_bias = torch.autograd.grad((y * direction).sum(), [*inputs, bias], allow_unused=True)
    wanted = torch.autograd.grad(want, exact, direction)
    assert_same([t.double() for t in (y, plain, *grads)], [want, want, *wanted], bound)
    if backend == "triton, of one tensor":  # the bias, which is in it already, gets the sum
        of_qkv = torch.stack(wanted[:3], 1)
        summed, scale = of_qkv.sum(0).flatten(), of_qkv.abs().sum(0).mean()  # that of the keys is 0 in theory
        assert (of_bias.double() - summed).abs().max() < bound * scale
        assert of_bias.dtype is dtype


@torch.no_grad()
def test_padding_is_zero_whatever_a_fused_kernel_leaves_there(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ragged_layout(LENGTHS, torch.float64, spare=4)
    q, k, v = torch.randn(3, len(layout.token), 2, 8, dtype=torch.float64)
    monkeypatch.setattr(attention, "varlen_attn", lambda q, *given, **more: torch.full_like(q, torch.nan))
    with attention.force_backend("varlen"):
        y = attend(q, k, v, layout)
    assert y[: sum(LENGTHS)].isnan().all()
    assert (y[sum(LENGTHS) :] == 0).all()
