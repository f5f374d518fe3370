"""A converted model has what timm reads off its host: how images are prepared, layers, decay, classes; and predicts."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from budgets import photo
from PIL import Image
from timm.data import resolve_model_data_config
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from tiny import HOSTS, SWINS, tiny_host, tiny_model, tiny_swin
from torch import nn

import msvit

OVERLAY = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7), "crop_pct": 0.8, "interpolation": "bilinear"}


def names(groups: list[dict[str, Any]], model: nn.Module, prefix: str = "") -> set[tuple[float, float, str]]:
    """Rate, decay and name of every parameter whose name has this prefix."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {(group["lr_scale"], group["weight_decay"], known[id(p)]) for group in groups for p in group["params"]}
    return {(rate, decay, name.removeprefix(prefix)) for rate, decay, name in found if name.startswith(prefix)}


@pytest.mark.parametrize("name", [*HOSTS, *SWINS])
def test_layer_decay_has_the_hosts_groups_in_any_wrapping_and_what_is_new_goes_with_the_head(name: str) -> None:
    host = tiny_swin(name) if name in SWINS else tiny_host(name)
    reducer = None if name in SWINS else msvit.DynamicViT(0.7, at=(1,))
    models: dict[str, Any] = {"": msvit.convert(host, reducer=reducer)}
    if name not in SWINS:
        models["encoder."] = msvit.convert_segmenter(host, 3, reducer=reducer)
    options: dict[str, Any] = {"opt": "adamw", "lr": 1e-3, "weight_decay": 0.05, "layer_decay": 0.7}
    want = create_optimizer_v2(host, **options).param_groups
    for prefix, model in models.items():
        got = create_optimizer_v2(model, **options).param_groups
        assert names(got, model, prefix + "backbone.host.") == names(want, host)
        assert len(got) <= len(want) + 1  # what is new has a group of the head's, or one more
        new = {group for part in ("gate.", "reducer.") for group in names(got, model, prefix + part)}
        assert {(rate, decay) for rate, decay, _ in new} == {(1.0, 0.0)}
        assert {rate for rate, _, _ in names(got, model, "decoder.")} == ({1.0} if prefix else set())


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("name", ["vit_small_patch16_224", "eva02_tiny_patch14_224"])
def test_what_a_model_knows_is_kept_by_saving_compiling_and_other_options(
    name: str, segments: bool, tmp_path: Path
) -> None:
    host = tiny_host(name, torch.float32, pretrained_cfg_overlay=OVERLAY)
    want = resolve_model_data_config(host)
    assert want["mean"] == OVERLAY["mean"]
    convert: Any = partial(msvit.convert_segmenter, num_classes=5) if segments else msvit.convert
    plain, model = (convert(host, coarse=8, **options).eval() for options in ({}, {"gate": "disc", "budget": 0.7}))
    assert (plain.num_classes, plain.num_features, plain.default_cfg["mean"]) == (5, 32, OVERLAY["mean"])
    names = ("Zebra", "ant", "bee", "cat", "dog")
    model.classes, model.preprocessing = list(names), PREPARE
    for given, known in ((plain, (None, plain.preprocessing, None)), (model, (names, PREPARE, (0.7, "macs")))):
        back, other = msvit.load(msvit.save(given, tmp_path)), given.with_options(mode="masked")
        for each in (given, back, other, msvit.compile(given)):
            found = resolve_model_data_config(each)
            assert {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()} == want
            assert (each.classes, each.preprocessing, each.budget) == known
    with pytest.raises(ValueError, match=r"2 names of classes, but the model has 5 outputs"):
        model.classes = ["ant", "bee"]
    with pytest.raises(ValueError, match=r"classes is \[1, 2, 3, 4, 5\], but must be a list of names"):
        model.classes = [1, 2, 3, 4, 5]


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


def test_a_mode_is_chosen_by_another_model_of_the_same_weights() -> None:
    segmenter = msvit.convert_segmenter(tiny_host(), 7)
    for model in (msvit.convert(tiny_host(), coarse=8), segmenter, msvit.compile(segmenter.float())):
        with pytest.raises(AttributeError, match=r"with_options\(mode='masked'\)"):
            model.mode = "masked"
        other = model.with_options(mode="masked")
        assert (model.mode, other.mode, type(other)) == ("packed", "masked", type(model))
        assert all(a is b for a, b in zip(model.host.parameters(), other.host.parameters(), strict=True))


# Predictions of paths and images by names and probabilities.

HALF = (0.5, 0.5, 0.5)
PREPARE = msvit.Preprocessing(size=16, mean=HALF, std=(0.2, 0.3, 0.4), interpolation="bilinear", crop=0.8)


def classifier() -> msvit.MSViT:
    model = tiny_model(dtype=torch.float32, gate=msvit.DiscGate(coarse=8, share=0.5)).eval()
    model.classes, model.preprocessing = list("abcde"), PREPARE
    return model


@pytest.mark.parametrize(("crop", "mode"), [(1.0, "squash"), (0.875, "center"), (1.0, "center"), (0.9, "squash")])
@pytest.mark.parametrize("size", [(64, 64), (50, 83), (97, 40)])
def test_preprocessing_shows_what_timm_shows(crop: float, mode: str, size: tuple[int, int]) -> None:
    """On a smooth image, where a fraction of a pixel more or less makes no difference."""
    rows, columns = (np.linspace(0, 255, side) for side in size)
    pixels = np.stack(np.broadcast_arrays(rows[:, None], columns[None], rows[:, None] / 2), 2)
    image = Image.fromarray(pixels.round().astype(np.uint8))
    about = {"input_size": (3, 32, 32), "mean": HALF, "std": (0.25,) * 3, "interpolation": "bicubic"}
    about |= {"crop_pct": crop, "crop_mode": mode}
    prepare = msvit.Preprocessing.of_config(about)
    assert prepare is not None
    want = timm.data.create_transform(**timm.data.resolve_data_config({}, about), is_training=False)(image)
    assert (prepare(image) - want).abs().max() < 0.15  # of a range of 4


def test_a_saved_model_predicts_the_same_from_paths_images_and_in_batches(tmp_path: Path) -> None:
    paths = []
    for seed in range(3):
        paths.append(tmp_path / f"{seed}.png")
        photo(seed).save(paths[-1])
    model = msvit.load(msvit.save(classifier(), tmp_path / "saved"))
    assert model.preprocessing == PREPARE
    found = model.predict(paths, top=2, batch_size=2)
    assert found == model.predict([photo(0), str(paths[1]), photo(2)], top=2, batch_size=2)
    (tmp_path / "torn.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="1 of 4 images were left out"):
        of_folder = model.predict([tmp_path], top=2, batch_size=2)
    assert of_folder == found
    assert [each.path for each in of_folder] == [each.path for each in found] == paths
    logits = model(torch.stack([PREPARE(photo(seed)) for seed in range(3)])).logits
    best = logits.softmax(1).sort(1, descending=True)
    for row, each in enumerate(found):
        assert isinstance(each, msvit.Prediction)
        assert [score.name for score in each.top] == ["abcde"[i] for i in best.indices[row, :2]]
        assert [score.probability for score in each.top] == pytest.approx(best.values[row, :2].tolist(), abs=1e-5)
        assert (each.name, each.probability) == each.top[0]
        assert (each.tokens, each.max_tokens, each.mask.sum()) == (4 + 3 * 2, 16, 2)
    assert len(model.predict(photo())) == 1
    assert len(model.predict(photo(), top=9)[0].top) == 5


def test_preprocessing_takes_pictures_of_any_kind() -> None:
    want = PREPARE(photo())
    assert torch.equal(PREPARE(photo().convert("RGBA")), want)
    for mode in ("L", "P", "LA"):
        picture = photo().convert(mode)
        assert torch.equal(PREPARE(picture), PREPARE(picture.convert("RGB"))), mode


def test_training_mode_makes_no_difference_and_stays() -> None:
    model = tiny_model(dtype=torch.float32).eval()
    model.gate.head.bias.data.zero_()  # undecided: with noise half of the cells would differ
    want = model.predict([photo(seed) for seed in range(8)])
    model.train()
    assert model.predict([photo(seed) for seed in range(8)]) == want
    assert model.training


def test_a_model_that_was_never_trained_here_is_used_as_timm_would() -> None:
    model = tiny_model("vit_small_patch14_dinov2", dtype=torch.bfloat16).eval()
    prepare = model.preprocessing
    assert prepare is not None
    assert (prepare.size, prepare.crop, prepare.interpolation) == (16, 1.0, "bicubic")
    assert prepare.mean == (0.485, 0.456, 0.406)
    (found,) = model.predict(photo(), top=1)
    assert found.name.startswith("class ")


def test_a_host_of_imagenet_has_its_names() -> None:
    host = timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=32, depth=2, num_heads=2)
    nn.init.zeros_(host.head.weight)
    host.head.bias.data = -0.01 * (torch.arange(1000) - 292).abs()
    (found,) = msvit.convert(host.eval(), gate="disc").predict(photo(), top=2)
    assert found.name == "tiger"
    assert found.top[1].name in ("lion", "cheetah")


def test_without_any_record_predict_names_what_to_pass(tmp_path: Path) -> None:
    host = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5, mlp_ratio=2.0
    )
    model = msvit.load(msvit.save(msvit.convert(host, 8, msvit.DiscGate(coarse=8, share=0.5)), tmp_path))
    assert (model.preprocessing, model.pretrained_cfg) == (None, {})
    assert resolve_model_data_config(model) == resolve_model_data_config(host)
    with pytest.raises(ValueError, match=r"pass size=, std=, such as model\.predict"):
        model.predict(photo(), mean=HALF)
    assert len(model.predict(photo(), size=16, mean=HALF, std=HALF)[0].top) == 5
