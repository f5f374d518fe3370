"""The recipe `folder`: settings that follow from the images and the model, in every command the same."""

import json
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file
from smoke_runs import done, write_images

import msvit
from msvit_lab.config import override
from msvit_lab.fitting import fit_batch, fit_epochs, fit_to_data
from msvit_lab.hosts import make_host
from msvit_lab.recipes import recipe

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize(("num", "batch"), [(2, 1), (5, 2), (17, 8), (72, 8), (300, 32), (10_000, 64)])
def test_a_batch_leaves_two_steps_and_is_never_larger_than_the_set(num: int, batch: int) -> None:
    assert fit_batch(num) == batch
    assert num // batch >= 2
    assert fit_batch(num, processes=4) % 4 == 0


def test_small_sets_get_more_epochs_within_bounds() -> None:
    found = [fit_epochs(steps, weights=True) for steps in (2, 20, 57, 500)]
    assert found == [40, 30, 11, 10]
    assert fit_epochs(2, weights=False) == 100


@pytest.mark.parametrize(
    ("model", "given", "gate", "size"),
    [
        ("vit_small_patch16_224", {}, "frozen", 224),
        ("vit_small_patch16_224", {"model.pretrained": "true"}, "attention", 224),
        ("vit_base_patch16_384", {"model.weights": "FILE"}, "attention", 384),
        ("vit_small_patch14_dinov2", {"model.weights": "FILE"}, "attention", 224),
        ("vit_base_patch16_siglip_256", {"model.pretrained": "true"}, "frozen", 256),
        ("swin_tiny_patch4_window7_224", {"model.pretrained": "true"}, "frozen", 224),
        ("vit_small_patch16_224", {"model.gate": "none"}, "given", 224),
        ("vit_small_patch16_224", {"gate.loss": "gbas", "data.img_size": "96"}, "given", 96),
    ],
)
def test_gate_and_size_fit_weights_and_model(
    tmp_path: Path, model: str, given: dict[str, str], gate: str, size: int
) -> None:
    given |= {"data.source": str(write_images(tmp_path / "photos")), "model.name": model}
    config = override(recipe("folder"), given)
    fitted = fit_to_data(config, set(given))
    assert not fitted.changes.keys() & given.keys()
    config = override(config, fitted.changes)
    assert config.data.img_size == size
    kept = {"frozen": (True, True, "default"), "attention": (False, False, "default"), "given": (False, False, None)}
    assert (config.model.freeze_gate, config.gate.follow, config.model.gate_from) == kept[gate]


def test_photographs_become_a_model_that_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train from weights on disk, resume, evaluate, predict: the images held out are the same in all of them."""
    monkeypatch.chdir(tmp_path)
    photos = write_images(tmp_path / "photos", each=6)
    host = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, **TINY)
    save_file(host.state_dict(), tmp_path / "weights.safetensors")
    options = [part for name, value in TINY.items() for part in ("--set", f"model.options.{name}={value}")]
    command = ["train", "folder", "--data", "photos", "--model", "vit_tiny_patch16_224", "--img-size", 64, *options]
    command += ["--weights", "weights.safetensors", "--epochs", 1, "--batch-size", 5, "--set", "data.workers=0"]
    said = done(*command, "--rounds", 0)
    assert "photos has no validation set: 3 of 18 images are held out" in said
    assert "15 images of 3 classes to train on, 3 to validate" in said
    assert "msvit's own gate learns what the host attends to, 30 % of the cells fine" in said
    about = json.loads(Path("runs/photos/config.json").read_text())["config"]
    assert (about["optim"]["batch_size"], about["data"]["holdout"], about["optim"]["head_scale"]) == (5, 0.1, 10)
    assert about["eval_every"] == 1, "an epoch is all there is"

    assert "is finished" in done(*command, "--resume", "--rounds", 0)
    assert json.loads(done("eval", "runs/photos", "--rounds", 0, "--json").splitlines()[-1])["num_images"] == 3
    (found,) = msvit.load("runs/photos").predict(photos / "bee/0.png", top=3)
    assert {score.name for score in found.top} == {"ant", "bee", "cat"}
    assert done("predict", "runs/photos", "photos/bee/0.png").startswith(f"photos/bee/0.png: {found.name} ")


@pytest.mark.parametrize(("of_file", "of_model"), [({"init_values": 1.0}, {}), ({}, {"init_values": 1.0})])
def test_weights_of_another_model_are_not_loaded_in_part(
    tmp_path: Path, of_file: dict[str, float], of_model: dict[str, float]
) -> None:
    """timm loads what fits and only logs the rest: DINOv2's LayerScale would be lost in a plain ViT."""
    host = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, **TINY, **of_file)
    save_file(host.state_dict(), weights := tmp_path / "weights.safetensors")
    given = {"model.name": "vit_tiny_patch16_224", "data.img_size": 64, "model.weights": weights}
    given |= {f"model.options.{name}": value for name, value in (TINY | of_model).items()}
    config = override(recipe("folder"), {name: str(value) for name, value in given.items()})
    with pytest.raises(ValueError, match=r"is not of vit_tiny_patch16_224: 4 weights of blocks .* by --model"):
        make_host(config, 3)
