"""Every supported class of transformers, converted and all fine, is the model itself; the modes agree."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_same, gradients, images, mixed_mask, relative_error
from tiny_transformers import CLASSES, configuration, enable_checkpointing, hidden_of, tiny_transformers, transformers
from torch import nn

import msvit
from msvit.conversion import to_msvit

CLASSIFIER = "ViTForImageClassification"


def all_fine(model: nn.Module, **options: Any) -> msvit.MSViT:
    return to_msvit(model, gate=msvit.AllFine(coarse=8), **options)


def assert_same_gradients(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> None:
    """Relative to the largest: that of a key's bias is 0 but for rounding."""
    assert [g is None for g in got] == [g is None for g in want]
    largest = max(float(g.norm()) for g in want if g is not None)
    errors = [float((g - w).norm()) for g, w in zip(got, want, strict=True) if g is not None and w is not None]
    assert max(errors) < 1e-9 * largest, errors


@pytest.mark.parametrize("name", CLASSES)
def test_all_fine_is_the_transformers_model_at_any_size(name: str) -> None:
    """Output, last_hidden_state, and at two sizes the gradients of every weight."""
    model = all_fine(tiny_transformers(name))
    host = model.host
    for size in ((16, 16), (24, 24), (32, 8), (8, 8)):
        image = images(2, *size)
        out = model(image)
        want, hidden = host(image), hidden_of(host, image)
        assert relative_error(out.logits, want) < 1e-9
        assert relative_error(model.backbone.hidden(out.tokens), hidden) < 1e-9
        if size in ((16, 16), (32, 8)):
            assert_same_gradients(*(gradients(found, host.model) for found in (out.logits, want)))


@pytest.mark.parametrize("name", CLASSES)
def test_modes_run_mixed_tokens_as_the_models_own_layers_would_and_have_the_same_gradients(name: str) -> None:
    model = to_msvit(tiny_transformers(name), coarse=8)
    image, results = images(3), []
    for mode in ("masked", "packed", "trimmed"):
        mask = mixed_mask(3, 2, 2).requires_grad_(mode != "packed")
        out = model.with_options(mode=mode)(image, mask=mask)
        values = [out.logits, model.backbone.hidden(out.tokens)]
        results.append((values, gradients(out.logits, model.host)))
    for values, by_weight in results[1:]:
        assert_same(values, results[0][0])
        assert_same_gradients(by_weight, results[0][1])
    with torch.no_grad():
        want = [naive_output(model.host, image[i : i + 1], mask[i].bool()) for i in range(3)]
        assert_same([results[0][0][0]], [torch.cat(want)])


def naive_output(host: Any, image: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One image of 4 x 4 patches in 2 x 2 cells: the model itself with the active tokens as its embeddings.

    What has passed its last layer is there once for each patch it covers, but where attention pools: means are by area.
    """
    patches = [host.patch_embed.proj(scale).flatten(2)[0].T for scale in (nn.functional.avg_pool2d(image, 2), image)]
    prefix = torch.cat([token[0] for token in host.prefix_tokens]) if host.prefix_tokens else image.new_zeros(0, 32)
    if host.pos_embed is not None:
        own, table = host.pos_embed[0, :-16], host.pos_embed[0, -16:].T.view(1, -1, 4, 4)
        prefix = torch.cat([prefix[: len(own)] + own, prefix[len(own) :]])
        tables = (nn.functional.avg_pool2d(table, 2), table)
        patches = [p + t.flatten(2)[0].T for p, t in zip(patches, tables, strict=True)]
    active = torch.cat([~mask.flatten(), mask.repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()])
    x = torch.cat([prefix, torch.cat(patches)[active]])[None]
    area = torch.cat([torch.ones(len(prefix)), torch.cat([torch.full((4,), 4), torch.ones(16)])[active]]).long()
    hooks = [(host.body.embeddings, x)]
    if host.rope is not None:
        hooks.append((host.rope, rotation(host.rope, active)))
    handles = [part.register_forward_hook(lambda *given, own=own: own) for part, own in hooks]
    if host.attention_pooling is None:
        handles.append(host.layers[-1].register_forward_hook(lambda part, given, y: y.repeat_interleave(area, 1)))
    try:
        return host(image)
    finally:
        for handle in handles:
            handle.remove()


def rotation(rope: Any, active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine at the centres of cells and patches."""
    steps = [(torch.arange(num) + 0.5) / num * 2 - 1 for num in (2, 4)]
    centres = torch.cat([torch.cartesian_prod(step, step) for step in steps])[active]
    angles = (2 * torch.pi * centres[:, :, None] * rope.inv_freq).flatten(1).tile(2)
    return angles.cos(), angles.sin()


def test_positions_in_training_are_drawn_as_the_model_draws_them() -> None:
    """DINOv3 shifts, jitters and rescales all its rotary positions, cells and patches alike."""
    host = tiny_transformers("DINOv3ViTModel", pos_embed_shift=0.3, pos_embed_jitter=1.5, pos_embed_rescale=2.0)
    model, image = all_fine(host.train()), images()
    found = []
    for run in (lambda: model(image).logits, lambda: host(image).pooler_output, lambda: model.eval()(image).logits):
        torch.manual_seed(5)
        found.append(run())
    assert relative_error(found[0], found[1]) < 1e-9
    assert relative_error(found[0], found[2]) > 1e-3
    mixed = {}
    for mode in ("packed", "masked"):
        torch.manual_seed(5)
        mixed[mode] = model.train().with_options(mode=mode)(image, mask=mixed_mask(3, 2, 2)).logits
    assert relative_error(mixed["packed"], mixed["masked"]) < 1e-9


def test_dropout_and_stochastic_depth_are_the_models_own() -> None:
    """Dropout of one image draws as the model does. Each half of a layer is there or not: 4 outcomes."""
    image = images(1)
    model = all_fine(tiny_transformers(CLASSIFIER, hidden_dropout_prob=0.3).train())
    deep = all_fine(tiny_transformers("Dinov2Model", drop_path_rate=0.5, num_hidden_layers=1).train())
    with torch.no_grad():
        found = []
        for run in (lambda: model(image).logits, lambda: model.host(image), lambda: model.host(image)):
            found.append(run() if torch.manual_seed(len(found) // 2) else None)
        assert relative_error(found[0], found[1]) < 1e-9
        assert relative_error(found[0], found[2]) > 1e-3
        torch.manual_seed(0)
        runs = (lambda: deep(image).logits, lambda: deep.host(image))
        drawn = [{round(float(run()[0, 0]), 9) for _ in range(40)} for run in runs]
    assert len(drawn[0]) == 4
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("name", [CLASSIFIER, "Dinov2Model", "DINOv3ViTModel", "SiglipVisionModel"])
def test_a_converted_model_is_copied_compiled_saved_and_converted_anew(name: str, tmp_path: Path) -> None:
    host = tiny_transformers(name, torch.float32)
    model = to_msvit(host, coarse=8)
    image, mask = images(3, dtype=torch.float32), mixed_mask(3, 2, 2, torch.float32)
    with torch.no_grad():
        want = model(image, mask=mask).logits
        fast = msvit.compile(model)
        assert fast.packed_layers()
        assert relative_error(fast(image, mask=mask).logits, want) < 1e-4
        assert torch.equal(copy.deepcopy(model)(image, mask=mask).logits, want)
        assert torch.equal(to_msvit(model.host, coarse=8)(image, mask=mask).logits, want)
        msvit.save(model, tmp_path)
        other = getattr(transformers, name)(host.config)
        assert torch.equal(msvit.load(tmp_path, host=other).eval()(image, mask=mask).logits, want)
        with pytest.raises(ValueError, match=r"host=my_vit.*from_pretrained"):
            msvit.load(tmp_path)
        segmenter = msvit.convert_segmenter(host, num_classes=3, coarse=8)
        assert segmenter(image, mask=mask).logits.shape == (3, 3, 16, 16)
    assert model.host.model is host
    assert {f"backbone.host.model.{key}" for key in host.state_dict()} <= model.state_dict().keys()


def test_what_takes_a_weights_or_a_modules_place_is_seen() -> None:
    host = tiny_transformers(CLASSIFIER)
    model, image = all_fine(host), images()
    other = tiny_transformers(CLASSIFIER, layer_norm_eps=1e-5)
    for parameter in other.parameters():
        parameter.data *= 0.9
    with torch.no_grad():
        model(image)  # fills the tables
        host.load_state_dict(other.state_dict(), assign=True)
        assert relative_error(model(image).logits, host(image).logits) < 1e-9
        host.vit.layers = host.vit.layers[:1]
        host.classifier = nn.Linear(32, 3, dtype=torch.float64)
        assert relative_error(model(image).logits, host(image).logits) < 1e-9


def test_tables_kept_by_inference_and_checkpointed_layers_train_as_ever() -> None:
    for name in ("DINOv3ViTModel", CLASSIFIER):
        model, image = all_fine(tiny_transformers(name, pos_embed_rescale=None)), images()
        with torch.inference_mode():
            model(image)
        plain = gradients(model.train()(image).logits, model.host)
        enable_checkpointing(model.host.model)
        assert model.host.grad_checkpointing
        assert_same_gradients(gradients(model(image).logits, model.host), plain)
        assert not model.eval().host.grad_checkpointing


@pytest.mark.parametrize("name", ["ViTModel", "SiglipVisionModel"])
def test_eager_attention_is_the_same_attention(name: str) -> None:
    """transformers' eager softmax is computed in float32."""
    host = tiny_transformers(name)
    host.set_attn_implementation("eager")
    with torch.no_grad():
        assert relative_error(all_fine(host)(images()).logits, host(images()).pooler_output) < 1e-6


def test_layer_decay_and_weight_decay_see_the_layers() -> None:
    from timm.optim import param_groups_layer_decay

    for name in ("Dinov2ForImageClassification", "CLIPModel"):
        model = to_msvit(tiny_transformers(name), coarse=8)
        groups = param_groups_layer_decay(model, 0.05, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay())
        scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
        parts = (model.host.patch_embed.proj, *model.host.layers, model.host.head_layers[0])
        assert [scale[id(next(part.parameters()))] for part in parts] == [0.125, 0.25, 0.5, 1.0]
        assert "backbone.host.model.dinov2.embeddings.cls_token" in model.no_weight_decay() or name == "CLIPModel"


def small(name: str, **settings: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 4}
    return getattr(transformers, name)(getattr(transformers, name).config_class(**sizes, **settings))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: small("SamVisionModel", mlp_dim=48, output_channels=8), "SamVision.*relative position"),
        (lambda: small("BeitModel", use_relative_position_bias=True), "BeitModel.*relative position"),
        (lambda: small("Dinov2Backbone"), "Dinov2Backbone.*not one that is supported"),
        (lambda: tiny_transformers(CLASSIFIER, attention_probs_dropout_prob=0.1), r"dropout \(0.1\).*packed form"),
        (lambda: with_attention("unheard_of"), "'unheard_of'.*set_attn_implementation"),
        (lambda: with_part(nn.Linear(32, 32)), "Linear is not a part"),
        (lambda: with_part(None), r"ViTLayer has no mlp.*transformers 5.*msvit\[transformers\]"),
        (lambda: type("Other", (transformers.ViTModel,), {"forward": len})(small("ViTModel").config), "Other.*not one"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_named(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        to_msvit(make())


def with_attention(name: str) -> nn.Module:
    model = tiny_transformers(CLASSIFIER)
    model.config._attn_implementation_internal = name
    return model


def with_part(mlp: nn.Module | None) -> nn.Module:
    """With another MLP, or none under this name."""
    model = tiny_transformers(CLASSIFIER)
    del model.vit.layers[1].mlp
    if mlp is not None:
        model.vit.layers[1].mlp = mlp
    return model


def test_positions_of_oblong_images_serve_their_own_size_alone() -> None:
    model = all_fine(tiny_transformers(CLASSIFIER, image_size=(8, 32)))
    image = images(2, 8, 32)
    with torch.no_grad():
        assert relative_error(model(image).logits, model.host.model(image).logits) < 1e-9
    with pytest.raises(ValueError, match=r"4 x 4 patches.*2 x 8"):
        model(images())


def test_a_model_without_a_pooled_output_gives_none() -> None:
    host = transformers.ViTModel(tiny_transformers("ViTModel").config, add_pooling_layer=False).double().eval()
    model = all_fine(host)
    assert model(images()).logits is None
    assert int(msvit.macs(model, images())[0]) == int(model.macs(images(), head=False)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_full_size_models_convert_and_agree(name: str) -> None:
    """Each configuration's default, as published."""
    labels = {"num_labels": 10} if "Classification" in name else {}
    host = getattr(transformers, name)(configuration(name, labels)).double().eval()
    patch = msvit.backbones.adapt(host).fine
    model = to_msvit(host, gate=msvit.AllFine(coarse=2 * patch))
    image = images(1, 8 * patch, 10 * patch)
    with torch.no_grad():
        assert relative_error(model(image).logits, model.host(image)) < 1e-9
