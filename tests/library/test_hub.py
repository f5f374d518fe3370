"""The hub's calls on converted timm models: folders only, no network."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from smoke_runs import smoke
from tiny import assert_same_output, images, tiny_host, tiny_model

import msvit
from msvit.integrations import hub
from msvit.run_record import Measured, RunRecord
from msvit_lab.evaluate import evaluate_run
from msvit_lab.run_record import write_run_record
from msvit_lab.training.loop import train


def test_a_saved_model_comes_back_with_a_card_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_model(dtype=torch.float32, reducer=msvit.EViT(rate=0.7, at=(1,)))
    model.classes = list("abcde")
    model.save_pretrained("owner/name", model_card_kwargs={"results": {"top-1": 0.81}, "license": "mit"})
    again, image = msvit.MSViT.from_pretrained("owner/name"), images(dtype=torch.float32)
    assert_same_output(again(image), model(image), bound=0)
    assert again.classes == model.classes
    card = huggingface_hub.ModelCard.load("owner/name/README.md")
    assert (card.data.library_name, card.data.license) == ("msvit", "mit")
    for line in ("| top-1 | 0.81 |", "| coarse cells | 8 px |", "| reducer | EViT("):
        assert line in card.text
    assert json.loads(Path("owner/name/config.json").read_text())["architecture"] == "vit_small_patch16_224"
    namespace: dict[str, Any] = {}
    exec(card.text.split("```python\n")[1].split("```")[0], namespace)
    assert namespace["out"].logits.shape == (1, 5)


def test_of_a_repository_only_what_save_writes_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    asked = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", lambda **options: tmp_path / "config.json")
    again = msvit.MSViT.from_pretrained("owner/name", revision="v1")
    assert_same_output(again(images()), model(images()), bound=0)
    assert (asked["repo"], asked["revision"]) == ("owner/name", "v1")
    assert asked["allow_patterns"] == ["model.safetensors"]


def test_a_segmenter_is_no_classifier_and_a_host_may_be_given(tmp_path: Path) -> None:
    model = msvit.convert_segmenter(tiny_host(), num_classes=3, coarse=8)
    model.save_pretrained(tmp_path)
    again = msvit.Segmenter.from_pretrained(tmp_path, host=tiny_host())
    assert torch.equal(again(images()).logits, model(images()).logits)
    with pytest.raises(ValueError, match=r"holds a Segmenter, not a MSViT; use msvit\.Segmenter\.from_pretrained"):
        msvit.MSViT.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a gate that starts from a dense one, both evaluated."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in (("dense", {"model__gate": "none"}), ("gated", {"model__weights": folder / "dense"})):
        train(smoke(**changes), folder / name, recipe="scenes")
        evaluate_run(folder / name, rounds=0)
    return folder / "gated"


def test_the_card_of_a_trained_model_has_what_its_run_measured(run: Path, tmp_path: Path) -> None:
    found = json.loads((run / "evaluations/val.json").read_text())
    dense = json.loads((run.parent / "dense/evaluations/val.json").read_text())
    msvit.load(run).save_pretrained(tmp_path / "first")
    again = msvit.MSViT.from_pretrained(tmp_path / "first")  # the record is saved with the model
    again.save_pretrained(tmp_path / "second", model_card_kwargs={"results": {"top-1 at night": 0.5}})
    card = huggingface_hub.ModelCard.load(tmp_path / "second/README.md")
    scores = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert scores == pytest.approx({"Accuracy": found["top1"], "Top-5 accuracy": found["top5"]}, abs=1e-6)
    result = card.data.eval_results[0]
    assert (result.task_type, result.dataset_name, result.metric_type) == ("image-classification", "scenes", "accuracy")
    rows = [
        f"| dense host | {dense['top1']:.1%} | {dense['top5']:.1%} | {found['tokens']['dense']} |",
        f"| this model | {found['top1']:.1%} | {found['top5']:.1%} | {found['tokens']['mean']:.0f} |",
        "| steps | 2 |", "| recipe | scenes |", "| gate loss | gbas |", "| top-1 at night | 0.5 |",
    ]  # fmt: skip
    for row in rows:
        assert row in card.text
    assert str(run.parent) not in card.content
    assert card.data.license is None


def test_figures_that_are_missing_or_forged_are_left_out_of_the_card(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "metrics.jsonl").unlink()
    about = json.loads((folder / "config.json").read_text())
    about["recipe"], about["config"]["optim"]["lr"] = "a | b\n# c <script>", [1]
    (folder / "config.json").write_text(json.dumps(about))
    evaluation = folder / "evaluations/val.json"
    evaluation.write_text('{"top1": NaN, "top5": "high", "tokens": 3}')
    write_run_record(folder)
    card = msvit.load(folder).generate_model_card()
    assert "## Results" not in card.text
    assert card.data.eval_results is None
    assert "| recipe | a  b# c script |" in card.text
    assert "learning rate" not in card.text
    assert "steps" not in card.text
    (folder / "record.json").write_text("[" * 100_000)
    assert msvit.load(folder).run_record is None


def test_published_weights_are_named_as_the_base_model_and_figures_are_of_this_model_alone() -> None:
    model = tiny_model()
    assert model.generate_model_card().data.base_model is None
    model.run_record = RunRecord(
        dataset="pets", pretrained="vit_small_patch16_224.augreg_in21k", mixed=Measured({"top-1": 0.9})
    )
    card = model.generate_model_card(license="mit")
    assert card.data.base_model == "timm/vit_small_patch16_224.augreg_in21k"
    assert "| this model | 90.0% | - | - |" in card.text
    assert "dense host |" not in card.text
    assert model.with_options(gate=msvit.AllFine(coarse=8)).run_record is None
