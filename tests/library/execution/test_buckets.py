"""Attention on a CPU: images of like length in one call, and image by image, are both Eq. 10."""

import pytest
import torch
from reference import attention_by_image
from tiny import assert_same

from msvit.execution import attend, attention
from msvit.types import PackedLayout, ScaleGrid

LENGTHS = [5, 9, 30, 8, 9, 3, 29, 1, 9]
SPARE = 4


def packed_layout(kind: str) -> PackedLayout:
    """`kind`: plain, sizes, holes or spare."""
    lengths = torch.tensor(LENGTHS)
    image = torch.arange(len(LENGTHS)).repeat_interleave(lengths)
    weight = torch.ones(len(image), dtype=torch.float64)
    size = None
    if kind == "sizes":
        size = torch.randint(1, 5, weight.shape).double()
    if kind == "holes":
        first = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
        weight = (torch.rand(len(image)) < 0.6).double().index_fill(0, first, 1.0)
    if kind == "spare":
        image, weight = (torch.cat([t, t.new_zeros(SPARE)]) for t in (image, weight))
    return PackedLayout(
        grid=ScaleGrid(8, 8, fine=2, coarse=4), num_prefix=1, batch=len(LENGTHS), token=torch.zeros_like(image),
        image=image, weight=weight.requires_grad_(), cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        max_len=100, has_padding=kind == "spare", size=size, has_inactive=kind == "holes",
    )  # fmt: skip


@pytest.mark.parametrize("num_queries", [None, 2])
@pytest.mark.parametrize("kind", ["plain", "sizes", "holes", "spare"])
@pytest.mark.parametrize("short", [0, 1000], ids=["by image", "by bucket"])
def test_attention_of_ragged_images_is_the_definition(
    kind: str, num_queries: int | None, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values with and without gradient, and all gradients."""
    monkeypatch.setattr(attention, "SHORT", short)
    monkeypatch.setattr(attention, "SHORT_TRAINED", short)
    layout, total = packed_layout(kind), sum(LENGTHS)
    slots, queries = len(layout.token), LENGTHS if num_queries is None else [num_queries] * len(LENGTHS)
    num = slots if num_queries is None else sum(queries)
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64, requires_grad=True) for n in (num, slots, slots))
    y = attend(q, k, v, layout, num_queries)
    assert y.shape == q.shape
    assert num_queries or not y[total:].any()
    want = attention_by_image(q, k, v, attention.key_weight(layout), queries, LENGTHS)
    with torch.no_grad():
        plain = attend(q, k, v, layout, num_queries)
    y, plain, direction = y[: len(want)], plain[: len(want)], torch.randn_like(want)
    grads, wanted = (torch.autograd.grad(out, (q, k, v, layout.weight), direction) for out in (y, want))
    assert_same([y, plain, *grads], [want, want, *wanted])


@torch.no_grad()
def test_padding_is_zero_whatever_a_fused_kernel_leaves_there(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = packed_layout("spare")
    q, k, v = torch.randn(3, len(layout.token), 2, 8, dtype=torch.float64)
    monkeypatch.setattr(attention, "varlen_attn", lambda q, *given, **more: torch.full_like(q, torch.nan))
    with attention.force_backend("varlen"):
        y = attend(q, k, v, layout)
    assert y[: sum(LENGTHS)].isnan().all()
    assert (y[sum(LENGTHS) :] == 0).all()
