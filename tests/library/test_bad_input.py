"""Bad input gets a sentence with both values and the remedy, never a crash deep in torch (values: test_calls.py)."""

from collections.abc import Callable
from functools import cache

import pytest
import timm
import torch
from tiny import images, tiny_host, tiny_model, tiny_swin
from torch import Tensor, nn

import msvit
from msvit.compiling import cuda
from msvit.compiling.cpu import CpuMSViT
from msvit.execution.attention import force_backend
from msvit.saving.host import without_weights
from msvit.types import check_image, check_mask
from msvit_lab.evaluation.info import describe

GAP = "vit_base_patch16_gap_224"
FINE, RATE = msvit.AllFine(coarse=8), msvit.EViT(0.7, at=(1,))


@cache
def model() -> msvit.MSViT:
    return tiny_model()


@cache
def segmenter() -> msvit.Segmenter:
    return msvit.convert_segmenter(tiny_host(), 7, coarse=8)


@cache
def tokens() -> msvit.TokenBatch:
    return tiny_model(img_size=(24, 48))(images(4, 24, 48)).tokens


@cache
def dense() -> Tensor:
    return msvit.dense_map(tokens())  # (4, 32, 6, 12)


def run(*shape: int, dtype: torch.dtype = torch.float64) -> None:
    model()(torch.zeros(shape, dtype=dtype))


def mask(*shape: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
    model()(images(), mask=torch.full(shape, value, dtype=dtype))


def reduce(reducer: msvit.Reducer, name: str = "vit_small_patch16_224", **options: object) -> None:
    tiny_model(name, gate=FINE, reducer=reducer, **options)(images())


def reuse(reducer: msvit.Reducer) -> None:
    tiny_model(reducer=reducer)
    tiny_model(reducer=reducer, embed_dim=64)


def backend(name: str) -> None:
    with force_backend(name):
        model()(images())


def convert(name: str) -> None:
    msvit.convert(without_weights(lambda: timm.create_model(name)), coarse=32)


def overriding(method: str) -> None:
    host = tiny_host()
    host.__class__ = type("Other", (type(host),), {method: lambda self, x: x})
    msvit.convert(host, coarse=8)


class Windowed(nn.Module):
    window_size = 7


class Other(msvit.MSViT):
    pass


def fast() -> msvit.MSViT:
    return cuda.CudaMSViT(tiny_model(dtype=torch.float32), inductor=False, graphs=False)


WRONG: list[tuple[Callable[[], object], str]] = [
    # images
    (lambda: run(1, 3, 20, 16), r"image is 20x16px.*multiples of 8.*resize"),
    (lambda: run(1, 3, 4, 16), r"4x16px.*for example to 8x16"),
    (lambda: run(1, 4, 16, 16), r"4 channels.*built for 3.*in_chans=4"),
    (lambda: run(0, 3, 16, 16), r"batch is empty.*\(0, 3, 16, 16\)"),
    (lambda: run(3, 16, 16), r"\(b, c, h, w\), got \(3, 16, 16\)"),
    (lambda: run(1, 3, 16, 16, dtype=torch.uint8), r"float tensor.*uint8"),
    (lambda: run(1, 3, 16, 16, dtype=torch.float32), r"torch\.float32.*weights are torch\.float64.*autocast"),
    (lambda: check_image([1, 2, 3], coarse=8), r"float tensor.*got list"),
    (lambda: msvit.LearnedGate(coarse=8)(torch.randn(1, 4, 16, 16)), "4 channels"),
    (lambda: msvit.ContextGate(coarse=32)(torch.rand(1, 1, 64, 64)), "make a ContextGate with in_chans=1"),
    (lambda: msvit.DiscGate(coarse=8)(torch.randn(1, 3, 17, 16)), "17x16"),
    (lambda: segmenter()(images()[0]), "add a batch axis"),
    (lambda: segmenter()(images()[:, :2]), "channels"),
    # masks, budgets and modes
    (lambda: mask(1, 2, 3), r"mask is \(1, 2, 3\).*\(3, 2, 2\)"),
    (lambda: mask(3, 4), r"mask is \(3, 4\)"),
    (lambda: mask(3, 2, 2, value=0.5), r"such as 0\.5.*threshold"),
    (lambda: mask(3, 2, 2, value=2), r"such as 2"),
    (lambda: mask(3, 2, 2, value=torch.nan), r"such as nan"),
    (lambda: mask(3, 2, 2, dtype=torch.complex64), r"complex64.*mask\.float"),
    (lambda: check_mask([[1, 0], [0, 1]], 3, (2, 2)), r"tensor \(3, 2, 2\).*got list"),
    (lambda: segmenter()(images(3, 20, 16), torch.ones(3, 2, 2)), r"mask is \(3, 2, 2\), but .* cells \(3, 3, 2\)"),
    (lambda: model()(images(), max_tokens=14), "pass at least"),
    (lambda: tiny_model(mode="masked")(images(), max_tokens=99), r"with_options\(mode=.packed.\)"),
    (lambda: tiny_model(mode="dense"), "packed, trimmed, masked"),
    (lambda: backend("fast"), "varlen, flash, sdpa"),
    (lambda: backend("triton"), "force another backend"),  # of float64
    # tokens and maps
    (lambda: msvit.from_dense(dense()[:1], tokens().layout), r"dense is a tensor \(1, 32, 6, 12\).*\(4, any, 6, 12\)"),
    (lambda: msvit.from_dense(dense()[..., :6], tokens().layout), r"\(4, 32, 6, 6\).*must be \(4, any, 6, 12\)"),
    (lambda: msvit.from_dense(dense().permute(0, 2, 3, 1), tokens().layout), r"\(4, 6, 12, 32\).*\(4, any, 6, 12\)"),
    (lambda: msvit.TokenBatch(tokens().x[1:], tokens().layout), r"x is a tensor \(\d+, 32\).*must be \(\d+, d\)"),
    # parts of a model
    *((lambda coarse=coarse: msvit.convert(tiny_host(), coarse=coarse),
       rf"coarse is {coarse}px and fine is 4px.*coarse=8") for coarse in (0, 4, 6, 10)),
    (lambda: tiny_model(gate=msvit.DiscGate(coarse=16)), r"cells of 16px, but coarse is 8px.*coarse=8"),
    (lambda: msvit.convert(model()), r"converted already.*model\.host"),
    (lambda: msvit.convert_segmenter(segmenter(), 7), "converted already"),
    (lambda: msvit.convert_segmenter(tiny_host(), 7, decoder="msk"), "unknown decoder 'msk'; known: mask, linear"),
    (lambda: msvit.convert_segmenter(tiny_host(), 1), "num_classes is 1, but must be a whole number >= 2"),
    (lambda: msvit.EntropyGate(coarse=32), "share=0.3"),
    (lambda: msvit.EntropyGate(coarse=32, share=0.3, threshold=1.0), "exactly one"),
    (lambda: msvit.LearnedGate(coarse=0), "coarse is 0, but must be a whole number >= 2"),
    (lambda: describe("vit_smal_patch16_224"), r"timm has no model.*vit_small_patch16_224"),
    (lambda: msvit.macs(tiny_host(), images()), r"msvit\.convert"),
    # reducers
    (lambda: msvit.EViT(0.0), r"rate is 0.*\(0, 1\]"),
    (lambda: msvit.EViT(float("nan")), r"rate is nan"),
    (lambda: msvit.DynamicViT(-0.1), r"rate is -0\.1, but must be a finite number in \(0, 1\]"),
    (lambda: msvit.ToMe(rate=0.4), r"rate is 0\.4.*\[0\.5, 1\]"),
    (lambda: msvit.ToMe(), r"r is None and rate is None.*pass r=13"),
    (lambda: msvit.ToMe(r=3, rate=0.9), r"r is 3 and rate is 0\.9"),
    (lambda: msvit.EViT(at=()), r"at is \(\).*\(3, 6, 9\)"),
    (lambda: msvit.EViT(at=(1, 1)), r"rising order"),
    (lambda: msvit.DynamicViT(at=(-1, 3)), r"from 0 on"),
    (lambda: reduce(msvit.EViT()), r"EViT reduces at blocks \(3, 6, 9\), but the host has blocks 0 to 1; pass .* at="),
    (lambda: reduce(msvit.DynamicViT(at=(2,))), r"blocks \(2,\).*0 to 1"),
    (lambda: reduce(RATE, GAP), r"no class token.*msvit\.ToMe"),
    (lambda: reduce(msvit.ToMe(r=9)), r"r is 9.*16x16px.*16 tokens.*at most r=8"),
    (lambda: reuse(msvit.DynamicViT(at=(1,))), r"tokens of 32 numbers, but the host's have 64; make a new one"),
    (lambda: model().with_options(reducer=msvit.EViT(0.6)), r"pass for example at="),
    # hosts
    (lambda: convert("beit_base_patch16_224"), "relative position bias"),
    (lambda: convert("vit_relpos_small_patch16_224"), "relative position bias"),
    (lambda: convert("swinv2_cr_tiny_224"), "attention in windows"),
    (lambda: convert("vit_small_r26_s32_224"), "convolutional stem"),
    (lambda: convert("resnet18"), "convolutional stem"),
    (lambda: convert("vit_small_patch16_rope_mixed_224"), "rotary positions"),
    (lambda: convert("vit_base_patch16_rpn_224"), "ResPostBlock"),
    (lambda: msvit.convert(Windowed()), "windows"),
    (lambda: tiny_model(attn_drop_rate=0.1), "attention dropout"),
    (lambda: tiny_model(patch_drop_rate=0.1), "patch dropout"),
    (lambda: tiny_model(global_pool="max"), "pooling is 'max'"),
    (lambda: msvit.convert(tiny_host(patch_size=(4, 8)), coarse=16), "not square"),
    (lambda: overriding("forward"), "its forward is not one"),
    (lambda: overriding("_pos_embed"), "its forward is not one"),
    # Swin
    (lambda: msvit.convert(tiny_swin(), merge_at=1), "blocks 1 to 4 .* pass merge_at from 2 to 4"),
    (lambda: msvit.convert(tiny_swin(), merge_at=5), "merge_at is 5, .* pass merge_at from 2 to 4"),
    (lambda: msvit.convert(tiny_swin(), gate=FINE, merge_at=3),
     "cells are 8px, .* enter block 3, where a token covers 16px; give a gate with cells of 16px or a multiple"),
    (lambda: msvit.convert(tiny_swin(), merge_at=3, coarse=24),
     "cells are 24px, .* cells of 16px or a multiple of it, or another merge_at"),
    (lambda: msvit.convert(tiny_swin(), merge_at=4)(images(2, 64, 72)), "64x72px, .* of 32; resize it, .* to 64x64"),
    (lambda: msvit.convert(tiny_swin(), mode="trimmed"), "unknown mode 'trimmed' for a SwinTransformer"),
    (lambda: msvit.convert(tiny_swin(), reducer=RATE), "leave reducer out, or use a ViT"),
    (lambda: msvit.convert_segmenter(tiny_swin(), 5), "convert a ViT, or classify"),
    (lambda: msvit.convert(tiny_swin(attn_drop_rate=0.1)), "build it with attn_drop_rate=0"),
    (lambda: msvit.convert(tiny_host(), merge_at=3), "leave merge_at out, or convert a Swin"),
    # compiled models
    (lambda: msvit.compile(tiny_host()), r"call msvit\.convert first"),
    (lambda: CpuMSViT(tiny_host()), r"msvit\.convert"),
    (lambda: msvit.compile(Other(model().backbone, model().gate, 8)), "whose forward may differ"),
    (lambda: msvit.compile(model(), inductor="block"), r'inductor is .block., but must be True, False or "blocks"'),
    (lambda: fast().double(), r"convert that one .* msvit\.compile again"),
    (lambda: CpuMSViT(tiny_model(dtype=torch.float32)).double(), r"convert that one .* msvit\.compile again"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_bad_input_is_named_with_the_remedy(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_an_unknown_name_of_the_package_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="convert"):
        _ = msvit.transform


@pytest.mark.parametrize("name", ["vit_small_patch16_224", GAP, "vit_base_patch16_siglip_224"])
def test_masks_of_any_sensible_type_are_taken(name: str) -> None:
    model, mask = tiny_model(name, torch.float32), torch.tensor([[[1, 0], [0, 1]]]).expand(3, -1, -1)
    for mode in model.backbone.modes:
        model = model.with_options(mode=mode)
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64):
            assert model(images(dtype=torch.float32), mask=mask.to(dtype)).tokens.count.tolist() == [10, 10, 10]


def test_a_gate_of_another_precision_serves_all_the_same() -> None:
    assert tiny_model(gate=msvit.LearnedGate(coarse=8))(images()).logits.dtype is torch.float64
