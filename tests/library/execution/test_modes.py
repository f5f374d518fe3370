"""One definition, several speeds: masked, trimmed and packed give the same numbers."""

import pytest
import torch
from reference import reference_logits
from tiny import KINDS, SWINS, assert_same, batch_of, images, mixed_mask, relative_error, tiny_host, tiny_model

import msvit
from msvit.execution import MODES
from msvit.execution.attention import _with_weight_column, force_backend

HOST_MODES = [*((KINDS[0], mode) for mode in MODES), (SWINS[0], "packed"), (SWINS[0], "masked")]


@pytest.mark.parametrize(
    "name", [*KINDS, "deit_small_distilled_patch16_224", "deit3_small_patch16_224"]
)
@pytest.mark.parametrize("mode", MODES)
def test_modes_agree_with_the_definition_in_logits_and_all_gradients(name: str, mode: str) -> None:
    """Batches that mix all fine, all coarse and random images.

    Logits are those of Eq. 10 over all tokens. The gate's gradient is that over the tokens that run: in masked mode
    all, inactive twins too, in trimmed mode those that survive the cut, in packed mode the active ones.
    """
    model = tiny_model(name, mode=mode, dynamic_img_size=True)
    host, (image, mask), direction = model.host, batch_of(model), torch.randn(4, 5, dtype=torch.float64)
    every = torch.ones(4, host.num_prefix_tokens + 4 + 16, dtype=torch.bool)
    with torch.no_grad():
        assert_same([model(image, mask=mask).logits], [reference_logits(host, image, mask, 8, every)])
    mask.requires_grad_()
    out = model(image, mask=mask)
    exists = torch.zeros_like(every)
    exists[out.tokens.layout.image, out.tokens.layout.token] = True
    want = reference_logits(host, image, mask, 8, exists)
    inputs = [mask, *host.parameters()]
    assert_same(*(torch.autograd.grad(logits, inputs, direction, allow_unused=True) for logits in (out.logits, want)))
    num_run = exists.sum(1) - host.num_prefix_tokens
    assert num_run.tolist() == {"masked": [20] * 4, "trimmed": [16] * 4, "packed": out.tokens.count.tolist()}[mode]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 15])
def test_sizes_are_as_exact_as_the_keys_in_the_column_of_fused_kernels(head_dim: int, dtype: torch.dtype) -> None:
    """Kernels without a bias: the column adds log(size) to the scores, in bfloat16 to 0.2 %, and has its gradient."""
    q, k = torch.zeros(2, 3, 1, head_dim, dtype=dtype)
    size = torch.tensor([1.0, 2.0, 9.0], requires_grad=True)
    wide_q, wide_k, _ = _with_weight_column(q, k, k, size, head_dim**-0.5)
    added = (wide_q.float() * wide_k.float()).sum((1, 2)) * head_dim**-0.5
    torch.testing.assert_close(added, size.log(), atol=0, rtol=torch.finfo(dtype).eps / 2 + 1e-6)
    added.sum().backward()
    torch.testing.assert_close(size.grad, 1 / size.detach(), atol=0, rtol=0.01)


def test_trimming_keeps_the_inactive_tokens_nearest_to_being_active() -> None:
    sample = torch.tensor([[[0.9, 0.1], [0.4, 0.2]], [[0.9, 0.9], [0.9, 0.1]]])
    gate = msvit.GateOutput(logits=torch.logit(sample), fine_prob=sample, sample=sample, mask=(sample > 0.5).float())
    layout = MODES["trimmed"](gate, msvit.ScaleGrid(8, 8, fine=2, coarse=4), num_prefix=1)
    first = layout.token.view(2, -1)[0]
    # Image 0 has 3 coarse + 4 fine tokens, image 1 has 1 + 12. Of the inactive ones of image 0, the fine tokens of
    # cells 2 (m = 0.4) survive, then those of cell 3 (0.2); the rest is cut.
    assert first.shape == (1 + 13,)
    fine_cells = ((first[first >= 5] - 5) // 4 // 2 * 2 + (first[first >= 5] - 5) % 4 // 2).unique().tolist()
    assert fine_cells == [0, 2, 3]


@pytest.mark.parametrize(("name", "mode"), HOST_MODES)
def test_training_gives_the_gate_its_gradient_under_bf16_autocast_too(name: str, mode: str) -> None:
    model = tiny_model(name, torch.float32, mode=mode).train()
    image, mask = batch_of(model)
    with torch.no_grad():
        exact = model(image, mask=mask).logits
    for autocast in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(image, mask=mask)
            model(image).logits.float().sum().backward()
        assert relative_error(out.logits.float(), exact) < 0.05
        assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in model.gate.parameters())


@pytest.mark.parametrize(("name", "mode"), HOST_MODES)
def test_drop_path_is_drawn_per_image(name: str, mode: str) -> None:
    """Each image is kept or dropped whole, in either half of the last block: four outcomes."""
    small = {"depths": (1, 1, 1, 2)} if name in SWINS else {}  # the last block but one has rate 0, or is not trained
    model = tiny_model(name, mode=mode, drop_path_rate=0.5, **small).train()
    for stage in model.host.layers[:3] if name in SWINS else ():
        stage.eval()
    for block in model.host.layers[3].blocks[:1] if name in SWINS else ():
        block.eval()
    image, mask = batch_of(model, 1)
    with torch.no_grad():
        logits = model(image.expand(64, -1, -1, -1), mask=torch.zeros(64, *mask.shape[1:])).logits
    assert len(logits.mul(1e6).round().unique(dim=0)) == 4


@pytest.mark.parametrize("mode", MODES)
def test_overflowing_scores_stay_finite(mode: str) -> None:
    host = tiny_host(dtype=torch.float32)
    host.blocks[0].attn.qkv.weight.data.mul_(300)
    mask = mixed_mask(4, 2, 2, torch.float32).requires_grad_()
    logits = msvit.convert(host, coarse=8, mode=mode)(images(4, dtype=torch.float32), mask=mask).logits
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert torch.isfinite(mask.grad).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["vit_small_patch16_224", "vit_base_patch16_siglip_224", "eva02_tiny_patch14_224"])
@pytest.mark.parametrize("train", [False, True])
def test_fused_attention_agrees_with_sdpa_per_image(name: str, train: bool) -> None:
    """torch's varlen kernel against the fall-back, values and gate gradient, bf16 on the GPU."""
    model = tiny_model(name, torch.float32, embed_dim=64).cuda()
    results = []
    for backend, dtype in (("varlen", torch.bfloat16), ("sdpa", torch.bfloat16), ("sdpa", torch.float32)):
        image, mask = batch_of(model)
        mask.requires_grad_(train)
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
@pytest.mark.parametrize(("name", "mode"), [*HOST_MODES, (SWINS[1], "packed"), (SWINS[1], "masked")])
def test_modes_agree_on_the_gpu(name: str, mode: str) -> None:
    """In float64, where there is no kernel, against the CPU."""
    model = tiny_model(name, mode=mode)
    image, mask = batch_of(model)
    with torch.no_grad():
        want = model(image, mask=mask).logits
        got = model.cuda()(image.cuda(), mask=mask.cuda()).logits.cpu()
    assert relative_error(got, want) < 1e-9


def test_gradients_do_not_depend_on_the_order_of_threads() -> None:
    """Threads that add to one row of a table in any order would give runs of one seed different weights."""
    model = tiny_model(dtype=torch.float32, gate=msvit.LearnedGate(coarse=8), mode="masked", img_size=64).train()
    image, found = torch.rand(16, 3, 64, 64), []
    torch.set_num_threads(4)
    for _ in range(3):
        torch.manual_seed(0)
        model.zero_grad()
        model(image).logits.square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    differing = {name for other in found[1:] for name in other if not torch.equal(other[name], found[0][name])}
    assert len(found[0]) > 30
    assert not differing
