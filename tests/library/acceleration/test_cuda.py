"""On a GPU the accelerated model gives what the plain one gives, for any mask, in inference and in training."""

import pytest
import torch
from tiny import KINDS, images, mixed_mask, relative_error, tiny_host
from torch import Tensor

import msvit
from msvit.compiling import cuda

pytestmark = pytest.mark.gpu


def pair(name: str = "vit_small_patch16_224", **options: object) -> tuple[msvit.MSViT, msvit.MSViT]:
    host = tiny_host(name, dtype=torch.float32, dynamic_img_size=True)
    model = msvit.convert(host, coarse=8).cuda().eval()
    return model, msvit.compile(model, **options)


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    return images(size, dtype=torch.float32).cuda(), mixed_mask(size, 2, 2, torch.float32).cuda()


@pytest.fixture(params=["one graph", "buckets"])
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "buckets":
        monkeypatch.setattr(cuda, "SMALL", 8)
        monkeypatch.setattr(cuda, "ALIGN", 4)


@pytest.mark.parametrize("options", [{"inductor": False}, {"inductor": False, "graphs": False}])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("regime")
def test_the_same_numbers_for_any_mask(name: str, options: dict[str, bool]) -> None:
    model, fast = pair(name, **options)
    image, mask = batch()
    with torch.inference_mode():
        for turn in range(4):
            these = mask if turn == 0 else (torch.rand(4, 2, 2, device="cuda") < turn / 4).float()
            want, got = model(image, mask=these), fast(image, mask=these)
            assert relative_error(got.logits, want.logits) < 1e-4
            assert torch.equal(got.tokens.count, want.tokens.count)
            assert relative_error(msvit.dense_map(got.tokens), msvit.dense_map(want.tokens)) < 1e-4
        want, got = model(image), fast(image)
        assert relative_error(got.logits, want.logits) < 1e-4
        assert torch.equal(got.gate.mask, want.gate.mask)


@pytest.mark.parametrize("compile", [True, "blocks"])
@pytest.mark.usefixtures("regime", "unchecked")
def test_compiled_it_is_the_same(compile: bool | str) -> None:
    model, fast = pair(inductor=compile)
    with torch.no_grad():
        for size in (4, 3, 4):
            image, mask = batch(size)
            assert relative_error(fast(image, mask=mask).logits, model(image, mask=mask).logits) < 1e-4


@pytest.mark.parametrize(
    "options", [{"inductor": False}, {"inductor": False, "graphs": False}, {}, {"inductor": "blocks"}]
)
@pytest.mark.usefixtures("regime", "unchecked")
def test_training_gives_the_same_gradients(options: dict[str, bool | str]) -> None:
    model, fast = pair(**options)
    model.train()
    fast.train()
    grads = []
    for each in (model, fast):
        for turn in range(3):  # gradients add up; the mask changes the bucket
            image, mask = batch()
            mask = mask if turn else 1 - mask
            mask.requires_grad_()
            out = each(image, mask=mask)
            (out.logits.square().sum() + out.tokens.prefix.sum()).backward()
        grads.append([mask.grad, *[p.grad for p in model.backbone.parameters()]])
        model.zero_grad()
    assert all(relative_error(got, want) < 1e-3 for want, got in zip(*grads, strict=True))


def test_the_gate_learns_through_graphs() -> None:
    model, fast = pair(inductor=False)
    fast.train()
    fast(batch()[0]).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.gate.parameters())


def test_backward_after_another_forward_is_refused() -> None:
    _, fast = pair(inductor=False)
    image, mask = batch()
    first = fast(image, mask=mask).logits.sum()
    fast(image, mask=mask)
    with pytest.raises(RuntimeError, match="call backward once after each forward"):
        first.backward()


def test_backward_twice_is_refused() -> None:
    _, fast = pair(inductor=False)
    image, mask = batch()
    loss = fast(image, mask=mask).logits.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call backward once after each forward"):
        loss.backward()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_after_training_with_a_fused_optimizer_it_evaluates_with_the_new_weights(optimizer: type) -> None:
    model, fast = pair(inductor=False)
    image, mask = batch()
    with torch.no_grad():
        fast(image, mask=mask)
    step = optimizer(fast.parameters(), lr=0.1, fused=True)
    fast.train()
    fast(image, mask=mask).logits.square().sum().backward()
    step.step()
    fast.eval()
    model.eval()
    with torch.no_grad():
        assert relative_error(fast(image, mask=mask).logits, model(image, mask=mask).logits) < 1e-4


def test_weights_that_begin_to_learn_get_a_gradient() -> None:
    model, fast = pair(inductor=False)
    image, mask = batch()
    model.host.requires_grad_(False)
    fast(image).logits.sum().backward()
    model.host.requires_grad_(True)
    fast(image, mask=mask).logits.sum().backward()
    assert all(p.grad is not None for p in model.host.parameters())


def test_a_frozen_model_passes_the_masks_gradient_on() -> None:
    model, fast = pair(inductor=False)
    model.requires_grad_(False)
    image, mask = batch()
    grads = []
    for each in (model, fast):
        mine = mask.clone().requires_grad_()
        each(image, mask=mine).logits.square().sum().backward()
        grads.append(mine.grad)
    assert relative_error(grads[1], grads[0]) < 1e-3


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "deit_small_distilled_patch16_224"])
def test_what_no_graph_can_hold_runs_as_it_did(name: str) -> None:
    """float64, which our kernels do not take, and heads of a size that only SDPA takes in float32."""
    for dtype, dim in ((torch.float64, 16), (torch.float32, 12)):
        host = tiny_host(name, dtype=dtype, embed_dim=2 * dim, dynamic_img_size=True)
        model = msvit.convert(host, coarse=8).cuda().to(dtype).eval()
        fast, (image, mask) = msvit.compile(model), batch()
        with torch.no_grad():
            got, want = (each(image.to(dtype), mask=mask).logits for each in (fast, model))
        assert relative_error(got, want) < 1e-5


def test_changed_weights_are_noticed() -> None:
    model, fast = pair(inductor=False)
    image, mask = batch()
    with torch.no_grad():
        fast(image, mask=mask)
        for parameter in model.parameters():
            parameter.mul_(0.9)
        assert relative_error(fast(image, mask=mask).logits, model(image, mask=mask).logits) < 1e-4


def test_the_results_of_one_call_survive_the_next() -> None:
    _, fast = pair(inductor=False)
    image, mask = batch()
    with torch.no_grad():
        first = fast(image, mask=mask)
        kept = first.logits.clone(), first.tokens.x.clone(), first.gate.mask.clone()
        fast(-image, mask=1 - mask)
    assert all(torch.equal(a, b) for a, b in zip(kept, (first.logits, first.tokens.x, first.gate.mask), strict=True))


def test_autocast_is_honoured() -> None:
    model, fast = pair(inductor=False)
    image, mask = batch()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        want, got = model(image, mask=mask).logits, fast(image, mask=mask).logits
    assert got.dtype is torch.bfloat16
    assert relative_error(got.float(), want.float()) < 0.02


@pytest.mark.parametrize("where", ["budget", "small batch"])
def test_nothing_waits_for_the_device(where: str) -> None:
    model, fast = pair(inductor=False)
    image, mask = batch()
    mask = mask.bool()

    def run() -> Tensor:
        return model(image, mask=mask, max_tokens=60).logits if where == "budget" else fast(image, mask=mask).logits

    with torch.no_grad():
        want = run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)


@pytest.mark.parametrize("learns", [False, True])
def test_a_segmenter_is_the_same(learns: bool) -> None:
    model = msvit.convert_segmenter(tiny_host(dtype=torch.float32), 5, coarse=8).cuda().eval()
    fast = msvit.compile(model, inductor=False)
    image = images(4, 13, 24, dtype=torch.float32).cuda()
    mask = mixed_mask(4, 2, 3, torch.float32).cuda()
    with torch.set_grad_enabled(learns):
        want, got = model(image, mask), fast(image, mask)
    assert got.logits.shape == (4, 5, 13, 24)
    assert relative_error(got.logits, want.logits) < 1e-4
    if learns:
        weights = [p for name, p in model.named_parameters() if "host.head" not in name and "gate" not in name]
        grads = [torch.autograd.grad(out.logits.square().sum(), weights) for out in (want, got)]
        assert all(relative_error(b, a) < 1e-3 for a, b in zip(*grads, strict=True))
