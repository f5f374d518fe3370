"""ToMe's reduction by our kernels against plain torch: on a GPU, or else in Triton's interpreter (see conftest.py)."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from cases import each_once
from tiny import DEVICE, HALF, assert_same_output, needs_kernels, tiny_model
from tiny import batch_of as mixed_batch
from torch import Tensor

import msvit
from msvit.execution.layout import packed_layout
from msvit.reduction import tome
from msvit.reduction.base import Ratio
from msvit.reduction.compact import with_owners
from msvit.reduction.tome import merge_alike, merge_fused, num_unmerged
from msvit.types import ScaleGrid, TokenBatch

pytestmark = needs_kernels
GRID = ScaleGrid(96, 64, fine=8, coarse=16)  # 24 cells, 96 patches
LENGTHS = {"ragged": [3, 96, 1, 37, 2], "full": [96, 96]}


def batch_of(
    lengths: list[int], num_prefix: int, padding: int, dtype: torch.dtype, grid: ScaleGrid = GRID,
    width: int = 48,
) -> TokenBatch:  # fmt: skip
    """Images with so many tokens beside prefix tokens, of any ids, so that some patches are covered by none."""
    drawn = [num_prefix + torch.randperm(grid.num_ids)[:length].sort().values for length in lengths]
    ids = [torch.cat([torch.arange(num_prefix), own]) for own in drawn]
    token = torch.cat([*ids, torch.full((padding,), num_prefix)]).to(DEVICE)
    num = torch.tensor([len(own) for own in ids])
    image = torch.arange(len(ids)).repeat_interleave(num)
    image = torch.cat([image, image.new_full((padding,), len(ids) - 1)]).to(DEVICE)
    cu_seqlens = torch.nn.functional.pad(num.cumsum(0), (1, 0)).int().to(DEVICE)
    weight = (torch.arange(len(token), device=DEVICE) < cu_seqlens[-1]).float()
    layout = packed_layout(grid, num_prefix, token, image, weight, cu_seqlens, has_padding=padding > 0)
    size = layout.area.clamp(min=1).float()
    x = torch.randn(len(token), width, device=DEVICE).to(dtype)
    return with_owners(TokenBatch(x, replace(layout, size=size)))


def keys_of(kind: str, tokens: TokenBatch, dtype: torch.dtype, heads: int = 3, dim: int = 16) -> Tensor:
    """Keys as attention leaves them, strided. "alike": along few axes, so that most pairs are equally similar."""
    qkv = torch.randn(tokens.x.shape[0], 3, heads, dim, device=DEVICE)
    if kind == "alike":
        qkv = torch.eye(dim, device=DEVICE)[torch.randint(3, (tokens.x.shape[0], 3, 1), device=DEVICE)]
        qkv = qkv.expand(-1, -1, heads, -1).contiguous()
    if kind == "nan":
        qkv[5:20:4] = torch.nan
        qkv[-20:] = torch.nan
    return qkv.to(dtype)[:, 1]


@each_once(
    lengths=list(LENGTHS),
    num_prefix=[0, 1, 5],
    amount=[(7, None), (None, (7, 10)), (None, (1, 2))],
    kind=["random", "alike", "nan"],
    dtype=[torch.float32, HALF],
    step=[2, 256],
)
def test_the_same_pairs_order_and_sizes_as_in_plain_torch(
    lengths: str, num_prefix: int, amount: tuple[int | None, Ratio | None], kind: str, dtype: torch.dtype,
    step: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In two blocks one after the other; the second begins with merged tokens, and with padding of the first.

    Also with more images and patches than a program looks at together.
    """
    monkeypatch.setattr(import_module("msvit.fast.kernels.merging"), "STEP", step)
    tokens = batch_of(LENGTHS[lengths], num_prefix, 0 if lengths == "full" else 9, dtype)
    r, rate = amount
    for _ in range(2):
        now, slots = tokens.layout.max_len - num_prefix, tokens.x.shape[0]
        keys, max_len = keys_of(kind, tokens, dtype), num_prefix + num_unmerged(now, r, rate)
        want = merge_alike(tokens, keys, r, rate, now // 2, max_len, slots)
        assert_same_batch(merge_fused(tokens, keys, r, rate, max_len, slots), want)
        tokens = want


def test_a_whole_model_gives_the_same_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(dtype=torch.float32, reducer=msvit.ToMe(r=3))
    model = model.to(DEVICE).eval()
    image, mask = mixed_batch(model)
    found = []
    for fused in (False, True):
        monkeypatch.setattr(tome, "can_fuse", lambda *given, fused=fused: fused)
        with torch.no_grad():
            found.append(model(image, mask=mask, max_tokens=80))
    assert_same_output(found[1], found[0], 1e-5)
    assert torch.equal(found[1].tokens.layout.owner, found[0].tokens.layout.owner)


@pytest.mark.gpu
def test_kernels_merge_packed_tokens_without_gradients() -> None:
    tokens = batch_of([5, 9], 1, 3, torch.float32)
    keys = keys_of("random", tokens, torch.float32)
    assert tome.can_fuse(tokens, keys)
    assert not tome.can_fuse(replace(tokens, x=tokens.x.double()), keys)
    assert not tome.can_fuse(replace(tokens, layout=replace(tokens.layout, has_inactive=True)), keys)
    assert not tome.can_fuse(replace(tokens, layout=replace(tokens.layout, max_len=257)), keys.repeat(1, 1, 4))
    keys.requires_grad_()
    assert not tome.can_fuse(tokens, keys)
    with torch.no_grad():
        assert tome.can_fuse(tokens, keys)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), [("random", torch.float32), ("alike", torch.bfloat16)])
@pytest.mark.parametrize("side", [224, 384])
def test_images_of_usual_size_have_the_same_pairs(side: int, kind: str, dtype: torch.dtype) -> None:
    """Ragged ones in some blocks of a ViT-S; in float32 those of 384 px have more tokens than a program takes."""
    grid = ScaleGrid(side, side, fine=16, coarse=32)
    if side == 384 and dtype is torch.float32:
        pytest.skip("plain torch")
    lengths = [grid.num_patches, *(grid.num_cells + 3 * int(n) for n in torch.randint(grid.num_cells, (15,)))]
    tokens = batch_of(lengths, 1, 40, dtype, grid, width=384)
    for _ in range(3):
        keys, now, slots = keys_of(kind, tokens, dtype, 6, 64), tokens.layout.max_len - 1, tokens.x.shape[0]
        assert tome.can_fuse(tokens, keys)
        want = merge_alike(tokens, keys, 13, None, 13, now - 12, slots)
        assert_same_batch(merge_fused(tokens, keys, 13, None, now - 12, slots), want)
        tokens = want


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
