"""Runs with a reducer: trained, gone on with, saved, loaded and evaluated like others."""

import math

import pytest
import torch
from safetensors.torch import load_file
from smoke_runs import lines, smoke

import msvit
from msvit.lab.build import load_trained, make_model, make_teacher
from msvit.lab.config import Config, override
from msvit.lab.evaluate import evaluate_run
from msvit.lab.recipes import recipe
from msvit.lab.run_files import read_config
from msvit.lab.training import loop
from msvit.lab.training.loop import train
from msvit.lab.training.optimizer import make_optimizer

SETTINGS = {
    "evit": {"reducer.name": "evit", "reducer.rate": "0.6", "reducer.at": "0,1"},
    "dynamicvit": {"reducer.name": "dynamicvit", "reducer.rate": "0.6", "reducer.at": "0,1"},
    "tome": {"reducer.name": "tome", "reducer.r": "5"},
}


def tiny(name: str, gate: str = "disc", **changes: str) -> Config:
    """The smoke version of `pets`, which has a class token."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return override(recipe("pets", smoke=True), {"model.gate": gate, **SETTINGS[name], **dotted})


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "gate", ["none", "learned", *(pytest.param(gate, marks=pytest.mark.slow) for gate in ("context", "disc"))]
)
def test_every_reducer_trains_with_every_kind_of_gate(tmp_path, name, gate):
    run = train(tiny(name, gate), tmp_path, recipe="pets", quiet=True)
    for line in lines(run, "train"):
        own = {"ratio", "distill", "features"} if name == "dynamicvit" else set()
        assert own <= line.keys()
        parts = [line[key] for key in ("task", *own)] + [line.get("gate", 0.0)]
        assert line["loss"] == pytest.approx(sum(parts), rel=1e-6)
        assert math.isfinite(line["loss"])
    found = evaluate_run(run, rounds=2)
    model = load_trained(run, read_config(run)["config"], 8)
    assert found["reducer"].lower().startswith(name)
    assert not found["dense"]
    image = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        assert model.macs_of(model(image)).tolist() == msvit.macs(model, image).tolist()
    if gate == "none":
        assert found["gmacs"]["mean"] == pytest.approx(float(msvit.macs(model, image)[0]) / 1e9, rel=1e-12)
        assert found["gmacs"]["mean"] < found["gmacs"]["dense"]
        left = {"evit": 8, "dynamicvit": 5, "tome": 6}  # 16 -> 10 + 1 -> 7 + 1; 16 * 0.36; 16 - 2 * 5
        assert found["tokens"]["mean"] == left[name]
        assert sum(found["tokens"]["histogram"]["counts"]) == found["num_images"]


@pytest.mark.parametrize("name", [pytest.param("evit", marks=pytest.mark.slow), "dynamicvit"])
def test_a_run_with_a_reducer_that_died_goes_on_to_the_same_numbers(tmp_path, monkeypatch, name):
    """The teacher is the host before training, also when half of the training is done already."""
    config = tiny(name, "learned", data__num_train="56", optim__epochs="2", checkpoint_every="0.666")
    train(config, tmp_path / "whole", quiet=True)
    kept, seen = loop.measure, []

    def measure(*args):
        seen.append(args)
        if len(seen) == 5:
            raise RuntimeError("the power went off")
        return kept(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "measure", measure)
        with pytest.raises(RuntimeError, match="power"):
            train(config, tmp_path / "cut", quiet=True)
    torch.manual_seed(99)
    train(config, tmp_path / "cut", quiet=True, resume=True)
    assert lines(tmp_path / "whole") == lines(tmp_path / "cut")
    whole, cut = (load_file(tmp_path / each / "model/model.safetensors") for each in ("whole", "cut"))
    assert all(torch.equal(whole[key], cut[key]) for key in whole)


def test_the_rate_of_evit_falls_over_the_run(tmp_path):
    run = train(tiny("evit", "none", data__num_train="256", optim__epochs="2"), tmp_path, quiet=True)
    tokens = [line["tokens"] for line in lines(run, "train")]
    assert tokens[0] == 16  # rate 1: nobody is taken away
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[-1] == 8


def test_predictors_learn_with_the_rate_of_what_starts_from_nothing():
    config = tiny("dynamicvit", "none", gate__lr_scale="7")
    model = make_model(config, num_classes=8)
    optimizer = make_optimizer(config, model, None)
    own = {id(p) for p in model.reducer.parameters()}
    groups = [group for group in optimizer.param_groups if own & {id(p) for p in group["params"]}]
    assert len(groups) == 1
    assert {id(p) for p in groups[0]["params"]} == own
    assert groups[0]["peak"] == 7 * config.optim.lr


def test_a_dense_run_can_be_the_teacher(tmp_path):
    dense = override(recipe("pets", smoke=True), {"model.gate": "none"})
    train(dense, tmp_path / "dense", quiet=True)
    config = override(tiny("dynamicvit"), {"reducer.teacher": str(tmp_path / "dense")})
    model = make_model(config, num_classes=8)
    teacher = make_teacher(config, model)
    saved = msvit.load(tmp_path / "dense/model")
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(teacher(image).logits, saved(image).logits)
        before = make_teacher(override(config, {"reducer.teacher": "none"}), model)
        torch.testing.assert_close(before(image).logits, model.host.eval()(image))
        kept = before(image).logits
        model.host.head.weight.add_(1)
        assert torch.equal(before(image).logits, kept), "it does not learn along"
    wider = override(config, {"model.options.embed_dim": "64"})
    with pytest.raises(ValueError, match=r"teacher .* \(32, .* has \(64, .*reducer\.teacher=RUN"):
        make_teacher(wider, make_model(wider, num_classes=8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reducer.name": "evit", "reducer.at": "1"}, r"no class token.*DynamicViT or msvit\.ToMe"),  # scenes pools
        ({"reducer.name": "dynamicvit"}, r"blocks \(3, 6, 9\).*0 to 1.*at="),
        ({"reducer.name": "tome"}, r"ToMe needs one of them"),
        ({"reducer.name": "tome", "reducer.r": "33"}, r"r is 33.*64 tokens.*r=32"),
        ({"reducer.name": "tome", "reducer.rate": "0.3"}, r"rate is 0\.3.*\[0\.5, 1\]"),
        ({"reducer.name": "dynamicvit", "reducer.rate": "1.5", "reducer.at": "1"}, r"rate is 1\.5.*\(0, 1\]"),
        ({"reducer.name": "dynamicvit", "reducer.r": "5"}, r"dynamicvit has no r; its settings are rate, at"),
        ({"reducer.name": "dynamicvit", "reducer.at": "1,x"}, r"reducer\.at.*whole number"),
        ({"reducer.name": "dynamicvit", "reducer.at": "1,0"}, r"rising order"),
        ({"reducer.name": "pitome"}, r"one of none, evit, dynamicvit, tome"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        train(override(smoke(), changes), tmp_path)
