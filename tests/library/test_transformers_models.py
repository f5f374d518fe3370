"""Converted transformers models in pipelines, in Trainer, in folders and with peft: as their users call them."""

import copy
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from budgets import photo
from tiny import batch_of, images, mixed_mask, tiny_model
from tiny_transformers import CLASSES, tiny_transformers
from torch import Tensor, nn

import msvit
from msvit.gates import Normalization
from msvit.speed_report import SpeedReport

transformers = pytest.importorskip("transformers")
from msvit.integrations import transformers as transformers_models  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers and what it imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CLASSIFIER, WITH_TEACHER = "ViTForImageClassification", "DeiTForImageClassificationWithTeacher"
IMAGE = images(2, dtype=torch.float32)


def mixed_gate() -> msvit.LearnedGate:
    """A gate for cells of 8 px with a threshold amid its logits, for images of another normalisation."""
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2), widths=(8, 8, 8))
    nn.init.normal_(gate.head.weight)
    gate.set_normalization(Normalization((0.5,) * 3, (0.5,) * 3), Normalization((0.4,) * 3, (0.3,) * 3))
    gate.eval()
    gate.threshold = gate(IMAGE).logits.mean().item()
    return gate


def converted(name: str = CLASSIFIER, gate: msvit.Gate | None = None, **options: Any) -> Any:
    model = tiny_transformers(name, torch.float32)
    return msvit.convert(model, gate=mixed_gate() if gate is None else gate, **options).eval()


def processor() -> Any:
    return transformers.ViTImageProcessor(size={"height": 16, "width": 16})


# One of each family, of each kind of output, and one with weights of a text tower.
SAVED = (
    CLASSIFIER, WITH_TEACHER, "Dinov2Model", "Dinov2WithRegistersForImageClassification",
    "DINOv3ViTModel", "CLIPVisionModelWithProjection", "CLIPModel", "SiglipVisionModel",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SAVED else pytest.mark.slow) for n in CLASSES])
def test_a_folder_gives_the_same_model_and_the_host_keeps_its_weights(name: str, tmp_path: Path) -> None:
    host = tiny_transformers(name, torch.float32)
    before = {key: value.clone() for key, value in host.state_dict().items()}
    model = msvit.convert(host, gate=mixed_gate()).eval()
    assert all(torch.equal(value, before[key]) for key, value in host.state_dict().items())
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForImageClassification if "ForImage" in name else transformers.AutoModel
    again = auto.from_pretrained(tmp_path)
    want, got = model(IMAGE), again(pixel_values=IMAGE)
    assert 0 < want.gate.mask.mean() < 1, "both scales"
    assert got.keys() == want.keys()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got.gate.mask, want.gate.mask)
    features = transformers.AutoModel.from_pretrained(tmp_path)(IMAGE).last_hidden_state  # of classifiers, too
    assert torch.equal(features, model.backbone.hidden(want.tokens))


@pytest.mark.parametrize("name", [CLASSIFIER, WITH_TEACHER, "Dinov2Model", "SiglipVisionModel"])
def test_all_fine_returns_what_the_host_returns(name: str) -> None:
    host = tiny_transformers(name)
    model = msvit.convert(host, gate=msvit.AllFine(coarse=8))
    image = images(2)
    want, got = host(pixel_values=image), model(pixel_values=image)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-9, atol=1e-9)
        assert torch.equal(getattr(got, key), got[key])
    assert torch.equal(got[0], got.to_tuple()[0])
    if name != WITH_TEACHER:  # whose class is of its own file
        assert isinstance(got, type(want))
    assert torch.equal(model(image, return_dict=False)[0], got[0])
    assert got.tokens.count.tolist() == [16, 16]


def test_image_classification_pipeline(tmp_path: Path) -> None:
    model = converted()
    model.save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    found = transformers.pipeline("image-classification", model=str(tmp_path), top_k=5)(photo())
    logits = model(**processor()(photo(), return_tensors="pt")).logits
    want = dict(zip(model.config.id2label.values(), logits.softmax(-1)[0].tolist(), strict=True))
    assert {each["label"]: each["score"] for each in found} == pytest.approx(want)


def test_image_feature_extraction_pipeline() -> None:
    model = converted("Dinov2Model")
    pipe = transformers.pipeline("image-feature-extraction", model=model, image_processor=processor())
    out = model(**processor()(photo(), return_tensors="pt"))
    torch.testing.assert_close(torch.tensor(pipe(photo())), out.last_hidden_state)
    torch.testing.assert_close(torch.tensor(pipe(photo(), pool=True)), out.pooler_output)


class Halves(torch.utils.data.Dataset):
    """Images that are bright above or below."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index)) / 8
        image[:, 8 * (index % 2) : 8 * (index % 2) + 8] += 1
        return {"pixel_values": image, "labels": index % 2}


def trainer(model: Any, folder: Path, steps: int) -> Any:
    options = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 3, "learning_rate": 3e-3}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "dataloader_pin_memory": False}
    args = transformers.TrainingArguments(str(folder), max_steps=steps, save_steps=2, **options, **quiet)
    return transformers.Trainer(model=model, args=args, train_dataset=Halves(), eval_dataset=Halves())


def test_trainer_lowers_the_loss_moves_the_gate_and_resumes(tmp_path: Path) -> None:
    model = converted(mode="trimmed").with_gate_loss("gbas", target=0.5, weight=1.0)
    gate, prior = (next(part.parameters()).clone() for part in (model.gate, model.gate_loss))
    torch.manual_seed(0)
    whole = trainer(model, tmp_path, steps=3)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[2] < losses[0]
    assert not torch.equal(gate, next(model.gate.parameters())), "the gate is trained"
    assert not torch.equal(prior, model.gate_loss.raw), "and what it is trained with"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # nothing of the first run is left
    resumed = trainer(model, tmp_path, steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert again == losses
    assert resumed.predict(Halves()).predictions.shape == (8, 5), "neither gate nor tokens are gathered"


def test_the_loss_has_the_gates_part_in_training_only_and_by_configuration() -> None:
    model, labels = converted(mode="trimmed"), torch.tensor([0, 1])
    task = nn.functional.cross_entropy(model(IMAGE).logits, labels)
    assert model.config.gate_loss["name"] == "gbas"
    torch.testing.assert_close(model(IMAGE, labels=labels).loss, task)
    torch.manual_seed(0)
    out = model.train()(IMAGE, labels=labels)
    task = nn.functional.cross_entropy(out.logits, labels)
    torch.testing.assert_close(out.loss, task + 4 * model.gate_loss(logits=out.gate.logits))
    mask = mixed_mask(2, 2, 2, torch.float32)
    given = model(IMAGE, labels=labels, mask=mask)
    torch.testing.assert_close(given.loss, nn.functional.cross_entropy(given.logits, labels))
    plain = model.with_gate_loss(None)
    assert plain.gate_loss is None
    assert plain.host is model.host
    with pytest.raises(ValueError, match=r"3x2 cells, but .* 2x2, .* model.with_gate_loss\('gbas', grid=\(3, 2\)\)"):
        model(larger := images(2, 24, 16, torch.float32), labels=labels)
    assert model.with_gate_loss("gbas", grid=(3, 2))(larger, labels=labels).loss.isfinite()
    with pytest.raises(ValueError, match="a DiscGate has nothing to train"):
        converted(gate=msvit.DiscGate(coarse=8)).with_gate_loss("gbas")
    with pytest.raises(ValueError, match=r"gate loss .*l2.* gbas"):
        model.with_gate_loss("l2")


def test_other_options_leave_settings_and_modes_of_parts_as_they_are() -> None:
    model = converted().train()
    model.gate.eval()
    model.config.problem_type = "multi_label_classification"
    other = model.with_gate_loss("bas").with_options(mode="masked")
    assert (other.training, other.gate.training, other.host.training) == (True, False, True)
    assert (other.mode, model.mode) == ("masked", "packed")
    assert (other.config.problem_type, other.config.gate_loss["name"]) == ("multi_label_classification", "bas")
    assert other.with_options(gate=msvit.AllFine(coarse=8)).gate_loss is None


def test_a_moved_threshold_another_reducer_and_the_gate_loss_are_saved(tmp_path: Path) -> None:
    model = converted().with_options(mode="masked", reducer=msvit.ToMe(r=2))
    model = model.with_gate_loss("l0", 0.3)
    model.gate.threshold = 0.125
    model.save_pretrained(tmp_path, results={"top-1": 0.81})
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    found = (again.gate.threshold, again.mode, again.reducer.r)
    assert found == (0.125, "masked", 2)
    assert again.gate_loss.target == 0.3
    card = (tmp_path / "README.md").read_text()
    assert "| top-1 | 0.81 |" in card
    assert "MSViT of ViTForImageClassification" in card


def test_a_pushed_card_names_its_repository_and_one_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {}

    def upload(repo_id: str, folder_path: str, ignore_patterns: Any = None, **options: Any) -> str:
        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        sent[repo_id] = {name: text for name, text in files.items() if name not in (ignore_patterns or ())}
        return "url"

    Api = MagicMock()
    Api.return_value.create_repo = lambda repo_id, **options: SimpleNamespace(repo_id=repo_id)
    Api.return_value.file_exists = lambda repo_id, *rest, **options: repo_id == "someone/old"
    Api.return_value.upload_folder = upload
    monkeypatch.setattr(transformers_models, "HfApi", Api)
    model = converted()
    assert model.push_to_hub("someone/new") == model.push_to_hub("someone/old") == "url"
    assert b'model="someone/new"' in sent["someone/new"]["README.md"]
    assert sent["someone/old"].keys() == {"config.json", "model.safetensors"}
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    tiny_model().push_to_hub("someone/pets")
    assert sent["someone/pets"].keys() == {"README.md", "config.json", "model.safetensors", "msvit.json"}
    assert b'from_pretrained("someone/pets")' in sent["someone/pets"]["README.md"]


@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_lora_trains_its_adapters_alone(kind: str) -> None:
    peft = pytest.importorskip("peft")
    gate, layers = msvit.DiscGate(coarse=8, share=0.5), ["qkv"] if kind == "timm" else ["q_proj", "v_proj"]
    model: Any = tiny_model(dtype=torch.float32, gate=gate) if kind == "timm" else converted(gate=gate)
    image, label = batch_of(model)[0], torch.tensor([0, 1, 2, 3])
    before = model(image).logits
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=layers))
    torch.testing.assert_close(lora(image).logits, before)  # B starts at 0
    weights = {name: p.clone() for name, p in lora.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=0.02)
    losses: list[Tensor] = []
    for _ in range(4):
        losses.append(nn.functional.cross_entropy(lora(image).logits, label))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[3] < losses[2] < losses[1] < losses[0]
    changed = {name for name, p in lora.named_parameters() if not torch.equal(p, weights[name])}
    assert changed == {name for name in weights if "lora_" in name}
    merged = lora.merge_and_unload()
    torch.testing.assert_close(merged(image).logits, lora(image).logits)


def test_budgets_limits_and_speed_are_those_of_the_msvit_inside() -> None:
    model = converted()
    many = images(12, dtype=torch.float32)
    fast = msvit.compile(model)
    assert type(fast) is type(model)
    assert type(fast.msvit) is not type(model.msvit)
    plain = fast.uncompiled()
    assert (type(plain), type(plain.msvit)) == (type(model), type(model.msvit))
    torch.testing.assert_close(fast(pixel_values=IMAGE)["logits"], model(IMAGE).logits)
    assert fast.state_dict().keys() == model.state_dict().keys()
    calibrated = msvit.calibrate(model, many, 0.5, unit="tokens")
    assert type(calibrated) is type(model)
    inner = msvit.calibrate(model.msvit, many, 0.5, unit="tokens")
    assert calibrated.gate.threshold == inner.gate.threshold != model.gate.threshold
    assert torch.equal(calibrated(pixel_values=many).logits, inner(many).logits)
    assert msvit.set_budget(calibrated, 0.7, unit="tokens").gate.threshold < calibrated.gate.threshold
    assert set(model(pixel_values=many, per_image=10).tokens.count.tolist()) == {10}
    assert int(model(pixel_values=many, max_tokens=100).tokens.count.sum()) <= 100


def test_other_labels_and_another_precision_when_loading(tmp_path: Path) -> None:
    model = converted()
    model.save_pretrained(tmp_path)
    kind = transformers.AutoModelForImageClassification
    again = kind.from_pretrained(tmp_path, num_labels=3, ignore_mismatched_sizes=True)
    assert again(IMAGE).logits.shape == (2, 3)
    assert again.classes == ("LABEL_0", "LABEL_1", "LABEL_2")
    double = kind.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(double(IMAGE.double()).logits.float(), model(IMAGE).logits)


def test_without_transformers_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "msvit.integrations.transformers")
    with pytest.raises(ImportError, match=r"pip install 'msvit\[transformers\]'"):
        importlib.import_module("msvit.integrations.transformers")


OTHER_ORDER = pytest.param("from transformers import AutoModel; import msvit", marks=pytest.mark.slow)


@pytest.mark.parametrize("first", ["import msvit, transformers", OTHER_ORDER])
def test_to_import_msvit_is_enough_for_auto_classes(first: str, tmp_path: Path) -> None:
    converted().save_pretrained(tmp_path)
    code = f"""
import sys
{first}
assert "Auto" in {first!r} or not {{"torch", "timm"}} & sys.modules.keys()
from transformers import AutoModelForImageClassification
print(type(AutoModelForImageClassification.from_pretrained(sys.argv[1])).__name__)"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "MSViTForImageClassification\n"), done.stderr


def test_a_size_without_whole_cells_is_named_when_converting() -> None:
    with pytest.warns(UserWarning, match="images of 20x20px, .* the image processor needs 24x24"):
        model = msvit.convert(tiny_transformers("Dinov2Model", image_size=20), 8, mixed_gate())
    assert model.pretrained_cfg["input_size"] == (3, 24, 24)


@pytest.mark.parametrize("name", [CLASSIFIER, "Dinov2Model", "CLIPVisionModelWithProjection"])
def test_an_output_prints_shapes_and_tokens_in_a_line(name: str) -> None:
    assert re.fullmatch(r"MSViT\w*\(.*=\(2, .*, tokens=\[\d+, \.\.\.\] of 16\)", repr(converted(name)(IMAGE)))


@pytest.mark.parametrize("name", [CLASSIFIER, "Dinov2Model"])
def test_a_folder_of_save_pretrained_is_loaded_by_msvit_too(name: str, tmp_path: Path) -> None:
    model = msvit.calibrate(converted(name), images(12, dtype=torch.float32), 0.5, unit="tokens")
    model.speed_report = report = SpeedReport(0.9, True, 0.8, 1.0, 2.0, 8, 8, "cpu", True)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    again = msvit.load(tmp_path)
    assert type(again) is type(model)
    assert (again.budget, again.speed_report) == ((0.5, "tokens"), report)
    assert not again.training
    for got, want in zip(again(IMAGE, return_dict=False), model(IMAGE, return_dict=False), strict=True):
        if isinstance(want, Tensor):
            torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="leave out host"):
        msvit.load(tmp_path, host=tiny_transformers(name, torch.float32))
    again.preprocessing = msvit.Preprocessing(16, (0.5,) * 3, (0.5,) * 3)
    assert msvit.calibrate(again, [photo(), photo()], 0.7).gate.curves


def test_what_is_converted_or_saved_in_the_wrong_way_says_so(tmp_path: Path) -> None:
    model = converted()
    config = copy.deepcopy(model.config)
    config.host_class = "BertModel"
    with pytest.raises(ValueError, match="'BertModel', but known are ViTModel"):
        transformers_models.MSViTForImageClassification(config)
    with pytest.raises(ValueError, match="converted already"):
        msvit.convert(model)
    assert msvit.save(model, tmp_path) == tmp_path
    assert (tmp_path / "config.json").is_file(), "by its save_pretrained"
    with pytest.raises(ValueError, match="holds a transformers model; load it with transformers' AutoModel"):
        msvit.MSViT.from_pretrained(tmp_path)
