"""Runs with a reducer: trained, gone on with, saved, loaded and evaluated like others."""

import math

import pytest
import torch
from smoke_runs import lines, smoke

import msvit
from msvit_lab.build import make_model, make_teacher
from msvit_lab.config import override
from msvit_lab.evaluate import evaluate_run
from msvit_lab.hosts import read_run
from msvit_lab.training.loop import train

SETTINGS = {  # of `pets`, which has a class token
    "evit": {"reducer.name": "evit", "reducer.rate": "0.6", "reducer.at": "0,1"},
    "dynamicvit": {"reducer.name": "dynamicvit", "reducer.rate": "0.6", "reducer.at": "0,1"},
    "tome": {"reducer.name": "tome", "reducer.r": "5"},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "gate", ["none", "learned", *(pytest.param(gate, marks=pytest.mark.slow) for gate in ("context", "disc"))]
)
def test_every_reducer_trains_with_every_kind_of_gate(tmp_path, name, gate):
    config = smoke("pets", **SETTINGS[name], model__gate=gate)
    run = train(config, tmp_path, recipe="pets", quiet=True)
    for line in lines(run, "train"):
        own = {"ratio", "distill", "features"} if name == "dynamicvit" else set()
        assert own <= line.keys()
        parts = [line[key] for key in ("task", *own)] + [line.get("gate", 0.0)]
        assert line["loss"] == pytest.approx(sum(parts), rel=1e-6)
        assert math.isfinite(line["loss"])
    found = evaluate_run(run, rounds=2)
    model, _ = read_run(run)
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


def test_a_dense_run_can_be_the_teacher(tmp_path):
    train(smoke("pets", model__gate="none"), tmp_path / "dense", quiet=True)
    config = smoke("pets", **SETTINGS["dynamicvit"], model__gate="disc", reducer__teacher=tmp_path / "dense")
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
