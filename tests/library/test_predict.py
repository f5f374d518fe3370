"""A model with its preprocessing: paths and images in, names and probabilities out."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from budgets import photo
from PIL import Image
from timm.data import resolve_model_data_config
from timm.models.vision_transformer import VisionTransformer
from tiny import tiny_model
from torch import nn

import msvit

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
    logits = model(torch.stack([PREPARE(photo(seed)) for seed in range(3)])).logits
    best = logits.softmax(1).sort(1, descending=True)
    for row, each in enumerate(found):
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
