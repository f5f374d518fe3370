"""The dense model needs no cells: with AllFine they may be the host's patches, and any number of these will do."""

from pathlib import Path

import pytest
import torch
from tiny import HOSTS, KINDS, assert_same, images, tiny_host
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import msvit


def dense(name: str = HOSTS[0], mode: str = "packed", dtype: torch.dtype = torch.float64) -> msvit.MSViT:
    """Five by three patches of 4 px."""
    host = tiny_host(name, dtype, img_size=(20, 12)).requires_grad_(False)
    return msvit.convert(host, coarse=4, gate=msvit.AllFine(coarse=4), mode=mode)


@pytest.mark.parametrize("name", KINDS)
def test_it_is_the_host_whatever_the_number_of_its_patches(name: str) -> None:
    image = images(2, 20, 12)
    for mode in ("packed", "trimmed", "masked"):
        model = dense(name, mode)
        output = model(image)
        assert_same([output.logits], [model.host(image)])
        assert output.tokens.count.tolist() == [15, 15]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.host(image[:1])
    assert msvit.macs(model, image).tolist() == [counter.get_total_flops() // 2] * 2


def test_it_keeps_what_a_model_can_do(tmp_path: Path) -> None:
    model, image = dense(dtype=torch.float32), images(2, 20, 12, torch.float32)
    want = model(image)
    assert torch.equal(msvit.load(msvit.save(model, tmp_path))(image).logits, want.logits)
    assert torch.equal(model(image, max_tokens=2 * 16).logits, want.logits)
    with pytest.raises(ValueError, match="max_tokens is 31, but 2 images of 20x12px have 32 tokens"):
        model(image, max_tokens=31)
    torch.testing.assert_close(msvit.compile(model)(image).logits, want.logits)
    assert msvit.dense_map(want.tokens).shape == (2, 32, 5, 3)
    reduced = model.with_options(reducer=msvit.EViT(0.6, at=(1,)))
    assert reduced(image).tokens.count.tolist() == [10, 10]  # 9 of 15, and one fused token


@pytest.mark.parametrize("gate", [msvit.DiscGate(coarse=4), msvit.AllCoarse(coarse=4), None])
def test_other_gates_need_cells_of_several_patches(gate: msvit.Gate | None) -> None:
    with pytest.raises(ValueError, match=r"coarse is 4px and fine is 4px, but coarse must be 2, 3, \.\.\. times fine"):
        msvit.convert(tiny_host(), coarse=4, gate=gate)
