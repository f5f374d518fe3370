"""A gate that learns from a dense model's attention, and a frozen one whose threshold follows a target."""

import pytest
import torch
from smoke_runs import lines
from test_resume import crash_at, same

import msvit
from msvit.lab.build import make_loader, make_model, settle
from msvit.lab.config import Config, override
from msvit.lab.recipes import recipe
from msvit.lab.tasks import TASKS
from msvit.lab.training import objective
from msvit.lab.training.loop import train
from msvit.lab.training.objective import make_objective, teacher_attention


def config(**changes: object) -> Config:
    """The smoke version of `pets`: a gate that looks around, told by attention."""
    changed = override(recipe("pets", smoke=True), {name.replace("__", "."): str(v) for name, v in changes.items()})
    return settle(changed, torch.device("cpu"))


def contrast(image: torch.Tensor) -> torch.Tensor:
    """Stands in for a dense model that looks at cells in which something happens."""
    cells = image.mean(1).unfold(1, 32, 32).unfold(2, 32, 32).flatten(3)
    strength = (2 * cells.std(-1)).exp()
    return strength / strength.sum((1, 2), keepdim=True)


@pytest.mark.slow
def test_it_learns_what_the_dense_model_looks_at_and_keeps_the_share(tmp_path, monkeypatch):
    monkeypatch.setattr(objective, "teacher_attention", lambda *parts: contrast)
    settings = {"data.img_size": "128", "optim.epochs": "25", "optim.lr": "1e-4", "gate.target": "0.25"}
    plan = override(config(), settings)
    train(plan, tmp_path, quiet=True)
    shares = [line["fine"] for line in lines(tmp_path, "train")]
    assert sum(shares[-20:]) / 20 == pytest.approx(0.25, abs=0.08), shares
    source = TASKS["classify"].open(plan, "val")
    image = next(make_loader(source, plan, train=False, device="cpu").iterate(0)).image
    with torch.no_grad():
        told = contrast(image).log().flatten()
        logits = msvit.load(tmp_path / "model").gate.eval()(image).logits.flatten()
    assert torch.corrcoef(torch.stack([told, logits]))[0, 1] > 0.5


def test_with_a_running_mean_of_the_weights_the_threshold_fits_its_gate(tmp_path):
    for ema in ("0", "0.99"):
        train(config(optim__ema=ema, optim__epochs="2", data__img_size="128"), tmp_path / ema, quiet=True)
    gates = [msvit.load(tmp_path / ema / "model").gate for ema in ("0", "0.99")]
    image = torch.randn(4, 3, 128, 128)
    assert torch.equal(gates[0](image).mask, gates[1](image).mask)


def test_the_teacher_may_be_a_dense_run(tmp_path):
    dense = train(config(model__gate="none", optim__lr="1e-2"), tmp_path / "dense", quiet=True)
    image = torch.randn(2, 3, 64, 64)
    looks = []
    for teacher in ("none", dense):
        plan = config(gate__teacher=teacher)
        torch.manual_seed(0)
        model = make_model(plan, 8)
        looks.append(teacher_attention(plan, model)(image))
    assert looks[0].shape == (2, 2, 2)
    assert (looks[0] - looks[1]).abs().max() > 1e-6
    torch.testing.assert_close(looks[1].sum((1, 2)), torch.ones(2))


def test_a_killed_run_goes_on_to_the_bit(tmp_path, monkeypatch):
    plan = config(data__num_train="56", optim__epochs="3", checkpoint_every="0.666")
    train(plan, tmp_path / "whole", quiet=True)
    crash_at(6, monkeypatch)
    with pytest.raises(RuntimeError, match="the power went off"):
        train(plan, tmp_path / "killed", quiet=True)
    train(plan, tmp_path / "killed", resume=True, quiet=True)
    same(tmp_path / "whole", tmp_path / "killed")


def test_a_frozen_gates_threshold_follows_a_target_and_nothing_else_of_it_changes(tmp_path):
    gate = msvit.load_gate("default")
    msvit.save_gate(gate, tmp_path / "gate")
    own = {"model__gate_from": tmp_path / "gate", "model__freeze_gate": "true", "optim__epochs": "7"}
    train(config(**own, gate__follow="true", gate__target="0.6", data__img_size="128"), tmp_path / "run", quiet=True)
    after = msvit.load(tmp_path / "run/model").gate
    assert all(torch.equal(value, gate.state_dict()[name]) for name, value in after.state_dict().items())
    assert after.threshold != gate.threshold
    found = lines(tmp_path / "run", "train")
    assert "gate" not in found[0]
    assert sum(line["fine"] for line in found[-5:]) / 5 == pytest.approx(0.6, abs=0.1)
    train(config(**own | {"optim__epochs": "1"}), tmp_path / "as-it-is", quiet=True)
    assert msvit.load(tmp_path / "as-it-is/model").gate.threshold == gate.threshold


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gate__teacher": "runs/dense", "gate__loss": "gbas"}, "which has no teacher; choose --gate-loss attention"),
        ({"gate__follow": "true"}, "is for a gate that does not learn; give one with --freeze-gate"),
    ],
)
def test_settings_that_do_not_fit_are_answered(changes, words):
    with pytest.raises(ValueError, match=words):
        config(**changes)


def test_a_teacher_may_be_of_another_width_but_needs_a_class_token(tmp_path):
    dense = train(config(model__gate="none"), tmp_path / "dense", quiet=True)
    plan = override(config(gate__teacher=dense), {"model.options.embed_dim": "16"})
    model = make_model(plan, 5)
    assert teacher_attention(plan, model)(torch.randn(1, 3, 64, 64)).shape == (1, 2, 2)
    pooled = config(model__options__class_token="false", model__options__global_pool="avg")
    model = make_model(pooled, 8)
    with pytest.raises(ValueError, match=r"no class token; choose another gate loss, give a teacher that has one"):
        make_objective(pooled, model)


def test_a_gate_without_threshold_cannot_follow(tmp_path):
    msvit.save_gate(msvit.DiscGate(coarse=32, share=0.3), tmp_path)
    plan = config(model__gate_from=tmp_path, model__freeze_gate="true", gate__follow="true")
    with pytest.raises(ValueError, match="a DiscGate has no threshold"):
        make_objective(plan, make_model(plan, 8))
