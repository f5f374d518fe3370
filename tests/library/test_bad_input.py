"""Bad input gets a sentence with both values and the remedy, never a crash deep in torch."""

from collections.abc import Callable

import pytest
import torch
from tiny import images, tiny_host

import msvit
from msvit.backbones import adapt
from msvit.lab.evaluation.info import describe
from msvit.types import check_image, check_mask


@pytest.fixture(scope="module")
def model() -> msvit.MSViT:
    return msvit.convert(tiny_host(), coarse=8)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 3, 20, 16), r"image is 20x16px.*multiples of 8.*resize"),
        ((1, 3, 4, 16), r"4x16px.*for example to 8x16"),
        ((1, 4, 16, 16), r"4 channels.*built for 3.*in_chans=4"),
        ((0, 3, 16, 16), r"batch is empty.*\(0, 3, 16, 16\)"),
        ((3, 16, 16), r"\(b, c, h, w\), got \(3, 16, 16\)"),
    ],
)
def test_images_that_do_not_fit(model: msvit.MSViT, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model(torch.zeros(shape, dtype=torch.float64))


def test_images_that_are_no_float_tensor(model: msvit.MSViT) -> None:
    with pytest.raises(ValueError, match=r"float tensor.*uint8"):
        model(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"float tensor.*got list"):
        check_image([1, 2, 3], coarse=8)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(1, 2, 3), r"mask is \(1, 2, 3\).*\(3, 2, 2\)"),
        (torch.ones(3, 4), r"mask is \(3, 4\)"),
        (torch.full((3, 2, 2), 0.5), r"such as 0\.5.*threshold"),
        (torch.full((3, 2, 2), 2), r"such as 2"),
        (torch.full((3, 2, 2), torch.nan), r"such as nan"),
        (torch.ones(3, 2, 2, dtype=torch.complex64), r"complex64.*mask\.float"),
    ],
)
def test_masks_that_do_not_fit(model: msvit.MSViT, mask: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model(images(), mask=mask)


def test_a_mask_that_is_no_tensor() -> None:
    with pytest.raises(ValueError, match=r"tensor \(3, 2, 2\).*got list"):
        check_mask([[1, 0], [0, 1]], 3, (2, 2))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["vit_small_patch16_224", "vit_base_patch16_gap_224", "vit_base_patch16_siglip_224"])
def test_masks_of_any_sensible_type_are_taken(name: str, dtype: torch.dtype) -> None:
    mask = torch.tensor([[[1, 0], [0, 1]]]).expand(3, -1, -1).to(dtype)
    for mode in ("packed", "trimmed", "masked"):
        model = msvit.convert(tiny_host(name, torch.float32), coarse=8, mode=mode)
        assert model(images(dtype=torch.float32), mask=mask).tokens.count.tolist() == [10, 10, 10]


def test_images_of_another_precision_than_the_weights(model: msvit.MSViT) -> None:
    with pytest.raises(ValueError, match=r"images are torch\.float32.*weights are torch\.float64.*autocast"):
        model(images(dtype=torch.float32))


@pytest.mark.parametrize("coarse", [0, 4, 6, 10])
def test_a_coarse_size_that_is_no_multiple_of_fine(coarse: int) -> None:
    with pytest.raises(ValueError, match=rf"coarse is {coarse}px and fine is 4px.*coarse=8"):
        msvit.convert(tiny_host(), coarse=coarse)


def test_a_gate_for_other_cells() -> None:
    with pytest.raises(ValueError, match=r"cells of 16px, but coarse is 8px.*coarse=8"):
        msvit.convert(tiny_host(), coarse=8, gate=msvit.DiscGate(coarse=16))


def test_a_model_that_is_converted_already(model: msvit.MSViT) -> None:
    with pytest.raises(ValueError, match=r"converted already.*model\.host"):
        msvit.convert(model)


def test_a_gate_of_another_precision_serves_all_the_same() -> None:
    model = msvit.convert(tiny_host(), coarse=8, gate=msvit.LearnedGate(coarse=8))
    assert model(images()).logits.dtype is torch.float64


def test_a_host_that_is_no_model_and_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="convert"):
        _ = msvit.transform
    with pytest.raises(ValueError, match=r"timm has no model.*vit_small_patch16_224"):
        describe("vit_smal_patch16_224")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: msvit.EViT(0.0), r"rate is 0.*\(0, 1\]"),
        (lambda: msvit.EViT(1.2), r"rate is 1\.2"),
        (lambda: msvit.DynamicViT(-0.1), r"rate is -0\.1"),
        (lambda: msvit.EViT(float("nan")), r"rate is nan"),
        (lambda: msvit.ToMe(rate=0.4), r"rate is 0\.4.*\[0\.5, 1\]"),
        (lambda: msvit.ToMe(), r"r is None and rate is None.*pass r=13"),
        (lambda: msvit.ToMe(r=3, rate=0.9), r"r is 3 and rate is 0\.9"),
        (lambda: msvit.ToMe(r=-1), r"r is -1"),
        (lambda: msvit.EViT(at=()), r"at is \(\).*\(3, 6, 9\)"),
        (lambda: msvit.EViT(at=(1, 1)), r"rising order"),
        (lambda: msvit.DynamicViT(at=(-1, 3)), r"from 0 on"),
        (lambda: msvit.EViT(), r"EViT reduces at blocks \(3, 6, 9\), but the host has blocks 0 to 1"),
        (lambda: msvit.DynamicViT(at=(2,)), r"blocks \(2,\).*0 to 1"),
    ],
)
def test_reducers_that_cannot_be(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        msvit.MSViT(adapt(tiny_host()), msvit.AllFine(coarse=8), 8, reducer=make())


def test_reducers_that_do_not_fit_the_host_or_the_image() -> None:
    with pytest.raises(ValueError, match=r"no class token.*msvit\.ToMe"):
        msvit.convert(tiny_host("vit_base_patch16_gap_224"), coarse=8, reducer=msvit.EViT(at=(1,)))
    with pytest.raises(ValueError, match=r"r is 9.*16x16px.*16 tokens.*at most r=8"):
        msvit.convert(tiny_host(), coarse=8, reducer=msvit.ToMe(r=9))(images())
    reducer = msvit.DynamicViT(at=(1,))
    msvit.convert(tiny_host(), coarse=8, reducer=reducer)
    with pytest.raises(ValueError, match=r"tokens of 32 numbers, but the host's have 64; make a new one"):
        msvit.convert(tiny_host(embed_dim=64), coarse=8, reducer=reducer)
