"""Attention on a CPU: images of like length in one call, and image by image, are both Eq. 10."""

import pytest
import torch
from tiny import relative_error
from torch import Tensor

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


def definition(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, num_queries: int | None) -> Tensor:
    """Eq. 10, image by image."""
    done = []
    for image, (start, end) in enumerate(layout.cu_seqlens.unfold(0, 2, 1).tolist()):
        own = slice(start, end) if num_queries is None else slice(image * num_queries, (image + 1) * num_queries)
        weight = attention.key_weight(layout)[start:end]
        score = torch.einsum("qhd,khd->hqk", q[own], k[start:end]) * q.shape[-1] ** -0.5
        e = weight * (score - score.amax(-1, keepdim=True)).exp()
        done.append(torch.einsum("hqk,khd->qhd", e / e.sum(-1, keepdim=True), v[start:end]))
    return torch.cat(done)


@pytest.mark.parametrize("num_queries", [None, 2])
@pytest.mark.parametrize("kind", ["plain", "sizes", "holes", "spare"])
@pytest.mark.parametrize("short", [0, 1000], ids=["by image", "by bucket"])
def test_attention_of_ragged_images_is_the_definition(
    kind: str, num_queries: int | None, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values with and without gradient, and all gradients."""
    monkeypatch.setattr(attention, "SHORT", short)
    monkeypatch.setattr(attention, "SHORT_TRAINED", short)
    torch.manual_seed(0)
    layout = packed_layout(kind)
    slots, total = len(layout.token), sum(LENGTHS)
    num = slots if num_queries is None else num_queries * len(LENGTHS)
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64, requires_grad=True) for n in (num, slots, slots))
    y = attend(q, k, v, layout, num_queries)
    assert y.shape == q.shape
    assert num_queries or not y[total:].any()
    y = y if num_queries else y[:total]
    want = definition(q, k, v, layout, num_queries)
    direction, inputs = torch.randn_like(want), (q, k, v, layout.weight)
    grads, wanted = (torch.autograd.grad((out * direction).sum(), inputs) for out in (y, want))
    with torch.no_grad():
        plain = attend(q, k, v, layout, num_queries)[: len(want)]
    for got, right in ((y, want), (plain, want), *zip(grads, wanted, strict=True)):
        assert relative_error(got, right) < 1e-9


def test_buckets_hold_every_image_once_and_little_padding() -> None:
    layout = packed_layout("plain")
    assert sorted(image for bucket in layout.buckets for image in bucket.images.tolist()) == list(range(len(LENGTHS)))
    rows = torch.cat([bucket.slots.flatten() for bucket in layout.buckets])
    assert torch.equal(rows[layout.from_buckets], torch.arange(sum(LENGTHS)))
    assert len(rows) < 1.1 * sum(LENGTHS)
    assert len(layout.buckets) == 6  # 30 and 29; 9 three times; 8; 5; 3; 1
