"""Swin with tokens of mixed scale: the host itself where nothing is coarse, the definition everywhere else."""

import torch
from cases import each_once, pairwise
from naive_swin import naive_logits
from tiny import DEVICE, HALF, SWINS, assert_same, gradients, images, needs_kernels, relative_error, tiny_swin
from torch import Tensor

import msvit
from msvit.execution.attention import force_backend
from msvit.swin.backbone import TimmSwin

MODES = TimmSwin.modes
BY_KERNEL = [
    (4, 3, 32, torch.float32),
    (3, 2, 24, torch.float32),
    (12, 2, 16, torch.float32),  # more tokens than a program takes at once
    (7, 2, 16, HALF),
]


def some_masks(rows: int, columns: int) -> Tensor:
    """No fine cell at all, one, some at random, and all."""
    mask = torch.rand(4, rows, columns, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[:2], mask[1, -1, 0], mask[3] = False, True, True
    return mask.double()


@pairwise(  # windows: whole ones, padded ones, some larger than the last stages; of 24 px merging pads an odd token
    lambda name, mode, merge_at, window, size: merge_at == 2 or size != (24, 24),
    name=SWINS, mode=MODES, merge_at=[2, 3, 4], window=[4, 3, 7, 2], size=[(64, 64), (96, 32), (24, 24)],
)  # fmt: skip
def test_all_fine_is_the_original_swin(
    name: str, mode: str, merge_at: int, window: int, size: tuple[int, int]
) -> None:
    host, image = tiny_swin(name, window_size=window), images(2, *size)
    gate = msvit.AllFine(coarse=8 if size == (24, 24) else 32)
    model = msvit.convert(host, merge_at=merge_at, gate=gate, mode=mode)
    with torch.no_grad():
        assert relative_error(model(image).logits, host(image)) < 1e-9


@pairwise(name=SWINS, mode=MODES, place=[(2, 8), (2, 24), (3, 16), (3, 48), (4, 32)], window=[4, 3])
def test_logits_and_all_gradients_are_those_of_the_definition(
    name: str, mode: str, place: tuple[int, int], window: int
) -> None:
    """Masked: over all tokens. Packed: over the fine tokens of fine cells, and coarse twins."""
    merge_at, coarse = place
    side = {24: 48, 48: 96}.get(coarse, 64)
    host, image = tiny_swin(name, window_size=window), images(4, side, side)
    model = msvit.convert(host, merge_at=merge_at, gate=msvit.AllFine(coarse=coarse), mode=mode)
    mask = some_masks(side // coarse, side // coarse)
    found = []
    for run in (
        lambda each: model(image, mask=each).logits,
        lambda each: naive_logits(host, model.backbone.embed_coarse, image, each, merge_at, mode == "masked"),
    ):
        each = mask.clone().requires_grad_()
        logits = run(each)
        found.append([logits, *gradients(logits, each, model.backbone)])
    assert_same(found[0][:2], found[1][:2])
    assert_same(*found, 1e-8)
    assert found[0][1].abs().sum() > 0
    with torch.no_grad():  # without gradients attention goes another way
        assert_same([model(image, mask=mask).logits], [found[1][0]])


def test_the_output_is_the_same_record_as_for_a_vit() -> None:
    model = msvit.convert(tiny_swin(), merge_at=3, gate=msvit.AllFine(coarse=32))
    image, mask = images(4, 64, 64), some_masks(2, 2)
    with torch.no_grad():
        out = model(image, mask=mask)
    num_fine = mask.flatten(1).sum(1)
    assert out.tokens.count.tolist() == (num_fine * 64 + (4 - num_fine) * 4).tolist()
    assert out.tokens.layout.area.tolist() == [64] * 16
    assert out.tokens.layout.cell.view(4, 4)[0].tolist() == [0, 1, 2, 3]
    dense = msvit.dense_map(out.tokens)
    assert dense.shape == (4, 128, 16, 16)
    assert relative_error(msvit.from_dense(dense, out.tokens.layout), out.tokens.x) == 0
    pooled = model.host.forward_head(dense[:, :, ::8, ::8].permute(0, 2, 3, 1))
    assert relative_error(out.logits, pooled) < 1e-12
    assert torch.equal(model.macs_of(out), msvit.macs(model, image, mask))


@needs_kernels
@each_once(name=SWINS, case=BY_KERNEL)
def test_by_the_kernel_for_windows_a_model_gives_the_same(name: str, case: tuple[int, int, int, torch.dtype]) -> None:
    """Whole and padded windows, shifted and not, cells of all kinds; no fine cell, and some."""
    window, merge_at, coarse, dtype = case
    side = 64 if coarse == 32 else 48
    small = {"window_size": window, "depths": (2, 1, 1)[:merge_at], "num_heads": (1, 2, 2)[:merge_at]}
    host = tiny_swin(name, torch.float32, **small).to(DEVICE)
    model = msvit.convert(host, merge_at=merge_at, gate=msvit.AllFine(coarse=coarse))
    image = torch.randn(2, 3, side, side, device=DEVICE)
    mask = torch.rand(2, side // coarse, side // coarse, device=DEVICE) < 0.5
    mask[0] = False
    with torch.no_grad():
        with force_backend("sdpa"):
            want = model(image, mask=mask).logits
        model.to(dtype)
        with force_backend("triton"):
            got = model(image.to(dtype), mask=mask).logits
    assert relative_error(got.float(), want) < (1e-4 if dtype is torch.float32 else 0.03)
