"""How a run starts: what is left open is resolved, and what cannot work is said before a folder is made."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from smoke_runs import done, refused, smoke, write_images
from timm.data import resolve_model_data_config

import msvit
from msvit_lab import auto_settings, hosts
from msvit_lab.auto_settings import describe_precision, random_teacher_error, resolve_settings
from msvit_lab.build import make_model, make_teacher, open_sources
from msvit_lab.config import Config, override
from msvit_lab.evaluate import evaluate_run
from msvit_lab.fitting import fit_batch, fit_epochs, fit_to_data
from msvit_lab.hosts import make_host
from msvit_lab.recipes import recipe
from msvit_lab.runs import read_config
from msvit_lab.training.loop import train

CPU = torch.device("cpu")
IMAGENET, HALF = (0.485, 0.456, 0.406), (0.5, 0.5, 0.5)


@pytest.fixture
def images(tmp_path):
    write_images(tmp_path / "images/train", each=8)
    write_images(tmp_path / "images/val", each=2)
    return tmp_path / "images"


def test_a_run_writes_down_what_it_settled_and_evaluation_and_model_use_it(tmp_path, images, monkeypatch):
    monkeypatch.setattr(auto_settings, "computes_bf16", lambda device: False)
    changes = {
        "data.source": str(images), "data.mean": "none", "data.std": "none", "data.eval_crop": "0.5",
        "model.name": "deit_tiny_patch16_224", "optim.precision": "auto",
    }  # fmt: skip
    train(smoke(**changes), tmp_path / "run", quiet=True)
    config = read_config(tmp_path / "run")["config"]
    assert (config.data.mean, config.optim.precision) == (IMAGENET, "no")
    model = msvit.load(tmp_path / "run/model")
    found = resolve_model_data_config(model)
    assert (found["mean"], found["crop_pct"], found["input_size"]) == (IMAGENET, 0.5, (3, 64, 64))
    assert model.classes == ("ant", "bee", "cat")
    assert evaluate_run(tmp_path / "run", rounds=0)["num_images"] == 6
    after = smoke(model__name="vit_tiny_patch16_224", model__weights=tmp_path / "run")
    after = replace(after, data=replace(after.data, mean=None, std=None))
    assert resolve_settings(after, CPU).data.mean == IMAGENET  # what these weights know, whatever the model is called


def test_precision_auto_is_what_the_device_computes_in(monkeypatch):
    config = recipe("pets")
    assert config.optim.precision == "auto"
    for able, name, words in ((True, "bf16", "computing in bfloat16 on"), (False, "no", "computing in float32 on")):
        monkeypatch.setattr(auto_settings, "computes_bf16", lambda device, able=able: able)
        resolved = resolve_settings(config, CPU)
        assert resolved.optim.precision == name
        assert describe_precision(resolved, CPU).startswith(words)
    asked = override(config, {"optim.precision": "bf16"})
    assert resolve_settings(asked, CPU).optim.precision == "bf16"
    assert "no instructions" in describe_precision(asked, CPU)


@pytest.mark.parametrize(
    ("changes", "blind"),
    [
        ({}, True),
        ({"model.pretrained": "true"}, False),
        ({"model.weights": "weights.safetensors"}, False),
        ({"gate.teacher": "runs/dense"}, False),
        ({"gate.loss": "gbas"}, False),
        ({"model.gate": "none"}, False),
        ({"model.gate_from": "default"}, True),
        ({"model.gate_from": "default", "model.freeze_gate": "true"}, False),
    ],
)
def test_a_gate_is_not_to_imitate_a_random_network(changes, blind):
    assert (random_teacher_error(override(recipe("pets"), changes)) is not None) == blind


FROM_NOTHING = ("--gate", "learned", "--gate-loss", "gbas")
TINY = tuple(
    part
    for text in ("model.options.embed_dim=32", "model.options.depth=2", "model.options.num_heads=2",
                 "data.img_size=64", "optim.epochs=1", "optim.batch_size=8", "data.workers=0")
    for part in ("--set", text)
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "model.weights is not set, so the gate would learn"),
        ((*FROM_NOTHING, "--data", "{flat}"), "has no split 'train'; splits found: none. Make the folder"),
        ((*FROM_NOTHING, "--data", "{one}"), "has 1 class (ant), but there must be at least 2 to tell apart"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_at_once_and_leaves_no_folder(tmp_path, images, options, words):
    write_images(tmp_path / "one/train", ("ant",))
    places = {"flat": write_images(tmp_path / "flat"), "one": tmp_path / "one"}
    (tmp_path / "empty").mkdir()
    options = [option.format(**places) for option in options]
    for out in (tmp_path / "runs/new", tmp_path / "empty"):
        assert words in refused("train", "pets", "--data", images, "--out", out, *TINY, *options)
    assert not (tmp_path / "runs").exists()
    assert list((tmp_path / "empty").iterdir()) == [], "a folder that was there stays"


def test_weights_that_cannot_be_downloaded_are_asked_for_as_a_file(tmp_path, images, monkeypatch):
    def unreachable(address, timeout):
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(hosts.urllib.request, "getproxies", dict)
    monkeypatch.setattr(hosts.huggingface_hub, "try_to_load_from_cache", lambda *where: None)
    config = override(Config(), {"data.source": str(images), "model.pretrained": "true", "optim.batch_size": "8"})
    with pytest.raises(ValueError, match=r"cannot be reached \(no route\).*--weights FILE"):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_keeps_the_order_of_its_classes(tmp_path, images):
    """Its head has that order, whatever the source would say today."""
    config = smoke(data__source=images, model__gate="none")
    run = train(config, tmp_path / "run", quiet=True)
    about = json.loads((run / "config.json").read_text())
    old = about["classes"] = about["classes"][::-1]
    (run / "config.json").write_text(json.dumps(about))
    assert open_sources(override(config, {"model.weights": str(run)})).train.classes == old
    train(override(config, {"optim.epochs": "2"}), run, resume=True, quiet=True)
    assert read_config(run)["classes"] == old


def test_a_teacher_whose_labels_mean_something_else_is_refused(tmp_path, images):
    config = smoke(data__source=images, model__gate="none")
    run = train(config, tmp_path / "run", quiet=True)
    learner = override(config, {"reducer.name": "dynamicvit", "reducer.rate": "0.7", "reducer.at": "1",
                                "reducer.teacher": str(run)})  # fmt: skip
    model = make_model(resolve_settings(learner, CPU), 3)
    model.classes = ("ant", "bee", "cat")
    assert make_teacher(learner, model) is not None
    model.classes = ("cat", "bee", "ant")
    with pytest.raises(ValueError, match=r"has other classes than the images: its ant is cat here"):
        make_teacher(learner, model)


# The recipe `folder`: settings that follow from the images and the model, in every command the same.

SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}


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
    host = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, **SMALL)
    save_file(host.state_dict(), tmp_path / "weights.safetensors")
    options = [part for name, value in SMALL.items() for part in ("--set", f"model.options.{name}={value}")]
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
    host = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, **SMALL, **of_file)
    save_file(host.state_dict(), weights := tmp_path / "weights.safetensors")
    given = {"model.name": "vit_tiny_patch16_224", "data.img_size": 64, "model.weights": weights}
    given |= {f"model.options.{name}": value for name, value in (SMALL | of_model).items()}
    config = override(recipe("folder"), {name: str(value) for name, value in given.items()})
    with pytest.raises(ValueError, match=r"is not of vit_tiny_patch16_224: 4 weights of blocks .* by --model"):
        make_host(config, 3)


def test_a_disc_takes_as_many_fine_cells_as_the_gate_of_a_run(trained: Path) -> None:
    config = smoke(model__gate="disc", model__share_of=trained / "gated", model__share=0.9)
    wanted = json.loads((trained / "gated/evaluations/val.json").read_text())["fine_share"]
    assert 0 < wanted != 0.9
    assert make_model(config, num_classes=8).gate.share == wanted
    with pytest.raises(ValueError, match="nothing, but there is no finished run"):
        make_model(smoke(model__gate="disc", model__share_of=trained / "nothing"), num_classes=8)
    with pytest.raises(ValueError, match="is for a gate that does not learn; leave it out"):
        smoke(model__share_of=trained / "gated")
