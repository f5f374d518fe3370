"""Swin with tokens of mixed scale: the host itself where nothing is coarse, the definition everywhere else."""

from typing import Any

import pytest
import torch
from cases import pairwise
from naive_swin import naive_logits
from tiny import SWINS, images, relative_error, tiny_host, tiny_swin
from torch import Tensor

import msvit
from msvit.backbones.timm_swin import TimmSwin

MODES = TimmSwin.modes


def swin_images(num: int = 3, height: int = 64, width: int = 64, dtype: torch.dtype = torch.float64) -> Tensor:
    return images(num, height, width, dtype)


def some_masks(rows: int, columns: int) -> Tensor:
    """No fine cell at all, one, and two images at random."""
    mask = torch.rand(4, rows, columns, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0] = mask[1] = False
    mask[1, -1, 0] = True
    return mask.double()


@pairwise(  # windows: whole ones, padded ones, some larger than the last stages
    name=SWINS, mode=MODES, merge_at=[2, 3, 4], window=[4, 3, 7], size=[(64, 64), (96, 32)]
)
def test_all_fine_is_the_original_swin(
    name: str, mode: str, merge_at: int, window: int, size: tuple[int, int]
) -> None:
    host, image = tiny_swin(name, window_size=window), swin_images(2, *size)
    model = msvit.convert(host, merge_at=merge_at, gate=msvit.AllFine(coarse=32), mode=mode)
    with torch.no_grad():
        assert relative_error(model(image).logits, host(image)) < 1e-9


def test_all_fine_is_the_original_swin_where_merging_pads() -> None:
    """24 px: stages of 6, 3, 2 and 1 tokens a side; the odd one is merged with zeros."""
    host, image = tiny_swin(window_size=2), swin_images(2, 24, 24)
    with torch.no_grad():
        for mode in MODES:
            model = msvit.convert(host, merge_at=2, gate=msvit.AllFine(coarse=8), mode=mode)
            assert relative_error(model(image).logits, host(image)) < 1e-9


@pairwise(name=SWINS, mode=MODES, place=[(2, 8), (2, 24), (3, 16), (3, 48), (4, 32)], window=[4, 3])
def test_logits_and_the_gates_gradient_are_those_of_the_definition(
    name: str, mode: str, place: tuple[int, int], window: int
) -> None:
    """Masked: over all tokens. Packed: over the fine tokens of fine cells, and coarse twins."""
    merge_at, coarse = place
    side = {24: 48, 48: 96}.get(coarse, 64)
    host, image = tiny_swin(name, window_size=window), swin_images(4, side, side)
    model = msvit.convert(host, merge_at=merge_at, gate=msvit.AllFine(coarse=coarse), mode=mode)
    mask = some_masks(side // coarse, side // coarse)
    direction = torch.randn(4, 5, dtype=torch.float64)
    found = []
    for run in (
        lambda each: model(image, mask=each).logits,
        lambda each: naive_logits(host, model.backbone.embed_coarse, image, each, merge_at, mode == "masked"),
    ):
        each = mask.clone().requires_grad_()
        logits = run(each)
        (logits * direction).sum().backward()
        found.append((logits.detach(), each.grad))
    assert relative_error(found[0][0], found[1][0]) < 1e-9
    assert relative_error(found[0][1], found[1][1]) < 1e-9
    assert found[0][1].abs().sum() > 0
    with torch.no_grad():  # without gradients attention goes another way
        assert relative_error(model(image, mask=mask).logits, found[1][0]) < 1e-9


@pytest.mark.parametrize("name", SWINS)
def test_sparse_and_masked_execution_agree_in_values_and_gradients_of_all_weights(name: str) -> None:
    host, image, mask = tiny_swin(name), swin_images(4), some_masks(4, 4)
    model, grads, logits = msvit.convert(host, merge_at=3), [], []
    for mode in MODES:
        model = model.with_options(mode=mode)
        model.zero_grad()
        logits.append(model(image, mask=mask).logits)
        logits[-1].square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.backbone.named_parameters()})
    assert relative_error(*logits) < 1e-9
    for each, want in grads[0].items():
        assert relative_error(grads[1][each], want) < 1e-8 or want.norm() < 1e-12, each


@pytest.mark.parametrize("mode", MODES)
def test_the_gates_gradient_of_a_fine_cell_is_the_same_in_both_modes_if_no_other_is_coarse(mode: str) -> None:
    """With every cell fine the same tokens run in both: nothing is left out of either's gradient."""
    host, image, grads = tiny_swin(), swin_images(2), []
    for each in ("masked", mode):
        mask = torch.ones(2, 4, 4, dtype=torch.float64, requires_grad=True)
        model = convert_seeded(host, each)
        model(image, mask=mask).logits.square().sum().backward()
        grads.append(mask.grad)
    assert relative_error(*grads) < 1e-9


def convert_seeded(host: Any, mode: str = "packed", **options: Any) -> msvit.MSViT:
    torch.manual_seed(0)
    return msvit.convert(host, **{"merge_at": 3, **options}, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_gate_in_training_gets_its_gradient(mode: str) -> None:
    model = msvit.convert(tiny_swin(), merge_at=3, mode=mode).train()
    model(swin_images()).logits.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.gate.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_drop_path_is_drawn_per_image(mode: str) -> None:
    host = tiny_swin(depths=(1, 1, 1, 2), drop_path_rate=0.5).train()
    model = msvit.convert(host, merge_at=2, mode=mode)
    for stage in host.layers[:3]:
        stage.eval()
    image, mask = swin_images(1).expand(64, -1, -1, -1), torch.ones(64, 8, 8)
    with torch.no_grad():
        logits = model(image, mask=mask).logits  # the last block has rate 0.5 in each half: few outcomes
    assert 3 <= len(logits.mul(1e6).round().unique(dim=0)) <= 16


def test_checkpointing_changes_no_gradient() -> None:
    host, image, mask, grads = tiny_swin(), swin_images(4), some_masks(4, 4), []
    model = msvit.convert(host, merge_at=3)
    for enable in (False, True):
        host.set_grad_checkpointing(enable)
        model.zero_grad()
        model(image, mask=mask).logits.square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.backbone.parameters()]))
    assert relative_error(*grads) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_bf16_autocast_runs_forward_and_backward(mode: str) -> None:
    model = msvit.convert(tiny_swin(dtype=torch.float32), merge_at=3, mode=mode).train()
    image, mask = swin_images(4, dtype=torch.float32), some_masks(4, 4).float()
    with torch.no_grad():
        exact = model(image, mask=mask).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = model(image, mask=mask)
        model(image).logits.float().sum().backward()
    assert relative_error(out.logits.float(), exact) < 0.05
    assert all(torch.isfinite(p.grad).all() for p in model.gate.parameters())


def test_what_lies_in_absent_slots_does_not_matter() -> None:
    """The pixels of a coarse cell reach nothing before it enters: with its embedding at 0 they reach nothing at all."""
    model, image, mask = msvit.convert(tiny_swin(), merge_at=3), swin_images(4), some_masks(4, 4)
    torch.nn.init.zeros_(model.backbone.embed_coarse.weight)
    other = torch.where(mask.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None] > 0.5, image, 1e3)
    with torch.no_grad():
        for mode in MODES:
            model = model.with_options(mode=mode)
            assert relative_error(model(other, mask=mask).logits, model(image, mask=mask).logits) < 1e-12


def test_the_output_is_the_same_record_as_for_a_vit() -> None:
    model = msvit.convert(tiny_swin(), merge_at=3, gate=msvit.AllFine(coarse=32))
    image, mask = swin_images(4), some_masks(2, 2)
    with torch.no_grad():
        out = model(image, mask=mask)
    num_fine = mask.flatten(1).sum(1)
    assert out.tokens.count.tolist() == (num_fine * 64 + (4 - num_fine) * 4).tolist()
    assert out.tokens.area.tolist() == [64] * 16
    assert out.tokens.cell.view(4, 4)[0].tolist() == [0, 1, 2, 3]
    dense = msvit.dense_map(out.tokens)
    assert dense.shape == (4, 128, 16, 16)
    assert relative_error(msvit.from_dense(dense, out.tokens.layout), out.tokens.x) == 0
    pooled = model.host.forward_head(dense[:, :, ::8, ::8].permute(0, 2, 3, 1))
    assert relative_error(out.logits, pooled) < 1e-12
    assert torch.equal(model.macs_of(out), msvit.macs(model, image, mask))


def test_a_budget_of_tokens_is_kept() -> None:
    model, image = msvit.convert(tiny_swin(), merge_at=3), swin_images(4)
    all_fine = torch.ones(4, 4, 4)
    with torch.no_grad():
        out = model(image, mask=all_fine, max_tokens=500)  # 64 with all cells coarse, 15 more for each fine one
        assert out.gate.mask.sum() == (500 - 64) // 15
        assert out.tokens.count.sum() <= 500
        assert relative_error(out.logits, model(image, mask=out.gate.mask).logits) < 1e-12
        assert relative_error(model(image, mask=all_fine, max_tokens=4096).logits, model.host(image)) < 1e-12
        none = torch.zeros(4, 4, 4)  # with room for fine cells that nobody wants
        kept = model(image, mask=none, max_tokens=500).logits
        assert relative_error(kept, model(image, mask=none).logits) < 1e-12
    with pytest.raises(ValueError, match="64 tokens with all cells coarse; pass at least that"):
        model(image, mask=all_fine, max_tokens=63)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [4, 3], ids=["whole windows", "padded windows"])
def test_an_image_that_is_not_finite_spoils_no_other(mode: str, window: int) -> None:
    model = msvit.convert(tiny_swin(window_size=window), merge_at=4, mode=mode)
    image, mask = swin_images(2), torch.tensor([[[1.0, 0], [0, 1]]] * 2)
    with torch.no_grad():
        want = model(image, mask=mask).logits[0]
        image[1] = torch.nan
        got = model(image, mask=mask).logits
    torch.testing.assert_close(got[0], want)
    assert got[1].isnan().all()


@pytest.mark.parametrize("name", SWINS)
def test_saved_and_loaded_it_is_the_same(name: str, tmp_path: Any) -> None:
    model = msvit.convert(tiny_swin(name), merge_at=4, gate=msvit.DiscGate(coarse=32, share=0.5), mode="masked").eval()
    msvit.save(model, tmp_path)
    other = msvit.load(tmp_path)
    assert (other.backbone.merge_at, other.mode, other.coarse) == (4, "masked", 32)
    with torch.no_grad():
        assert torch.equal(other(swin_images()).logits, model(swin_images()).logits)


def test_on_a_cpu_the_accelerated_model_is_the_same() -> None:
    model = msvit.convert(tiny_swin(dtype=torch.float32), merge_at=3).eval()
    fast, image, mask = msvit.compile(model), swin_images(4, dtype=torch.float32), some_masks(4, 4)
    with torch.inference_mode():
        assert relative_error(fast(image, mask=mask).logits, model(image, mask=mask).logits) < 1e-5


def test_tables_follow_the_weights() -> None:
    """Position biases are kept while nothing trains, and made anew when a weight has changed."""
    for name in SWINS:
        host = tiny_swin(name)
        model, image = msvit.convert(host, gate=msvit.AllFine(coarse=16)), swin_images()
        with torch.no_grad():
            model(image)
            attn = host.layers[0].blocks[0].attn
            weight = attn.cpb_mlp[2].weight if "v2" in name else attn.relative_position_bias_table
            weight.mul_(-3)
            assert relative_error(model(image).logits, host(image)) < 1e-9


WRONG = {
    "merge_at 1": (lambda: msvit.convert(tiny_swin(), merge_at=1), "blocks 1 to 4 .* pass merge_at from 2 to 4"),
    "merge_at 5": (lambda: msvit.convert(tiny_swin(), merge_at=5), "merge_at is 5, .* pass merge_at from 2 to 4"),
    "small cell": (
        lambda: msvit.convert(tiny_swin(), merge_at=3, gate=msvit.AllFine(coarse=8)),
        "cells are 8px, .* enter block 3, where a token covers 16px; give a gate with cells of 16px or a multiple",
    ),
    "odd cell": (
        lambda: msvit.convert(tiny_swin(), merge_at=3, gate=msvit.AllFine(coarse=24)),
        "cells are 24px, .* cells of 16px or a multiple of it, or another merge_at",
    ),
    "size": (
        lambda: msvit.convert(tiny_swin(), merge_at=4)(swin_images(2, 64, 72)),
        "image is 64x72px, .* multiples of 32; resize it, for example to 64x64",
    ),
    "trimmed": (lambda: msvit.convert(tiny_swin(), mode="trimmed"), "unknown mode 'trimmed' for a SwinTransformer"),
    "reducer": (lambda: msvit.convert(tiny_swin(), reducer=msvit.EViT(0.7)), "leave reducer out, or use a ViT"),
    "segmenter": (lambda: msvit.convert_segmenter(tiny_swin(), 5), "convert a ViT, or classify"),
    "dropout": (lambda: msvit.convert(tiny_swin(attn_drop_rate=0.1)), "build it with attn_drop_rate=0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_refused_with_a_remedy(case: str) -> None:
    call, sentence = WRONG[case]
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_vit_has_nothing_to_merge() -> None:
    with pytest.raises(ValueError, match="leave merge_at out, or convert a Swin"):
        msvit.convert(tiny_host(), merge_at=3)
