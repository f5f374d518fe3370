"""A converted model has what timm reads off its host: how images are prepared, layers, decay, classes."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from timm.optim import create_optimizer_v2
from tiny import HOSTS, SWINS, tiny_host, tiny_swin
from torch import nn

import msvit

OVERLAY = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7), "crop_pct": 0.8, "interpolation": "bilinear"}


def names(groups: list[dict[str, Any]], model: nn.Module, prefix: str = "") -> set[tuple[float, float, str]]:
    """Rate, decay and name of every parameter whose name has this prefix."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {(group["lr_scale"], group["weight_decay"], known[id(p)]) for group in groups for p in group["params"]}
    return {(rate, decay, name.removeprefix(prefix)) for rate, decay, name in found if name.startswith(prefix)}


@pytest.mark.parametrize("name", [*HOSTS, *SWINS])
def test_layer_decay_has_the_hosts_groups_and_the_gate_goes_with_the_head(name: str) -> None:
    host = tiny_swin(name) if name in SWINS else tiny_host(name)
    model = msvit.convert(host)
    options: dict[str, Any] = {"opt": "adamw", "lr": 1e-3, "weight_decay": 0.05, "layer_decay": 0.7}
    want = create_optimizer_v2(host, **options).param_groups
    got = create_optimizer_v2(model, **options).param_groups
    assert names(got, model, "backbone.host.") == names(want, host)
    assert len(got) <= len(want) + 1  # what is new has a group of the head's, or one more
    assert {(rate, decay) for rate, decay, _ in names(got, model, "gate.")} == {(1.0, 0.0)}


def test_positions_and_class_token_do_not_decay_in_any_wrapping() -> None:
    reducer = msvit.DynamicViT(0.7, at=(1,))
    model = msvit.convert(tiny_host(), coarse=8, reducer=reducer)
    segmenter = msvit.convert_segmenter(tiny_host(), num_classes=3, coarse=8)
    for wrapped, prefix in ((model, "backbone.host."), (segmenter, "encoder.backbone.host.")):
        own = wrapped.no_weight_decay()
        assert {prefix + "pos_embed", prefix + "cls_token"} <= own
        new = ("gate.", "encoder.gate.", "reducer.")
        assert {name for name, _ in wrapped.named_parameters() if name.startswith(new)} <= own
        layers = timm.models.group_parameters(wrapped, wrapped.group_matcher(), reverse=True)
        assert layers[prefix + "pos_embed"] == 0
        assert layers[prefix + "blocks.0.mlp.fc1.weight"] < layers[prefix + "blocks.1.mlp.fc1.weight"]
        assert layers["backbone.host.head.weight" if wrapped is model else "decoder.classes"] == max(layers.values())


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "eva02_tiny_patch14_224"])
def test_images_are_prepared_as_for_the_host_also_after_saving(name: str, tmp_path: Path) -> None:
    host = tiny_host(name, pretrained_cfg_overlay=OVERLAY)
    model = msvit.convert(host, coarse=8)
    want = resolve_model_data_config(host)
    assert want["mean"] == OVERLAY["mean"]
    segmenter = msvit.convert_segmenter(host, num_classes=3, coarse=8)
    compiled = msvit.compile(msvit.convert(tiny_host(name, pretrained_cfg_overlay=OVERLAY), coarse=8).eval())
    for wrapped in (model, segmenter, compiled):
        assert resolve_model_data_config(wrapped) == want
        assert wrapped.default_cfg["mean"] == OVERLAY["mean"]
    msvit.save(model, tmp_path)
    back = resolve_model_data_config(msvit.load(tmp_path))
    assert {key: tuple(v) if isinstance(v, list) else v for key, v in back.items()} == want
    assert (model.num_classes, model.num_features, segmenter.num_classes) == (5, 32, 3)


# Sides in patches as those of DINOv2 at 518 px, CLIP-B/32 at 224 px, SigLIP-so400m/14 at 384 px and FlexiViT at 240 px.
ODD_SIZES = (
    ("vit_small_patch14_dinov2", 14, 518, (504, 532)), ("vit_base_patch32_clip_224", 32, 224, (192, 256)),
    ("vit_so400m_patch14_siglip_384", 14, 384, (364, 392)), ("flexivit_small", 16, 240, (224, 256)),
)  # fmt: skip


@pytest.mark.parametrize(("name", "patch", "size", "near"), ODD_SIZES)
def test_a_host_whose_size_has_no_whole_cells_gets_the_nearest_and_is_itself_there(
    name: str, patch: int, size: int, near: tuple[int, int]
) -> None:
    options = {"embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5, "mlp_ratio": 1.0}
    host = timm.create_model(name, patch_size=patch, **options).eval().double()
    words = f"images of {size}x{size}px, .* multiples of {2 * patch}, such as {near[0]} or {near[1]}px"
    with pytest.warns(UserWarning, match=words) as warned:
        model = msvit.convert(host, gate="all-fine")
    assert warned[0].filename == __file__, "not a line of msvit"
    with pytest.raises(ValueError, match=f"for example to {near[1]}x{near[1]}$"):
        model(torch.zeros(1, 3, size, size, dtype=torch.float64))
    found = resolve_model_data_config(model)
    assert found["input_size"] == (3, near[1], near[1])
    assert found["crop_pct"] == resolve_model_data_config(host)["crop_pct"]
    assert model.preprocessing is not None
    assert model.preprocessing.size == near[1]
    images = torch.randn(1, *found["input_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = model(images).logits
    host.set_input_size(img_size=near[1])
    torch.testing.assert_close(got, host(images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("segments", [False, True])
def test_a_model_knows_the_names_of_its_classes(segments: bool, tmp_path: Path) -> None:
    host = tiny_host()
    model: Any = msvit.convert_segmenter(host, 5, coarse=8) if segments else msvit.convert(host, coarse=8)
    for names in (None, ("Zebra", "ant", "bee", "cat", "dog")):
        model.classes = names and list(names)
        assert msvit.load(msvit.save(model, tmp_path)).classes == model.classes == names
    assert msvit.compile(model.float()).classes == names
    with pytest.raises(ValueError, match=r"2 names of classes, but the model has 5 outputs"):
        model.classes = ["ant", "bee"]
    with pytest.raises(ValueError, match=r"classes is \[1, 2, 3, 4, 5\], but must be a list of names"):
        model.classes = [1, 2, 3, 4, 5]


def test_a_mode_is_chosen_by_another_model_of_the_same_weights() -> None:
    segmenter = msvit.convert_segmenter(tiny_host(), 7)
    for model in (msvit.convert(tiny_host(), coarse=8), segmenter, msvit.compile(segmenter.float())):
        with pytest.raises(AttributeError, match=r"with_options\(mode='masked'\)"):
            model.mode = "masked"
        other = model.with_options(mode="masked")
        assert (model.mode, other.mode, type(other)) == ("packed", "masked", type(model))
        assert all(a is b for a, b in zip(model.host.parameters(), other.host.parameters(), strict=True))
