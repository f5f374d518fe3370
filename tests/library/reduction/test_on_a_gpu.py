"""Reducers on a GPU: the same numbers in every mode, compiled and captured too, and nothing waits for the device."""

from collections.abc import Callable

import pytest
import torch
from tiny import images, mixed_mask, relative_error, tiny_host

import msvit
from msvit.execution import MODES
from msvit.tokens import tokenize
from msvit.types import GateOutput

pytestmark = pytest.mark.gpu
MAKERS = {
    "evit": lambda: msvit.EViT(0.6, at=(1, 3)),
    "dynamicvit": lambda: msvit.DynamicViT(0.6, at=(1, 3)),
    "tome": lambda: msvit.ToMe(r=3),
}


def model_of(make: Callable[[], msvit.Reducer], gate: msvit.Gate | None = None, mode: str = "packed") -> msvit.MSViT:
    torch.manual_seed(0)
    host = tiny_host(dtype=torch.float32, depth=4)
    return msvit.convert(host, coarse=8, gate=gate, mode=mode, reducer=make()).cuda().eval()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("mode", MODES)
def test_modes_agree_on_the_gpu(name: str, mode: str) -> None:
    image, mask = images(4, dtype=torch.float32).cuda(), mixed_mask(4, 2, 2, torch.float32).cuda()
    with torch.no_grad():
        got, want = (model_of(MAKERS[name], mode=each)(image, mask=mask) for each in (mode, "masked"))
    assert relative_error(got.logits, want.logits) < 1e-4
    assert torch.equal(got.tokens.count, want.tokens.count)
    assert relative_error(msvit.dense_map(got.tokens), msvit.dense_map(want.tokens)) < 1e-4


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("gate", [msvit.AllFine(coarse=8), None], ids=["plain", "gated"])
@pytest.mark.parametrize("options", [{"inductor": False}, {}], ids=["eager", "compiled"])
@pytest.mark.usefixtures("unchecked")
def test_accelerated_it_is_the_same(name: str, gate: msvit.Gate | None, options: dict[str, bool]) -> None:
    model = model_of(MAKERS[name], gate)
    fast = msvit.compile(model, **options)
    with torch.inference_mode():
        for turn in range(3):
            image = images(4, dtype=torch.float32).cuda() * (turn + 1)
            for mask in (None, (torch.rand(4, 2, 2, device="cuda") < turn / 2).float()):
                got, want = fast(image, mask=mask), model(image, mask=mask)
                assert relative_error(got.logits, want.logits) < 1e-4
                assert torch.equal(got.tokens.count, want.tokens.count)
                assert relative_error(msvit.dense_map(got.tokens), msvit.dense_map(want.tokens)) < 1e-4


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("share", [0.5, 1.0], ids=["ragged", "all fine"])
def test_nothing_waits_for_the_device(name: str, share: float) -> None:
    model, image = model_of(MAKERS[name]), images(4, dtype=torch.float32).cuda()
    mask = (torch.rand(4, 2, 2, device="cuda") < share).float()
    layout = MODES["packed"](GateOutput.from_mask(mask), model.grid(image), 1)
    with torch.inference_mode():
        tokens = tokenize(image, layout, model.backbone)
        model.backbone(tokens, reducer=model.reducer)
        torch.cuda.set_sync_debug_mode("error")
        try:
            left = model.backbone(tokens, reducer=model.reducer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert left.layout.has_padding == (share < 1)


@pytest.mark.parametrize("name", MAKERS)
def test_training_in_half_precision_gives_gradients(name: str) -> None:
    model = model_of(MAKERS[name]).train()
    image, mask = images(4, dtype=torch.float32).cuda(), mixed_mask(4, 2, 2, torch.float32).cuda()
    for mode in MODES:
        model = model.with_options(mode=mode)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            model(image, mask=mask).logits.float().square().sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.host.parameters() if p.grad is not None)
