"""Features in timm's formats: the host's own where all cells are fine, and each token's over all that it covers."""

from typing import Any

import pytest
import torch
from timm.models._features import FeatureGetterNet
from tiny import HOSTS, KINDS, SWINS, assert_same, batch_of, images, tiny_host, tiny_model, tiny_swin
from torch import Tensor

import msvit

FORMATS = [
    {"indices": [0], "stop_early": True},
    {"indices": 2, "norm": True, "intermediates_only": True},
    {"indices": [-1, 0], "return_prefix_tokens": True, "output_fmt": "NLC"},
    {"output_fmt": "NLC", "norm": True},
]


def flat(found: Any) -> list[Tensor]:
    """All tensors of nested lists, pairs and dicts, in order."""
    if isinstance(found, Tensor):
        return [found]
    parts = [found[name] for name in sorted(found)] if isinstance(found, dict) else found
    return [tensor for part in parts for tensor in flat(part)]


def assert_equal(got: Any, want: Any) -> None:
    got, want = flat(got), flat(want)
    assert [t.shape for t in got] == [t.shape for t in want]
    assert_same(got, want)
    assert all(t.is_contiguous() for t in got if t.ndim == 4)


@pytest.mark.parametrize("name", HOSTS)
@torch.no_grad()
def test_all_fine_features_are_the_hosts(name: str) -> None:
    host = tiny_host(name)
    model, image = msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8)), images()
    features = model.forward_features(image)
    assert_equal(features, host.forward_features(image))
    for pre_logits in (False, True):
        want = host.forward_head(features, pre_logits=pre_logits)
        assert_equal(model.forward_head(features, pre_logits=pre_logits), want)
        assert_equal(model.forward_head(model.encode(image)[1], pre_logits), want)


@pytest.mark.parametrize("mode", ["packed", "masked"])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_all_fine_intermediates_are_the_hosts_in_every_format(name: str, mode: str) -> None:
    model = tiny_model(name, mode=mode)
    host, image = model.host, images()
    mask = torch.ones(3, 2, 2)
    for options in FORMATS:
        pairs = {} if model.num_prefix_tokens else {"return_prefix_tokens": False}  # timm's Eva has no such pairs
        want = host.forward_intermediates(image, **{**options, **pairs})
        assert_equal(model.forward_intermediates(image, mask=mask, **options), want)
    if hasattr(host, "get_intermediate_layers"):
        for options in ({"n": 2, "reshape": True, "norm": True}, {"n": [0], "return_prefix_tokens": True}):
            got = model.get_intermediate_layers(image, mask=mask, **options)
            assert_equal(got, host.get_intermediate_layers(image, **options))
        for prefix in (False, True):
            options = {"return_prefix_tokens": prefix, "output_dict": True}
            got = model.forward_intermediates(image, 1, mask=mask, **options)
            want = host.forward_intermediates(image, 1, **options)
            assert got.keys() == want.keys()
            assert_equal(got, want)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_every_patch_of_a_coarse_cell_has_its_tokens_feature(name: str) -> None:
    model = tiny_model(name)
    image, mask = batch_of(model)
    _, tokens = model.encode(image, mask)
    got = {mode: model.with_options(mode=mode).forward_intermediates(image, mask=mask) for mode in ("packed", "masked")}
    assert_equal(got["masked"], got["packed"])
    features, maps = got["packed"]
    assert_equal(features[:, : model.num_prefix_tokens], tokens.prefix)
    last = features[:, model.num_prefix_tokens :].transpose(1, 2).unflatten(2, (4, 4))
    for each in (last, *maps):
        cells = each.unflatten(2, (2, 2)).unflatten(4, (2, 2)).permute(0, 2, 4, 1, 3, 5).flatten(4)  # b hc wc d 4
        spread = (cells - cells[..., :1]).abs().amax((3, 4))
        assert torch.equal(spread > 0, mask > 0.5)
    slots = (tokens.layout.token >= tokens.layout.num_prefix).nonzero()[:, 0]
    assert_same([msvit.from_dense(last, tokens.layout)], [tokens.x[slots]])
    want = model(image, mask).logits
    assert_same([model.forward_head(tokens)], [want])
    if name == "vit_base_patch16_siglip_224":
        with pytest.raises(ValueError, match=r"pools tokens \('map'\).*encode\(images\)\[1\]"):
            model.forward_head(features)
    else:  # an average over patches is one over area
        assert_same([model.forward_head(features)], [want])


@pytest.mark.parametrize("name", SWINS)
@torch.no_grad()
def test_a_swin_has_the_maps_of_its_stages(name: str) -> None:
    host = tiny_swin(name)
    model = msvit.convert(host, coarse=16)
    image, mask = batch_of(model)
    fine = torch.ones_like(mask)
    assert_equal(model.forward_features(image, fine), host.forward_features(image))
    for options in ({}, {"norm": True}, {"indices": [0, 1], "stop_early": True, "intermediates_only": True}):
        got = model.forward_intermediates(image, mask=fine, **options)
        assert_equal(got, host.forward_intermediates(image, **options))
    features, maps = model.forward_intermediates(image, mask=mask)
    assert_equal(model.with_options(mode="masked").forward_intermediates(image, mask=mask), (features, maps))
    absent = (maps[0] == 0).all(1)  # block 1 comes before merge_at
    assert torch.equal(absent, (mask < 0.5).repeat_interleave(4, 1).repeat_interleave(4, 2))
    assert not (maps[-1] == 0).all(1).any()
    assert_same([model.forward_head(features)], [model(image, mask).logits])


@torch.no_grad()
def test_features_after_a_reduction_follow_the_dense_map() -> None:
    image = images()
    for reducer in (msvit.EViT(0.5, at=(1,), fuse=False), msvit.ToMe(r=3)):
        model = tiny_model(gate=msvit.AllFine(coarse=8), reducer=reducer)
        want = msvit.dense_map(model(image).tokens)
        features, (first, last) = model.forward_intermediates(image, norm=True)
        assert torch.equal(features, model.forward_features(image))
        assert torch.equal(last, want)
        assert torch.equal(features[:, 1:].transpose(1, 2), want.flatten(2))
        dropped = (last == 0).all(1).flatten(1).sum(1).tolist()
        assert dropped == ([8, 8, 8] if isinstance(reducer, msvit.EViT) else [0, 0, 0])
        assert not (first == 0).all(1).any()
    model = tiny_model("vit_base_patch16_gap_224", gate=msvit.AllFine(coarse=8), reducer=msvit.ToMe(r=3))
    with pytest.raises(ValueError, match=r"pools tokens \('avg'\)"):
        model.forward_head(model.forward_features(image))


def test_maps_of_mixed_scale_have_gradients() -> None:
    model = tiny_model(mode="masked", gate=msvit.LearnedGate(coarse=8).double()).train()
    maps = model.forward_intermediates(images(), intermediates_only=True)
    sum(m.square().sum() for m in maps).backward()
    unused = ("backbone.host.head.", "backbone.host.norm.")
    assert all((p.grad is None) == name.startswith(unused) for name, p in model.named_parameters())
    assert all(p.grad.norm() > 0 for p in model.gate.parameters())


@torch.no_grad()
def test_timms_feature_wrapper_takes_a_converted_model() -> None:
    for model in (tiny_model(), tiny_model(SWINS[0])):
        image, _ = batch_of(model)
        model = model.with_options(gate=msvit.AllFine(coarse=model.coarse))
        wrapped = FeatureGetterNet(model, out_indices=(-2, -1), norm=False)
        maps = wrapped(image)
        assert [m.shape[1] for m in maps] == wrapped.feature_info.channels()
        assert [image.shape[2] // m.shape[2] for m in maps] == wrapped.feature_info.reduction()
        names = dict(model.named_modules())
        assert all(info["module"] in names for info in model.feature_info)


def test_a_new_classifier_replaces_the_hosts(tmp_path: Any) -> None:
    for name in ("vit_small_patch16_224", "deit_small_distilled_patch16_224", "eva02_tiny_patch14_224", SWINS[0]):
        model = tiny_model(name)
        model.classes = list("abcde")
        image, _ = batch_of(model)
        model.reset_classifier(3)
        assert (model.num_classes, model.classes, model(image).logits.shape) == (3, None, (4, 3))
        assert model.get_classifier() == model.host.get_classifier()
        msvit.save(model, tmp_path / name)
        assert_same([msvit.load(tmp_path / name)(image).logits], [model(image).logits])
        model.reset_classifier(0)
        assert model(image).logits.shape == (4, model.num_features)
    model = tiny_model()
    model.reset_classifier(7, "avg")
    assert_same([model(images(), torch.ones(3, 2, 2)).logits], [model.host(images())])


@torch.no_grad()
def test_compiled_models_have_the_same_features() -> None:
    model = tiny_model(dtype=torch.float32).eval()
    image, mask = batch_of(model)
    fast = msvit.compile(model)
    for call in ("forward_features", "forward_intermediates"):
        assert_same(*(flat(getattr(m, call)(image, mask=mask)) for m in (fast, model)), 1e-5)
