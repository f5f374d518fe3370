"""The hub's calls on converted timm models: folders only, no network."""

import copy
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tiny import assert_same_output, batch_of, images, tiny_host, tiny_model

import msvit
from msvit import hub


def test_a_saved_model_comes_back_with_its_card(tmp_path: Path) -> None:
    model = tiny_model(reducer=msvit.EViT(rate=0.7, at=(1,)))
    model.classes = list("abcde")
    model.save_pretrained(tmp_path, model_card_kwargs={"results": {"top-1": 0.81}, "license": "mit"})
    again = msvit.MSViT.from_pretrained(tmp_path)
    assert_same_output(again(images()), model(images()), bound=0)
    assert again.classes == model.classes
    card = huggingface_hub.ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.license) == ("msvit", "mit")
    for line in ("| top-1 | 0.81 |", "| coarse cells | 8 px |", "| reducer | EViT("):
        assert line in card.text
    assert json.loads((tmp_path / "config.json").read_text())["architecture"] == "vit_small_patch16_224"


def test_the_lines_of_the_card_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained("owner/name")
    code = Path("owner/name/README.md").read_text().split("```python\n")[1].split("```")[0]
    namespace: dict[str, Any] = {}
    exec(code, namespace)
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
    assert asked["allow_patterns"] == ["model.safetensors", "msvit.json"]


def test_a_pushed_card_names_its_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {}

    class Api:
        def __init__(self, token: str | None) -> None:
            pass

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return type("Url", (), {"repo_id": repo_id})

        def upload_folder(self, folder_path: Path, **options: Any) -> str:
            sent.update({path.name: path.read_bytes() for path in folder_path.iterdir()})
            return "url"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    tiny_model().push_to_hub("someone/pets")
    assert sent.keys() == {"README.md", "config.json", "model.safetensors", "msvit.json"}
    assert b'from_pretrained("someone/pets")' in sent["README.md"]


def test_a_segmenter_is_no_classifier_and_a_host_may_be_given(tmp_path: Path) -> None:
    model = msvit.convert_segmenter(tiny_host(), num_classes=3, coarse=8)
    model.save_pretrained(tmp_path)
    again = msvit.Segmenter.from_pretrained(tmp_path, host=tiny_host())
    assert torch.equal(again(images()).logits, model(images()).logits)
    with pytest.raises(ValueError, match=r"holds a Segmenter, not a MSViT; use msvit\.Segmenter\.from_pretrained"):
        msvit.MSViT.from_pretrained(tmp_path)


def test_models_are_copied_as_before() -> None:
    model = tiny_model()
    image, _ = batch_of(model)
    assert_same_output(copy.deepcopy(model)(image), model(image), bound=0)


def test_results_that_are_no_table_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="results is a float, but must be a dict"):
        tiny_model().save_pretrained(tmp_path, model_card_kwargs={"results": 0.8})
