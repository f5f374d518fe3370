"""Every supported host, wrapped and all fine, is the host itself; wrapping changes nothing about it."""

import pytest
import timm
import torch
from tiny import HOSTS, images, mixed_mask, relative_error, tiny_host

import msvit
from msvit.host_config import without_weights


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_all_fine_is_the_original_vit(name: str, dtype: torch.dtype, tolerance: float) -> None:
    host = tiny_host(name, dtype)
    image = images(dtype=dtype)
    model = msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8))
    with torch.no_grad():
        assert relative_error(model(image).logits, host(image)) < tolerance


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize(("height", "width"), [(24, 24), (32, 16), (8, 40)])
@pytest.mark.parametrize("built_dynamic", [True, False])
def test_other_sizes_are_the_hosts_own_dynamic_size(name: str, height: int, width: int, built_dynamic: bool) -> None:
    dynamic = tiny_host(name, dynamic_img_size=True)
    host = dynamic if built_dynamic else tiny_host(name, dynamic_img_size=False)
    image = images(2, height, width)
    model = msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8))
    with torch.no_grad():
        assert relative_error(model(image).logits, dynamic(image)) < 1e-9


@pytest.mark.parametrize("name", HOSTS)
def test_wrapping_leaves_the_host_as_it_was(name: str) -> None:
    host, untouched = tiny_host(name), tiny_host(name)
    before = {key: value.data_ptr() for key, value in host.named_parameters()}
    kind, image = type(host), images()
    model = msvit.convert(host, coarse=8)
    with torch.no_grad():
        model(image, mask=mixed_mask(3, 2, 2))
        assert torch.equal(host(image), untouched(image))
    assert type(host) is kind
    assert "forward" not in vars(host)
    assert {key: value.data_ptr() for key, value in host.named_parameters()} == before
    ours = {value.data_ptr() for value in model.parameters()}
    assert set(before.values()) <= ours


def test_positions_follow_the_weights_when_they_change() -> None:
    host, image = tiny_host(), images()
    model = msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8))
    with torch.no_grad():
        model(image)  # fills the table
        host.pos_embed.add_(1.0)
        assert relative_error(model(image).logits, host(image)) < 1e-9
        host.float()
        assert relative_error(model(image.float()).logits, host(image.float())) < 1e-5


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_evaluations_between_steps_see_the_new_weights(options: dict) -> None:
    """Fused optimizers change weights without counting versions."""
    host, image = tiny_host(), images()
    model = msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(image).logits.square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            assert relative_error(model(image).logits, host(image)) < 1e-9


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


@pytest.mark.parametrize("method", ["forward", "_pos_embed"])
def test_a_subclass_with_a_way_of_its_own_is_refused(method: str) -> None:
    host = tiny_host()
    host.__class__ = type("Other", (type(host),), {method: lambda self, x: x})
    with pytest.raises(ValueError, match="its forward is not one"):
        msvit.convert(host, coarse=8)


def test_what_is_traced_for_export_is_not_kept() -> None:
    class Logits(torch.nn.Module):
        def __init__(self, model: msvit.MSViT) -> None:
            super().__init__()
            self.model = model

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.model(image).logits

    host, image = tiny_host(), images(1, 48, 24)  # a size no other test uses
    torch.export.export(Logits(msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8), mode="masked")), (image,))
    assert msvit.convert(host, coarse=8)(image).logits.shape == (1, 5)


def test_a_model_made_under_inference_mode_runs() -> None:
    with torch.inference_mode():
        model = msvit.convert(tiny_host(), coarse=8)
        assert model(images()).logits.shape == (3, 5)


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "eva02_tiny_patch14_224"])
def test_tables_are_made_once_for_each_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = msvit.convert(tiny_host(name), coarse=8, gate=msvit.AllFine(coarse=8))
    made = []
    for part in ("make_token_table", "_rotary"):
        if make := getattr(model.backbone, part, None):
            spy = lambda grid, make=make, part=part: made.append(part) or make(grid)  # noqa: E731
            monkeypatch.setattr(model.backbone, part, spy)
    with torch.inference_mode():
        for _ in range(3):
            for size in (16, 24, 32):
                model(images(1, size, size))
    assert made.count("make_token_table") == 3
    assert made.count("_rotary") == (3 if "eva" in name else 0)
    model.train()(images(1)).logits.sum().backward()  # tables kept by inference do not get in training's way
    assert model.host.pos_embed.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "vit_base_patch16_siglip_224", "vit_small_patch16_dinov3"])
def test_all_coarse_is_the_same_weights_on_the_coarse_grid(name: str) -> None:
    """Shrink the image by k and halve the position grid: the host at that size, fine everywhere."""
    host = tiny_host(name, dynamic_img_size=True)
    small = tiny_host(name, img_size=8)
    state = host.state_dict()
    if host.pos_embed is not None:
        num_prefix = host.pos_embed.shape[1] - 16
        grid = host.pos_embed[:, num_prefix:].view(1, 2, 2, 2, 2, -1).mean((2, 4)).flatten(1, 2)
        state["pos_embed"] = torch.cat([host.pos_embed[:, :num_prefix], grid], dim=1)
    small.load_state_dict(state)
    image = images()
    model = msvit.convert(host, coarse=8, gate=msvit.AllCoarse(coarse=8))
    with torch.no_grad():
        want = small(torch.nn.functional.interpolate(image, scale_factor=0.5, mode="bilinear"))
        assert relative_error(model(image).logits, want) < 1e-9


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("beit_base_patch16_224", "relative position bias"),
        ("vit_relpos_small_patch16_224", "relative position bias"),
        ("swinv2_cr_tiny_224", "attention in windows"),
        ("vit_small_r26_s32_224", "convolutional stem"),
        ("resnet18", "convolutional stem"),
        ("vit_small_patch16_rope_mixed_224", "rotary positions"),
        ("vit_base_patch16_rpn_224", "ResPostBlock"),
    ],
)
def test_a_host_that_cannot_be_converted_is_refused_with_the_part_in_the_way(name: str, part: str) -> None:
    host = without_weights(lambda: timm.create_model(name))
    with pytest.raises(ValueError, match=part):
        msvit.convert(host, coarse=32)


def test_windows_are_named_as_the_part_in_the_way() -> None:
    class Windowed(torch.nn.Module):
        window_size = 7

    with pytest.raises(ValueError, match="windows"):
        msvit.convert(Windowed())


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"attn_drop_rate": 0.1}, "attention dropout"),
        ({"patch_drop_rate": 0.1}, "patch dropout"),
        ({"global_pool": "max"}, "pooling is 'max'"),
        ({"patch_size": (4, 8)}, "not square"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(options: dict, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        msvit.convert(tiny_host(**options), coarse=16)


def test_gradient_checkpointing_of_the_host_is_kept() -> None:
    host, image, mask = tiny_host(), images(), mixed_mask(3, 2, 2)
    model = msvit.convert(host, coarse=8)
    grads = []
    for enable in (False, True):
        host.set_grad_checkpointing(enable)
        model.zero_grad()
        model(image, mask=mask).logits.sum().backward()
        grads.append(host.blocks[0].mlp.fc1.weight.grad.clone())
    assert relative_error(grads[1], grads[0]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")),
        *(name for name in HOSTS if not name.startswith("vit_base_patch16_gap")),
    ],
)
def test_full_size_hosts_convert_and_agree(name: str) -> None:
    host = timm.create_model(name, pretrained=False, num_classes=10, dynamic_img_size=True).eval().double()
    model = msvit.convert(host, gate=msvit.AllFine(coarse=2 * host.patch_embed.patch_size[0]))
    side = 4 * model.coarse
    image = images(1, side, side + model.coarse)
    with torch.no_grad():
        assert relative_error(model(image).logits, host(image)) < 1e-9
