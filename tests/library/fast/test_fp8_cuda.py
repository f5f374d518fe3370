"""Models compiled with dtype="fp8" on a GPU: near the model in float32, for any mask and batch, in replayed graphs."""

from copy import deepcopy

import pytest
import torch
from tiny import KINDS, images, mixed_mask, relative_error, tiny_model
from torch import Tensor

import msvit
from msvit.fast.fp8_encoder import Fp8Encoder, multiply_fp8, quantize_rows
from msvit.fast.fused_plan import FusedPlan

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CAPABLE, reason="needs a CUDA device of compute capability 8.9 or newer"),
]
HOSTS = (KINDS[0], KINDS[1], KINDS[4])  # a class token; layer scales and registers; pooling by attention
BATCHES = {1: 0.4, 3: 0.4, 256: 0.15}  # one graph, and buckets; relative error of logits: of few they vary much


def pair(name: str = KINDS[0]) -> tuple[msvit.MSViT, msvit.MSViT]:
    """A model in 32 bits whose weights fit into bfloat16, and the same compiled for FP8."""
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2))
    model = tiny_model(name, torch.float32, gate=gate, embed_dim=64, num_heads=4).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model, msvit.compile(deepcopy(model).bfloat16(), inductor=False, dtype="fp8")


def batch_of(num: int) -> tuple[Tensor, Tensor]:
    """Images that are bfloat16 numbers, in float32, and their masks."""
    image = images(num, dtype=torch.bfloat16).float().cuda()
    return image, mixed_mask(max(2, num), 2, 2, torch.float32)[:num].cuda()


@pytest.mark.parametrize("rows", [1, 17, 197, 1000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_has_the_scales_of_both_sides(rows: int, has_bias: bool) -> None:
    x = torch.randn(rows, 64, device="cuda") * torch.rand(rows, 1, device="cuda")
    weight = torch.randn(48, 64, device="cuda") * 10 * torch.rand(48, 1, device="cuda")
    bias = torch.randn(48, device="cuda").bfloat16() if has_bias else None
    sides = [quantize_rows(each) for each in (x, weight)]
    out = multiply_fp8(*sides, bias, torch.empty(rows, 48, device="cuda", dtype=torch.bfloat16))
    restored = [value.double() * scale for value, scale in sides]
    want = restored[0] @ restored[1].T + (0 if bias is None else bias.double())
    assert relative_error(out.double(), want) < 5e-3
    assert relative_error(restored[0], x.double()) < 0.03


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_logits_are_near_those_in_float32(name: str, batch: int) -> None:
    model, fast = pair(name)
    assert type(fast.fused) is Fp8Encoder
    image, mask = batch_of(batch)
    with torch.inference_mode():
        for given in (torch.zeros_like(mask), torch.ones_like(mask), mask):  # captured, replayed
            want = model(image, mask=given)
            got = fast(image.bfloat16(), mask=given.bfloat16())
            assert relative_error(got.logits.float(), want.logits) < BATCHES[batch]
            assert relative_error(msvit.dense_map(got.tokens).float(), msvit.dense_map(want.tokens)) < 0.12
            assert torch.equal(got.tokens.count, want.tokens.count)
        encoded = fast.encode(image.bfloat16(), mask=mask.bfloat16())[1]
        assert relative_error(msvit.dense_map(encoded).float(), msvit.dense_map(got.tokens).float()) < 0.05
    same = (got.logits.argmax(1) == want.logits.argmax(1)).float().mean()
    assert batch < 256 or same > 0.8
    assert {type(plan) for plan in fast._plans.values()} == {FusedPlan}


@pytest.mark.parametrize("batch", BATCHES)
def test_replays_see_images_decisions_and_weights_that_change(batch: int) -> None:
    model, fast = pair(HOSTS[1])
    image, _ = batch_of(batch)
    fast.gate.threshold = model.gate.scores(image).median().item()
    with torch.inference_mode(False), torch.no_grad():
        for turn in range(4):
            got = fast((turn + 1) * image.bfloat16())
            want = model((turn + 1) * image, mask=got.gate.mask.float())
            assert relative_error(got.logits.float(), want.logits) < BATCHES[batch]
            if turn == 1:
                for old, new in zip(model.parameters(), fast.parameters(), strict=True):
                    old.copy_((-old if old.ndim == 2 else old).bfloat16())
                    new.copy_(old)
