"""Segmenter: the dense one where nothing is coarse, one feature for a coarse cell, images of any size."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import KINDS, assert_same_output, images, mixed_mask, relative_error, tiny_host
from torch import Tensor, nn

import msvit
from msvit.heads import LinearDecoder, MaskDecoder

DECODERS = ("mask", "linear")


def make(name: str = KINDS[0], decoder: str = "mask", **options: Any) -> Any:
    host = tiny_host(name, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = msvit.convert_segmenter(host, 7, gate=msvit.AllFine(coarse=8), decoder=decoder).eval()
        for parameter in model.decoder.parameters():  # biases and norms too must matter
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


def dense(model: Any, image: Tensor) -> Tensor:
    """The plain Segmenter of the same weights: padding, encoder, decoder, upsampling, and cut to the image's size."""
    host, (height, width) = model.host, image.shape[2:]
    image = F.pad(image, (0, -width % 8, 0, -height % 8))
    patches = host.forward_features(image)[:, host.num_prefix_tokens :]  # (b, n, d)
    if isinstance(host.norm, nn.Identity):  # hosts that pool first and norm then
        patches = host.fc_norm(patches)
    side = image.shape[2] // host.patch_embed.patch_size[0]
    low = decode(model.decoder, patches).transpose(1, 2).unflatten(2, (side, -1))
    return F.interpolate(low, size=image.shape[2:], mode="bilinear", align_corners=False)[:, :, :height, :width]


def decode(decoder: Any, patches: Tensor) -> Tensor:
    """Strudel et al., section 3.2, written out: (b, n, d) -> (b, n, classes)."""
    if isinstance(decoder, LinearDecoder):
        return patches @ decoder.classify.weight.T + decoder.classify.bias
    num = patches.shape[1]
    classes = decoder.classes.repeat(len(patches), 1, 1)
    x = torch.cat([decoder.enter(patches), classes], 1)
    for block in decoder.blocks:
        x = x + block.attn(block.norm1(x))
        x = x + block.mlp(block.norm2(x))
    x = decoder.norm(x)
    one, other = x[:, :num] @ decoder.project_patches.weight.T, x[:, num:] @ decoder.project_classes.weight.T
    one, other = one / one.norm(dim=-1, keepdim=True), other / other.norm(dim=-1, keepdim=True)
    return decoder.norm_scores(torch.einsum("bnd,bcd->bnc", one, other))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", KINDS)
def test_all_fine_is_the_dense_segmenter(name: str, decoder: str) -> None:
    model, image = make(name, decoder), images()
    with torch.no_grad():
        assert relative_error(model(image).logits, dense(model, image)) < 1e-9


@pytest.mark.parametrize("size", [(21, 30), (1, 1), (8, 17)])
def test_odd_sizes_come_back_at_their_own_size_border_included(size: tuple[int, int]) -> None:
    model, image = make(dynamic_img_size=True), images(2, *size)
    with torch.no_grad():
        got = model(image).logits
        assert got.shape == (2, 7, *size)
        assert relative_error(got, dense(model, image)) < 1e-9


def test_the_map_tells_the_gate_what_the_other_scale_would_have_given() -> None:
    """Masked mode has both twins: the map is w x + (1 - w) x', and so is its gradient."""
    model, image = make(), images(4)
    model = model.with_options(mode="masked")
    wanted = torch.randn(4, 32, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def naive(tokens: Any, mask: Tensor) -> Tensor:
        x = tokens.x.view(4, -1, 32)  # class token, 4 cells, 16 patches
        fine = x[:, 5:].transpose(1, 2).unflatten(2, (4, 4))
        coarse = x[:, 1:5].transpose(1, 2).unflatten(2, (2, 2)).repeat_interleave(2, 2).repeat_interleave(2, 3)
        m = mask.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None]
        return m * fine + (1 - m) * coarse

    grads = []
    for to_map in (lambda tokens, mask: msvit.dense_map(tokens), naive):
        mask = mixed_mask(4, 2, 2).requires_grad_()
        features = to_map(model(image, mask).tokens, mask)
        (features * wanted).sum().backward()
        grads.append(mask.grad)
    assert relative_error(grads[0], grads[1]) < 1e-9


def test_packed_mode_gives_the_gate_the_gradient_of_attention_alone() -> None:
    model, image = make(), images(4)
    mask = mixed_mask(4, 2, 2).requires_grad_()
    tokens = model(image, mask).tokens
    (features,) = torch.autograd.grad(msvit.dense_map(tokens).sum(), tokens.x, retain_graph=True)
    grads = [torch.autograd.grad(y, mask, g, retain_graph=True)[0]
             for y, g in ((msvit.dense_map(tokens).sum(), None), (tokens.x, features))]  # fmt: skip
    assert torch.allclose(*grads)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("reducer", [None, msvit.ToMe(r=2)], ids=["no reducer", "ToMe"])
def test_loaded_and_compiled_it_is_the_same(decoder: str, reducer: msvit.Reducer | None, tmp_path: Any) -> None:
    host, gate = tiny_host(dtype=torch.float32), msvit.DiscGate(coarse=8, share=0.5)
    model = msvit.convert_segmenter(host, 7, gate=gate, decoder=decoder, reducer=reducer).eval()
    back, image = msvit.load(msvit.save(model, tmp_path)), images(2, 20, 17, dtype=torch.float32)
    with torch.no_grad():
        want = model(image)
        assert want.logits.shape == (2, 7, 20, 17)
        assert_same_output(back(image), want, 0)
        assert_same_output(msvit.compile(model)(image), want, 1e-5)
        for mode in ("masked", "trimmed"):
            assert_same_output(model.with_options(mode=mode)(image), want, 1e-4)
    assert back.gate.config == gate.config
    if reducer is not None:
        whole = msvit.convert_segmenter(host, 7, gate=gate, decoder=decoder).eval()
        assert (msvit.macs(back, image) < msvit.macs(whole, image)).all()


def test_compiling_leaves_the_model_alone() -> None:
    model = msvit.convert_segmenter(tiny_host(dtype=torch.float32), 7).train()
    fast = msvit.compile(model)
    assert model.decoder.training
    fast.train()
    model.eval()
    assert fast.decoder.training
    assert fast.decoder.classes is model.decoder.classes
    model.gate.threshold = 100.0
    with torch.no_grad():
        counts = [m.eval()(images(1, dtype=torch.float32)).tokens.count.item() for m in (model, fast)]
    assert counts == [4, 4]  # all coarse, in both


@pytest.mark.parametrize("width", [32, 96, 200, 320])
def test_a_mask_decoder_has_heads_for_any_width(width: int) -> None:
    decoder = MaskDecoder(width, 3).eval()
    assert decoder(torch.zeros(1, width, 2, 2)).shape == (1, 3, 2, 2)


def test_training_reaches_decoder_encoder_and_gate() -> None:
    model = msvit.convert_segmenter(tiny_host(dtype=torch.float32), 7, mode="masked").train()
    model(images(2, dtype=torch.float32)).logits.square().mean().backward()
    unused = {name for name, p in model.named_parameters() if p.grad is None}
    assert unused == {"encoder.backbone.host.head.weight", "encoder.backbone.host.head.bias"}


@torch.no_grad()
def test_torch_compile_traces_a_segmenter_in_one_graph() -> None:
    model, image = make().with_options(mode="masked"), images(2)
    traced = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(image).logits, model(image).logits)
