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


def test_another_gate_leaves_the_rest_of_a_model_as_it_was(saved: Path, tmp_path: Path) -> None:
    given = msvit.load(saved).with_options(proportional_attention=0.5, reducer=msvit.ToMe(r=1))
    model = find_model(str(msvit.save(given, tmp_path / "model")), gate="entropy")
    assert isinstance(model.gate, msvit.EntropyGate)
    assert (model.proportional_attention, model.reducer.r, model.classes) == (0.5, 1, ("cat", "dog"))


def test_a_timm_model_has_timms_weights_or_those_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def create_host(name: str, weights: Path | None, pretrained: bool) -> torch.nn.Module:
        asked.append((name, weights, pretrained))
        return tiny_host()

    monkeypatch.setattr("msvit_lab.calibration.create_host", create_host)
    find_model("vit", gate="entropy")
    find_model("vit", gate="entropy", weights=Path("w.bin"))
    assert asked == [("vit", None, True), ("vit", Path("w.bin"), False)]


def test_a_model_with_the_budget_is_written_and_bad_images_are_counted(
    photos: Path, saved: Path, tmp_path: Path
) -> None:
    said = done("calibrate", saved, "--images", photos, "--budget", 0.6, "--out", tmp_path / "model")
    assert "12 images of 64 px" in said
    assert "images left out that could not be read: 1" in said
    assert "0.6, chosen" in said
    model, images = msvit.load(tmp_path / "model"), torch.zeros(2, 3, 64, 64)
    assert model.classes == ("cat", "dog")
    share = model.macs(images).double().mean().item() / model.backbone.dense_macs(model.grid(images))
    assert share == pytest.approx(0.6, abs=0.01)


@pytest.mark.filterwarnings("ignore:there are 4 images, too few to hold some back")
def test_the_gate_is_fitted_first_if_asked_and_the_choice_is_shown(
    photos: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_other_budgets_are_shown_beside_the_chosen_one(photos: Path, saved: Path, tmp_path: Path) -> None:
    found = json.loads(done(
        "calibrate", saved, "--budget", 0.5, "--images", photos, "--out", tmp_path / "model", "--json"
    ))  # fmt: skip
    assert (found["images"], found["skipped"]) == (12, 1)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "chosen"]
    assert rows["chosen"] == rows["0.5"] | {"name": "chosen"}
    model = msvit.load(tmp_path / "model")
    dense = model.backbone.dense_macs(model.grid(torch.zeros(1, 3, 64, 64))) / 1e9
    assert rows["0.5"]["gmacs"] == pytest.approx(0.5 * dense, rel=0.02)


def test_a_run_is_calibrated_with_its_own_gate(trained: Path, tmp_path: Path, photos: Path) -> None:
    calibrate = ("calibrate", trained / "gated", "--images", photos, "--out", tmp_path / "model", "--budget")
    assert f"written to {tmp_path}/model\n" in done(*calibrate, 1.3)
    assert "in the place of the model that was there" in done(*calibrate, 1.4)  # its gate costs most
    model = msvit.load(tmp_path / "model")
    assert isinstance(model.gate, msvit.LearnedGate)
    assert model.gate.curves[0].num_images == 12
    assert isinstance(msvit.set_budget(model, 0.7, "tokens"), msvit.MSViT)


LEFT_OUT = pytest.mark.filterwarnings("ignore:1 of 13 images were left out")


@LEFT_OUT
def test_three_lines_are_printed_and_the_model_is_written(photos: Path, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    result = call("speed-up", saved, "--images", photos, "--out", out, "--budget", 0.8)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [
        "same class as the dense model", "multiply-adds", "ms per image"
    ]  # fmt: skip
    assert lines[3] == f"written to {out}"
    assert "\n1 of 40 schedules: " in result.stderr, "from the start"
    model, image = msvit.load(out), torch.zeros(2, 3, 64, 64)
    assert type(model) is msvit.MSViT
    assert model.classes == ("cat", "dog")
    share = model.macs(image).double().mean().item() / model.backbone.dense_macs(model.grid(image))
    assert share == pytest.approx(0.8, abs=0.05)


@LEFT_OUT
def test_a_folder_of_save_pretrained_is_read_and_written_as_such(photos: Path, tmp_path: Path) -> None:
    tiny = pytest.importorskip("tiny_transformers")
    host = tiny.tiny_transformers("ViTForImageClassification", torch.float32, image_size=32, num_hidden_layers=4)
    msvit.convert(host.eval(), gate="gradient").save_pretrained(tmp_path / "given")
    done("speed-up", tmp_path / "given", "--images", photos, "--out", tmp_path / "model", "--budget", 0.8)
    model = msvit.load(tmp_path / "model")
    assert type(model).__name__ == "MSViTForImageClassification"
    assert (model.budget, model.speed_report.num_images) == ((0.8, "macs"), 3)
