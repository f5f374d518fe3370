"""Every supported host, wrapped and all fine, is the host itself; wrapping changes nothing about it."""

import pytest
import torch
from tiny import HOSTS, SWINS, batch_of, images, relative_error, tiny_host, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import msvit
from msvit.execution import MODES


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("size", [(16, 16), (24, 24), (32, 16), (8, 40), (20, 12)])
def test_all_fine_is_the_original_vit_at_any_size_in_any_mode(name: str, size: tuple[int, int]) -> None:
    """At other sizes than it was built for, that with dynamic_img_size, whether it was built so or not.

    Cells may then be the host's patches, of which any number will do.
    """
    gate = msvit.AllFine(coarse=4 if size == (20, 12) else 8)
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4))[: 2 if size == (16, 16) else 1]:
        dynamic, image = tiny_host(name, dtype, dynamic_img_size=True), images(2, *size, dtype)
        model = msvit.convert(tiny_host(name, dtype, dynamic_img_size=False), gate=gate)
        with torch.no_grad():
            want, once = dynamic(image), model(image).logits
            before = {key: value.data_ptr() for key, value in dynamic.named_parameters()}
            wrapped = msvit.convert(dynamic, gate=gate)
            assert relative_error(wrapped(image).logits, want) < bound
            assert torch.equal(dynamic(image), want), "wrapping leaves the host as it was"
            assert vars(dynamic).keys() == vars(tiny_host(name)).keys()
            assert {key: value.data_ptr() for key, value in wrapped.host.named_parameters()} == before
            for mode in MODES:
                logits = model.with_options(mode=mode)(image).logits
                assert relative_error(logits, want) < bound
                assert mode != "packed" or torch.equal(logits, once)


@pytest.mark.parametrize("name", [HOSTS[0], *SWINS])
def test_evaluations_between_steps_see_the_new_weights(name: str) -> None:
    """Tables of positions, and of a Swin's position biases, are kept while nothing trains.

    Fused optimizers change weights without counting versions.
    """
    model = tiny_model(name, gate=msvit.AllFine(coarse=16 if name in SWINS else 8))
    image, _ = batch_of(model)
    for options in ({"fused": True}, {"foreach": True}):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        for _ in range(2):
            optimizer.zero_grad()
            model(image).logits.square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                assert relative_error(model(image).logits, model.host(image)) < 1e-9
    if name not in SWINS:
        model.host.float()
        assert relative_error(model(image.float()).logits, model.host(image.float())) < 1e-5


def test_a_part_that_does_more_than_its_weights_say_is_run_or_refused() -> None:
    class Shifted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    class Doubled(torch.nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    host, image = tiny_host(), images()
    attn = host.blocks[0].attn
    attn.qkv, before = Shifted(32, 96, dtype=torch.float64), attn.qkv
    attn.qkv.load_state_dict(before.state_dict())
    with torch.no_grad():
        model = msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8))
        assert relative_error(model(image).logits, host(image)) < 1e-9
    host.patch_embed.proj = Doubled(3, 32, 4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="Doubled"):
        msvit.convert(host, coarse=8)


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "eva02_tiny_patch14_224"])
def test_tables_kept_by_inference_do_not_get_in_trainings_way(name: str) -> None:
    with torch.inference_mode():
        model = tiny_model(name)
        assert model(images()).logits.shape == (3, 5), "a model made under inference mode runs"
    model = tiny_model(name, gate=msvit.AllFine(coarse=8))
    with torch.inference_mode():
        model(images())
    model.train()(images()).logits.sum().backward()
    assert model.host.pos_embed.grad.abs().sum() > 0


def test_a_model_whose_cells_are_patches_can_do_what_others_can() -> None:
    host, image = tiny_host(dtype=torch.float32, img_size=(20, 12)), images(2, 20, 12, torch.float32)
    model = msvit.convert(host.requires_grad_(False), gate=msvit.AllFine(coarse=4))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(image)
    want = model(image)
    assert want.tokens.count.tolist() == [15, 15]
    assert 2 * msvit.macs(model, image).sum() == counter.get_total_flops()
    assert torch.equal(model(image, max_tokens=2 * 16).logits, want.logits)
    with pytest.raises(ValueError, match="max_tokens is 31, but 2 images of 20x12px have 32 tokens"):
        model(image, max_tokens=31)
    torch.testing.assert_close(msvit.compile(model)(image).logits, want.logits)
    assert msvit.dense_map(want.tokens).shape == (2, 32, 5, 3)
    reduced = model.with_options(reducer=msvit.EViT(0.6, at=(1,)))
    assert reduced(image).tokens.count.tolist() == [10, 10]  # 9 of 15, and one fused token
