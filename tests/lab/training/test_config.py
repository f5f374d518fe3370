"""A setting that is wrong is answered with its name and what is allowed."""

import json
from dataclasses import asdict

import pytest

from msvit_lab.config import Config, from_dict, override, settings
from msvit_lab.runs import read_config, write_config
from msvit_lab.training.state import FREE, differences


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("gate.target", "0.1", 0.1),
        ("optim.lr", "3e-4", 3e-4),
        ("optim.batch_size", "64", 64),
        ("optim.clip", "none", None),
        ("data.cache", "True", True),
        ("data.mean", "0.1, 0.2,0.3", (0.1, 0.2, 0.3)),
        ("model.weights", "some/file.safetensors", "some/file.safetensors"),
    ],
)
def test_settings_are_read_by_their_type_and_nothing_else_changes(name, text, value):
    before, after = Config(), override(Config(), {name: text})
    assert {n: v for n, _, v in settings(after)} == {n: v for n, _, v in settings(before)} | {name: value}
    assert after == from_dict(json.loads(json.dumps(asdict(after))))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("optim.lrr", "1", r"no setting 'optim\.lrr'; did you mean optim\.lr"),
        ("target", "0.1", r"no setting 'target'; did you mean gate\.target\?"),
        ("xyzzy", "1", r"no setting 'xyzzy'; known are task, data\.source, .*log_every"),
        ("optim", "1", r"'optim' is no single setting; its fields are name, lr"),
        ("gate.loss", "l1", r"gate\.loss is 'l1', but must be 'gbas', 'bas', 'bas-flat', 'l0'"),
        ("optim.batch_size", "many", r"optim\.batch_size is 'many', but must be a valid integer"),
        ("data.cache", "yes", r"data\.cache is 'yes', but must be a valid boolean"),
        ("data.mean", "0.1,0.2", r"data\.mean is \(0\.1, 0\.2\), but has too few values"),
        ("gate.target", "1.5", r"gate\.target is 1\.5, but must be less than 1"),
        ("optim.lr", "-1", r"optim\.lr is -1\.0, but must be greater than 0"),
        ("reducer.at", "1,x", r"reducer\.at is \(1, 'x'\), but must be a valid integer"),
        ("optim.ema", "1", r"optim\.ema is 1\.0, but must be less than 1"),
        ("optim.accumulate", "3", r"batch_size is 512, but must be a multiple of optim\.accumulate, 3"),
    ],
)
def test_a_wrong_override_is_answered_with_the_name_and_what_is_allowed(name, text, words):
    with pytest.raises(ValueError, match=words):
        override(Config(), {name: text})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gate.teacher": "runs/dense", "gate.loss": "gbas"}, "which has no teacher; choose --gate-loss attention"),
        ({"gate.follow": "true"}, "is for a gate that does not learn; give one with --freeze-gate"),
        ({"model.freeze_gate": "true"}, "the gate is not trained; give one with --gate-from"),
        ({"model.gate_from": "runs/one", "model.gate": "none"}, "runs/one, but model.gate is none; give one of them"),
        ({"gate.loss": "edges"}, "which needs label maps"),
        ({"reducer.rate": "0.7"}, "reducer.name is none, but it has settings; choose a reducer"),
        ({"reducer.name": "dynamicvit", "task": "segment"}, "which needs a classifier; to segment choose evit or tome"),
    ],
)
def test_settings_that_do_not_fit_each_other_raise(changes, words):
    with pytest.raises(ValueError, match=words):
        override(Config(), changes)


# One of every kind: those that change no shape would go unnoticed.
OTHERS = {
    "optim.name": "sgd", "optim.lr": "0.5", "optim.batch_size": "12", "optim.weight_decay": "0.3", "optim.clip": "7.0",
    "optim.smoothing": "0.1", "optim.schedule": "poly", "optim.momentum": "0.1", "optim.epochs": "0.5",
    "optim.accumulate": "2", "seed": "3", "gate.target": "0.7", "gate.weight": "9.0", "gate.noise": "0.0",
    "gate.loss": "l0", "model.mode": "trimmed", "data.img_size": "96", "data.crops": "medium", "reducer.name": "evit",
}  # fmt: skip


def test_settings_that_decide_what_is_learned_are_named_with_both_values_and_a_run_may_be_made_longer():
    old = Config()
    for name, value in OTHERS.items():
        (found,) = differences(old, override(old, {name: value}))
        assert found.startswith(f"{name} was ")
        assert found.endswith(f", now {value}")
    free = {"log_every": "7", "eval_every": "0.3", "checkpoint_every": "0.2"}
    free |= {"data.workers": "3", "data.skip_bad": "true"}
    assert free.keys() == FREE
    longer = override(old, free | {"optim.epochs": "99"})
    assert differences(old, longer) == []
    assert differences(longer, old) == ["optim.epochs was 99.0, now 20.0"]


def test_a_wrong_file_and_a_run_of_another_version_are_refused(tmp_path):
    write_config(tmp_path, Config(), "scenes", ["a"])
    assert read_config(tmp_path)["config"] == Config()
    path = tmp_path / "config.json"
    about = json.loads(path.read_text())
    for content, words in [
        (json.dumps({**about, "format": 2}), r"run of format 2, but this msvit reads format 3"),
        *(
            (json.dumps({**about, "config": values}), words)
            for values, words in (
                ({"optim": {"new": 1}}, r"no setting 'optim\.new'; this msvit knows name, lr"),
                ({"optim": 3}, r"optim is 3, but must be an object"),
                ({"data": {"mean": [0, 0, 255]}}, r"data\.mean is \[0, 0, 255\], but must be less than or equal to 1"),
                ([], r"not the configuration of a run"),
            )
        ),
        (json.dumps({"format": 3}), r"not the configuration of a run"),
        *((text, r"not the configuration of a run") for text in ("[]", "[" * 10**5)),
        (path.read_text()[:50], r"not the configuration of a run"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=words):
            read_config(tmp_path)
    with pytest.raises(ValueError, match=r"nothing is no folder, so it is no run"):
        read_config(tmp_path / "nothing")
