"""msvit calibrate and msvit speed-up: a budget by a folder of images."""

import json
from pathlib import Path

import pytest
import torch
from smoke_runs import call, done, refused
from tiny import tiny_host

import msvit
from msvit.budget import gate_targets
from msvit_lab.calibration import find_model


def test_another_gate_leaves_the_rest_of_a_model_as_it_was(saved, tmp_path):
    given = msvit.load(saved).with_options(reducer=msvit.ToMe(r=1))
    model = find_model(str(msvit.save(given, tmp_path / "model")), gate="entropy")
    assert isinstance(model.gate, msvit.EntropyGate)
    assert (model.reducer.r, model.classes) == (1, ("cat", "dog"))


def test_a_timm_model_has_timms_weights_or_those_of_a_file(monkeypatch):
    def create_host(name, weights, pretrained):
        return asked.append((name, weights, pretrained)) or tiny_host()

    asked = []
    monkeypatch.setattr("msvit_lab.calibration.create_host", create_host)
    find_model("vit", gate="entropy")
    find_model("vit", gate="entropy", weights=Path("w.bin"))
    assert asked == [("vit", None, True), ("vit", Path("w.bin"), False)]


@pytest.mark.filterwarnings("ignore:there are 4 images, too few to hold some back")
def test_the_gate_is_fitted_first_if_asked_and_the_choice_is_shown(photos, saved, tmp_path, monkeypatch):
    for name in ("NUM_MASKS", "NUM_GRADIENTS"):
        monkeypatch.setattr(gate_targets, name, 2)
    common = ("calibrate", saved, "--images", photos, "--num", 4, "--budget", 0.6, "--gate", "default")
    result = call(*common, "--fit-gate", "--steps", 1, "--out", tmp_path / "fitted")
    assert result.exit_code == 0, result.output
    tried = {line.split()[1]: line.split() for line in result.stdout.splitlines() if " +- " in line or "given" in line}
    assert {"given", "attention", "masks", "gradient"} <= {*tried}
    assert result.stdout.count(" kept ") >= 1
    assert "targets: 100%" in result.stderr
    weights, same = (msvit.load(folder).host.state_dict() for folder in (saved, tmp_path / "fitted"))
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert "has no weights to fit" in refused(*common[:-1], "disc", "--fit-gate", "--out", tmp_path / "disc")


def test_the_model_with_the_budget_is_written_and_other_budgets_are_shown_beside_it(photos, saved, tmp_path):
    said = done("calibrate", saved, "--budget", 0.6, "--images", photos, "--out", tmp_path / "model", "--json")
    found = json.loads(said)
    assert (found["images"], found["skipped"]) == (12, 1)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "chosen"]
    assert rows["chosen"] == rows["0.6"] | {"name": "chosen"}
    model, images = msvit.load(tmp_path / "model"), torch.zeros(2, 3, 64, 64)
    dense = model.backbone.dense_macs(model.grid(images))
    assert rows["0.5"]["gmacs"] == pytest.approx(0.5 * dense / 1e9, rel=0.02)
    assert model.macs(images).double().mean().item() / dense == pytest.approx(0.6, abs=0.01)
    assert model.classes == ("cat", "dog")


def test_a_run_is_calibrated_with_its_own_gate_and_bad_images_are_counted(trained, tmp_path, photos):
    calibrate = ("calibrate", trained / "gated", "--images", photos, "--out", tmp_path / "model", "--budget")
    said = done(*calibrate, 1.3)
    words = ("12 images of 64 px", "images left out that could not be read: 1", "1.3, chosen")
    assert [each for each in (*words, f"written to {tmp_path}/model\n") if each not in said] == []
    assert "in the place of the model that was there" in done(*calibrate, 1.4)  # its gate costs most
    model = msvit.load(tmp_path / "model")
    assert isinstance(model.gate, msvit.LearnedGate)
    assert model.gate.curves[0].num_images == 12
    assert isinstance(msvit.set_budget(model, 0.7, "tokens"), msvit.MSViT)


LEFT_OUT = pytest.mark.filterwarnings("ignore:1 of 13 images were left out")


@LEFT_OUT
def test_three_lines_are_printed_and_the_model_is_written(photos, saved, tmp_path):
    out = tmp_path / "model"
    result = call("speed-up", saved, "--images", photos, "--out", out, "--budget", 0.8)
    assert result.exit_code == 0, result.output
    names = ["same class as the dense model", "multiply-adds", "ms per image", f"written to {out}"]
    assert [line.split(":")[0] for line in result.stdout.splitlines()[:4]] == names
    assert "\nfit_reducer, 24 schedules: 100%, distance from the dense model " in result.stderr
    model, image = msvit.load(out), torch.zeros(2, 3, 64, 64)
    assert type(model) is msvit.MSViT
    assert model.classes == ("cat", "dog")
    share = model.macs(image).double().mean().item() / model.backbone.dense_macs(model.grid(image))
    assert share == pytest.approx(0.8, abs=0.05)


@LEFT_OUT
def test_a_folder_of_save_pretrained_is_read_and_written_as_such(photos, tmp_path):
    tiny = pytest.importorskip("tiny_transformers")
    host = tiny.tiny_transformers("ViTForImageClassification", torch.float32, image_size=32, num_hidden_layers=4)
    msvit.convert(host.eval(), gate="gradient").save_pretrained(tmp_path / "given")
    done("speed-up", tmp_path / "given", "--images", photos, "--out", tmp_path / "model", "--budget", 0.8)
    model = msvit.load(tmp_path / "model")
    assert type(model).__name__ == "MSViTForImageClassification"
    assert (model.budget, model.speed_report.num_images) == ((0.8, "macs"), 3)
