"""A Swin on a GPU: the same numbers in both modes, compiled and captured too, and nothing waits for the device."""

import pytest
import torch
from test_swin import some_masks, swin_images
from tiny import SWINS, relative_error, tiny_swin

import msvit
from msvit.backbones.timm_swin import TimmSwin
from msvit.compiling import cuda
from msvit.compiling.graphed_forward import SwinTrunk

pytestmark = pytest.mark.gpu


def model_of(name: str = SWINS[0], dtype: torch.dtype = torch.float32, **options: object) -> msvit.MSViT:
    """Heads of 16 numbers, the smallest our kernel takes."""
    host = tiny_swin(name, dtype, num_heads=(1, 2, 4, 8))
    return msvit.convert(host, **{"merge_at": 3, **options}).cuda().eval()


@pytest.mark.parametrize("name", SWINS)
@pytest.mark.parametrize("mode", TimmSwin.modes)
def test_modes_agree_on_the_gpu(name: str, mode: str) -> None:
    """In float64, where there is no kernel, against the CPU."""
    model, image, mask = model_of(name, torch.float64, mode=mode), swin_images(4), some_masks(4, 4)
    with torch.no_grad():
        got = model(image.cuda(), mask=mask.cuda()).logits.cpu()
        want = model.cpu()(image, mask=mask).logits
    assert relative_error(got, want) < 1e-9


@pytest.fixture(params=["one graph", "buckets"])
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SMALL", 8 if request.param == "buckets" else 10**6)
    monkeypatch.setattr(cuda, "ALIGN", 32)


@pytest.mark.parametrize("name", SWINS)
@pytest.mark.parametrize("options", [{"inductor": False, "graphs": False}, {"inductor": False}, {}])
@pytest.mark.parametrize("coarse", [16, 32])
@pytest.mark.usefixtures("regime", "unchecked")
def test_accelerated_it_is_the_same(name: str, options: dict[str, bool], coarse: int) -> None:
    model = model_of(name, coarse=coarse)
    fast = msvit.compile(model, **options)
    with torch.inference_mode():
        for turn, size in enumerate((4, 4, 3, 4)):
            image = swin_images(size, dtype=torch.float32).cuda() * (turn + 1)
            for mask in (None, torch.rand(size, 64 // coarse, 64 // coarse, device="cuda") < turn / 3):
                got, want = fast(image, mask=mask), model(image, mask=mask)
                assert relative_error(got.logits, want.logits) < 1e-4
                assert torch.equal(got.tokens.count, want.tokens.count)
                assert relative_error(msvit.dense_map(got.tokens), msvit.dense_map(want.tokens)) < 1e-4


@pytest.mark.parametrize("name", SWINS)
@pytest.mark.usefixtures("unchecked")
def test_in_half_precision_it_is_nearly_the_same(name: str) -> None:
    model, image, mask = model_of(name), swin_images(4, dtype=torch.float32).cuda(), some_masks(4, 4).cuda()
    with torch.inference_mode():
        want = model(image, mask=mask).logits
        got = msvit.compile(model.bfloat16())(image.bfloat16(), mask=mask).logits
    assert relative_error(got.float(), want) < 0.05


@pytest.mark.usefixtures("unchecked")
def test_weights_that_change_are_seen() -> None:
    model = model_of()
    fast, image, mask = msvit.compile(model), swin_images(4, dtype=torch.float32).cuda(), some_masks(4, 4).cuda()
    with torch.no_grad():
        fast(image, mask=mask)
        model.host.layers[0].blocks[0].attn.relative_position_bias_table.mul_(-3)
        assert relative_error(fast(image, mask=mask).logits, model(image, mask=mask).logits) < 1e-4


def test_nothing_waits_for_the_device() -> None:
    model, image = model_of(), swin_images(4, dtype=torch.float32).cuda()
    mask = (torch.rand(4, 4, 4, device="cuda") < 0.5).float()
    trunk, grid = SwinTrunk(model.backbone, model.coarse), model.grid(image)

    def run() -> torch.Tensor:
        arrays = trunk.pack_indices(mask, grid, 64 * 16, 0)
        return trunk(image, mask, arrays, trunk.tables(grid), False)[0]

    with torch.inference_mode():
        want = run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert relative_error(got, want) == 0


@pytest.mark.parametrize("mode", TimmSwin.modes)
def test_training_in_half_precision_gives_gradients(mode: str) -> None:
    """Accelerated too, where it is the plain model that runs."""
    model = model_of(mode=mode).train()
    image = swin_images(4, dtype=torch.float32).cuda()
    for each in (model, msvit.compile(model)):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            each(image).logits.float().square().sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        assert all(p.grad is not None for p in model.gate.parameters())
