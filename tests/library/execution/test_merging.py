"""ToMe's reduction by our kernels against plain torch: on a GPU, or else in Triton's interpreter (see conftest.py)."""

from dataclasses import replace

import pytest
import torch
from cases import pairwise
from tiny import interpretable
from torch import Tensor

from msvit.execution.layout import packed_layout, with_proportional_attention
from msvit.reduction.base import Ratio
from msvit.reduction.compact import with_owners
from msvit.reduction.tome import merge_alike, merge_fused, num_patches, unmerged
from msvit.types import ScaleGrid, TokenBatch

pytestmark = pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16
GRID = ScaleGrid(96, 64, fine=8, coarse=16)  # 24 cells, 96 patches
WIDTH, HEADS, DIM = 48, 3, 16
LENGTHS = {"ragged": [3, 96, 1, 37, 2], "full": [96, 96]}


def batch_of(lengths: list[int], num_prefix: int, padding: int, power: float, dtype: torch.dtype) -> TokenBatch:
    """Images with so many tokens beside prefix tokens, of any ids, so that some patches are covered by none."""
    drawn = [num_prefix + torch.randperm(GRID.num_ids)[:length].sort().values for length in lengths]
    ids = [torch.cat([torch.arange(num_prefix), own]) for own in drawn]
    token = torch.cat([*ids, torch.full((padding,), num_prefix)]).to(DEVICE)
    num = torch.tensor([len(own) for own in ids])
    image = torch.arange(len(ids)).repeat_interleave(num)
    image = torch.cat([image, image.new_full((padding,), len(ids) - 1)]).to(DEVICE)
    cu_seqlens = torch.nn.functional.pad(num.cumsum(0), (1, 0)).int().to(DEVICE)
    weight = (torch.arange(len(token), device=DEVICE) < cu_seqlens[-1]).float()
    layout = packed_layout(GRID, num_prefix, token, image, weight, cu_seqlens, has_padding=padding > 0)
    layout = with_proportional_attention(layout, power)
    size = num_patches(layout, torch.float32) if layout.size is None else layout.size
    x = torch.randn(len(token), WIDTH, device=DEVICE).to(dtype)
    return with_owners(TokenBatch(x, replace(layout, size=size)))


def keys_of(kind: str, tokens: TokenBatch, dtype: torch.dtype) -> Tensor:
    """Keys as attention leaves them, strided. "alike": along few axes, so that most pairs are equally similar."""
    qkv = torch.randn(tokens.x.shape[0], 3, HEADS, DIM, device=DEVICE)
    if kind == "alike":
        qkv = torch.eye(DIM, device=DEVICE)[torch.randint(3, (tokens.x.shape[0], 3, 1), device=DEVICE)]
        qkv = qkv.expand(-1, -1, HEADS, -1).contiguous()
    if kind == "nan":
        qkv[5:20:4] = torch.nan
        qkv[-20:] = torch.nan
    return qkv.to(dtype)[:, 1]


@pairwise(
    lengths=list(LENGTHS),
    num_prefix=[0, 1, 5],
    amount=[(7, None), (None, (7, 10)), (None, (1, 2))],
    power=[0.0, 0.5],
    kind=["random", "alike", "nan"],
    dtype=[torch.float32, HALF],
)
def test_the_same_pairs_order_and_sizes_as_in_plain_torch(
    lengths: str, num_prefix: int, amount: tuple[int | None, Ratio | None], power: float, kind: str, dtype: torch.dtype
) -> None:
    """In two blocks one after the other; the second begins with merged tokens, and with padding of the first."""
    tokens = batch_of(LENGTHS[lengths], num_prefix, 0 if lengths == "full" else 9, power, dtype)
    r, rate = amount
    for _ in range(2):
        now, slots = tokens.layout.max_len - num_prefix, tokens.x.shape[0]
        keys, max_len = keys_of(kind, tokens, dtype), num_prefix + unmerged(now, r, rate)
        want = merge_alike(tokens, keys, r, rate, now // 2, max_len, slots, by_size=not power)
        assert_same_batch(merge_fused(tokens, keys, r, rate, max_len, slots, by_size=not power), want)
        tokens = want


def test_slots_that_are_left_over_are_padding() -> None:
    """Where there was none before."""
    tokens = batch_of([5, 9], 1, 0, 0.0, torch.float32)
    layout = merge_fused(tokens, keys_of("random", tokens, HALF), 3, None, 94, 16, by_size=True).layout
    assert layout.cu_seqlens.tolist() == [0, 4, 11]  # of 5 tokens 2 can be merged
    assert (layout.weight[:11] == 1).all()
    assert (layout.weight[11:] == 0).all()
    assert (layout.image[11:] == 1).all()
    assert layout.has_padding


def assert_same_batch(got: TokenBatch, want: TokenBatch) -> None:
    mine, other = got.layout, want.layout
    assert (mine.max_len, mine.has_padding, mine.batch) == (other.max_len, other.has_padding, other.batch)
    real = ~other.padding
    for name in ("cu_seqlens", "patch_to_slot", "token", "image", "weight"):
        assert torch.equal(getattr(mine, name), getattr(other, name)), name
    assert torch.equal(mine.size[real], other.size[real])
    assert mine.size.isfinite().all()
    bound = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.x.dtype]
    torch.testing.assert_close(got.x[real], want.x[real], atol=bound, rtol=bound)
