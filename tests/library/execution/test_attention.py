"""Attention of ragged images is Eq. 10: images of like length in one call, image by image, and by Triton's kernel."""

from dataclasses import replace

import pytest
import torch
from cases import pairwise
from reference import attention_by_image
from tiny import assert_same, interpretable

from msvit.execution import attend, attention
from msvit.types import PackedLayout, ScaleGrid

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter has no bfloat16
LENGTHS = [5, 9, 30, 8, 9, 3, 29, 1, 9]
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5, HALF: 1e-2}


def packed_layout(
    lengths: list[int], dtype: torch.dtype, device: str = "cpu", sizes: bool = False, holes: bool = False,
    spare: int = 0,
) -> PackedLayout:  # fmt: skip
    """With sizes of merged tokens, with tokens of weight 0 (but one of each image), with slots to spare."""
    num, slots = torch.tensor(lengths), sum(lengths) + spare
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    image = torch.cat([torch.arange(len(num)).repeat_interleave(num), num.new_zeros(spare)])
    weight = (torch.rand(slots) < (0.6 if holes else 2)).double()
    weight[cu_seqlens[:-1] + (num > 1)] = 1
    weight[sum(lengths) :] = 0
    return PackedLayout(
        grid=ScaleGrid(8, 8, fine=2, coarse=4), num_prefix=1, batch=len(num), token=torch.zeros_like(image).to(device),
        image=image.to(device), weight=weight.to(device, dtype).requires_grad_(), cu_seqlens=cu_seqlens.to(device),
        max_len=100, has_padding=spare > 0, size=torch.randint(1, 5, (slots,)).to(device, dtype) if sizes else None,
        has_inactive=holes,
    )  # fmt: skip


def is_a_case(backend: str, num_queries: int | None, dim: int, dtype: torch.dtype, *about: bool) -> bool:
    return (interpretable() and dtype is not torch.float64) if backend == "triton" else dtype is torch.float64


@pairwise(
    is_a_case,
    backend=["by image", "by bucket", "triton"], num_queries=[None, 2], dim=[16, 64],
    dtype=[torch.float64, torch.float32, HALF], sizes=[False, True], holes=[False, True], spare=[False, True],
)  # fmt: skip
def test_attention_of_ragged_images_is_the_definition(
    backend: str, num_queries: int | None, dim: int, dtype: torch.dtype, sizes: bool, holes: bool, spare: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Values with and without gradient, and all gradients."""
    for name in ("SHORT", "SHORT_TRAINED"):
        monkeypatch.setattr(attention, name, 1000 if backend == "by bucket" else 0)
    lengths, device = ([5, 70, 1], DEVICE) if backend == "triton" else (LENGTHS, "cpu")
    layout = packed_layout(lengths, torch.promote_types(dtype, torch.float32), device, sizes, holes, 11 if spare else 0)
    slots, queries = len(layout.token), lengths if num_queries is None else [num_queries] * len(lengths)
    num = slots if num_queries is None else sum(queries)
    q, k, v = (torch.randn(n, 2, dim, device=device).to(dtype).requires_grad_() for n in (num, slots, slots))
    inputs = (q, k, v, layout.weight)
    with attention.force_backend("triton" if backend == "triton" else "sdpa"):
        y = attend(q, k, v, layout, num_queries)
        with torch.no_grad():
            plain = attend(q, k, v, layout, num_queries)
    assert y.shape == q.shape
    assert num_queries or not y[sum(lengths) :].any()
    exact = [t.detach().double().requires_grad_() for t in inputs]
    weight = attention.key_weight(replace(layout, weight=exact[3]))
    want = attention_by_image(*exact[:3], weight, queries, lengths)
    y, plain, direction = y[: len(want)], plain[: len(want)], torch.randn_like(want)
    grads = torch.autograd.grad((y * direction).sum(), inputs)
    wanted = torch.autograd.grad(want, exact, direction)
    assert_same([t.double() for t in (y, plain, *grads)], [want, want, *wanted], BOUNDS[dtype])


@torch.no_grad()
def test_padding_is_zero_whatever_a_fused_kernel_leaves_there(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = packed_layout(LENGTHS, torch.float64, spare=4)
    q, k, v = torch.randn(3, len(layout.token), 2, 8, dtype=torch.float64)
    monkeypatch.setattr(attention, "varlen_attn", lambda q, *given, **more: torch.full_like(q, torch.nan))
    with attention.force_backend("varlen"):
        y = attend(q, k, v, layout)
    assert y[: sum(LENGTHS)].isnan().all()
    assert (y[sum(LENGTHS) :] == 0).all()
