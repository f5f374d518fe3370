"""One definition, several speeds: masked, trimmed and packed give the same numbers."""

import pytest
import torch
from reference import reference_logits
from tiny import KINDS, images, mixed_mask, relative_error, tiny_host

import msvit
from msvit.execution import MODES
from msvit.execution.attention import force_backend


def existing(layout: object, batch: int) -> torch.Tensor:
    """(b, ids): the tokens a layout runs."""
    exists = torch.zeros(batch, layout.num_prefix + layout.grid.num_ids, dtype=torch.bool)
    exists[layout.image, layout.token] = True
    return exists


@pytest.mark.parametrize("name", [*KINDS, "deit_small_distilled_patch16_224", "deit3_small_patch16_224"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_agree_with_the_definition(name: str, mode: str) -> None:
    """Batches that mix all fine, all coarse and random images."""
    host, image, mask = tiny_host(name, dynamic_img_size=True), images(4), mixed_mask(4, 2, 2)
    everything = torch.ones(4, host.num_prefix_tokens + 4 + 16, dtype=torch.bool)
    with torch.no_grad():
        got = msvit.convert(host, coarse=8, mode=mode)(image, mask=mask).logits
        want = reference_logits(host, image, mask, 8, everything)
    assert relative_error(got, want) < 1e-9


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_gates_gradient_is_that_of_eq_10_over_the_tokens_that_run(name: str, mode: str) -> None:
    """Masked: all tokens, inactive twins too. Trimmed: those that survive the cut. Packed: active ones."""
    host, image = tiny_host(name, dynamic_img_size=True), images(4)
    mask = mixed_mask(4, 2, 2).requires_grad_()
    direction = torch.randn(4, 5, dtype=torch.float64)
    out = msvit.convert(host, coarse=8, mode=mode)(image, mask=mask)
    (out.logits * direction).sum().backward()
    got, mask.grad = mask.grad, None
    exists = existing(out.tokens.layout, 4)
    (reference_logits(host, image, mask, 8, exists) * direction).sum().backward()
    assert relative_error(got, mask.grad) < 1e-9
    num_run = exists.sum(1) - host.num_prefix_tokens
    assert num_run.tolist() == {"masked": [20] * 4, "trimmed": [16] * 4, "packed": out.tokens.count.tolist()}[mode]


@pytest.mark.parametrize("mode", MODES)
def test_weights_get_the_same_gradient_in_every_mode(mode: str) -> None:
    host, image, mask = tiny_host(), images(4), mixed_mask(4, 2, 2)
    grads = []
    for each in ("masked", mode):
        host.zero_grad()
        msvit.convert(host, coarse=8, mode=each)(image, mask=mask).logits.pow(2).sum().backward()
        grads.append({name: p.grad.clone() for name, p in host.named_parameters()})
    for name, want in grads[0].items():
        assert relative_error(grads[1][name], want) < 1e-9, name


def test_trimming_keeps_the_inactive_tokens_nearest_to_being_active() -> None:
    sample = torch.tensor([[[0.9, 0.1], [0.4, 0.2]], [[0.9, 0.9], [0.9, 0.1]]])
    gate = msvit.GateOutput(logits=torch.logit(sample), fine_prob=sample, sample=sample, mask=(sample > 0.5).float())
    grid = msvit.ScaleGrid(8, 8, fine=2, coarse=4)
    layout = MODES["trimmed"](gate, grid, num_prefix=1)
    first = layout.token.view(2, -1)[0]
    # Image 0 has 3 coarse + 4 fine tokens, image 1 has 1 + 12. Of the inactive ones of image 0, the fine tokens of
    # cells 2 (m = 0.4) survive, then those of cell 3 (0.2); the rest is cut.
    assert first.shape == (1 + 13,)
    fine_cells = ((first[first >= 5] - 5) // 4 // 2 * 2 + (first[first >= 5] - 5) % 4 // 2).unique().tolist()
    assert fine_cells == [0, 2, 3]


def test_a_gate_in_training_gets_its_gradient_in_every_mode() -> None:
    for mode in MODES:
        model = msvit.convert(tiny_host(), coarse=8, mode=mode).train()
        model(images(4)).logits.sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.gate.parameters()), mode


@pytest.mark.parametrize("mode", MODES)
def test_bf16_autocast_runs_forward_and_backward(mode: str) -> None:
    host = tiny_host(dtype=torch.float32)
    model = msvit.convert(host, coarse=8, mode=mode).train()
    image, mask = images(4, dtype=torch.float32), mixed_mask(4, 2, 2, torch.float32)
    with torch.no_grad():
        exact = model(image, mask=mask).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = model(image, mask=mask)
        model(image).logits.float().sum().backward()
    assert relative_error(out.logits.float(), exact) < 0.03
    assert all(torch.isfinite(p.grad).all() for p in model.gate.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_drop_path_is_drawn_per_image(mode: str) -> None:
    """Each image is kept or dropped whole; in the long run by the rate the host asks for."""
    host = tiny_host(drop_path_rate=0.5).train()
    model = msvit.convert(host, coarse=8, mode=mode)
    image, mask = images(1).expand(64, -1, -1, -1), torch.zeros(64, 2, 2)
    with torch.no_grad():
        logits = model(image, mask=mask).logits  # block 0 has rate 0, block 1 has 0.5: four outcomes
    kinds = logits.mul(1e6).round().unique(dim=0)
    assert len(kinds) == 4


@pytest.mark.parametrize("mode", MODES)
def test_overflowing_scores_stay_finite(mode: str) -> None:
    host = tiny_host(dtype=torch.float32)
    host.blocks[0].attn.qkv.weight.data.mul_(300)
    mask = mixed_mask(4, 2, 2, torch.float32).requires_grad_()
    logits = msvit.convert(host, coarse=8, mode=mode)(images(4, dtype=torch.float32), mask=mask).logits
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert torch.isfinite(mask.grad).all()


def test_an_unknown_backend_or_mode_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="varlen, flash, sdpa"), force_backend("fast"):
        pass
    with pytest.raises(ValueError, match="packed, trimmed, masked"):
        msvit.convert(tiny_host(), coarse=8, mode="dense")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["vit_small_patch16_224", "vit_base_patch16_siglip_224", "eva02_tiny_patch14_224"])
@pytest.mark.parametrize("train", [False, True])
def test_fused_attention_agrees_with_sdpa_per_image(name: str, train: bool) -> None:
    """torch's varlen kernel against the fall-back, values and gate gradient, bf16 on the GPU."""
    host = tiny_host(name, torch.float32, embed_dim=64).cuda()
    model = msvit.convert(host, coarse=8)
    image = images(4, dtype=torch.float32).cuda()
    results = []
    for backend, dtype in (("varlen", torch.bfloat16), ("sdpa", torch.bfloat16), ("sdpa", torch.float32)):
        mask = mixed_mask(4, 2, 2, torch.float32).cuda().requires_grad_(train)
        with force_backend(backend), torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(image, mask=mask).logits.float()
        if train:
            logits.pow(2).sum().backward()
        results.append((logits.detach(), mask.grad))
    exact, exact_grad = results[2]
    for logits, grad in results[:2]:
        assert relative_error(logits, exact) < 0.03
        if train:
            assert relative_error(grad, exact_grad) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_modes_agree_on_the_gpu(mode: str) -> None:
    host, image, mask = tiny_host().cuda(), images(4).cuda(), mixed_mask(4, 2, 2).cuda()
    with torch.no_grad():
        got = msvit.convert(host, coarse=8, mode=mode)(image, mask=mask).logits
        want = msvit.convert(host, coarse=8, mode="masked")(image, mask=mask).logits
    assert relative_error(got, want) < 1e-9
