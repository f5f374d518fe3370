"""A run goes on with the settings it began with, or says which are others."""

import pytest
from smoke_runs import lines, smoke
from typer.testing import CliRunner

from msvit.lab.cli import app
from msvit.lab.run_files import read_config
from msvit.lab.training.loop import train
from msvit.lab.training.state import FREE, differences

# One of every kind: those that change no shape went unnoticed before.
OTHERS = {
    "optim.name": "sgd", "optim.lr": "0.5", "optim.batch_size": "12", "optim.weight_decay": "0.3", "optim.clip": "7.0",
    "optim.smoothing": "0.1", "optim.schedule": "poly", "optim.momentum": "0.1", "optim.epochs": "0.5",
    "optim.accumulate": "2", "seed": "3",
    "gate.target": "0.7", "gate.weight": "9.0", "gate.noise": "0.0", "gate.loss": "l0",
    "model.mode": "trimmed", "data.img_size": "96", "data.crops": "medium", "reducer.name": "evit",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(smoke(optim__name="sgd"), tmp_path_factory.mktemp("settings") / "run", recipe="scenes", quiet=True)


def test_every_setting_that_differs_is_named_with_both_values():
    old = smoke(optim__batch_size=8)
    for name, value in OTHERS.items():
        extra = {"reducer__rate": "0.7"} if name == "reducer.name" else {}
        found = differences(old, smoke(**{"optim__batch_size": 8, name.replace(".", "__"): value, **extra}))
        assert found, name
        assert found[0].startswith(f"{name} was ")
        assert f", now {value}" in found[0]


def test_nothing_goes_on_with_other_settings_unless_that_is_accepted(run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = r"run began with other settings: optim\.name was sgd, now adamw; optim\.lr was .*, now 0\.5; seed was 0"
    with pytest.raises(ValueError, match=words):
        train(smoke(optim__lr=0.5, seed=3, optim__name="adamw"), run, quiet=True, resume=True)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    arguments = ["train", "scenes", "--smoke", "--resume", "--out", str(run), "--no-evaluate", "--seed", "3"]
    refused = CliRunner().invoke(app, arguments, terminal_width=200)
    assert refused.exit_code == 2
    assert "seed was 0, now 3" in refused.output
    changes = ["--set", "optim.epochs=2", "--set", "optim.name=adamw"]  # of sgd, whose state it cannot use
    taken = CliRunner().invoke(app, [*arguments, "--force", *changes], terminal_width=200)
    assert taken.exit_code == 0, taken.output
    assert read_config(run)["config"].seed == 3
    assert [line["step"] for line in lines(run, "train")] == [1, 2, 3, 4]


def test_what_changes_nothing_that_is_learned_is_free_and_a_run_may_be_made_longer():
    free = {"log_every": 7, "eval_every": 0.3, "checkpoint_every": 0.2, "tensorboard": "true"}
    free |= {"data__workers": 3, "data__skip_bad": "true"}
    assert {name.replace("__", ".") for name in free} == FREE
    assert differences(smoke(), smoke(**free, optim__epochs=9)) == []
    assert differences(smoke(optim__epochs=9), smoke()) == ["optim.epochs was 9.0, now 1.0"]


def test_force_is_for_resume():
    result = CliRunner().invoke(app, ["train", "scenes", "--smoke", "--force"], terminal_width=200)
    assert result.exit_code == 2
    assert "--force is for --resume" in result.output


def test_resume_without_a_checkpoint_starts_from_the_beginning(tmp_path, capsys):
    train(smoke(), tmp_path / "run", resume=True)
    assert "run holds no checkpoint yet: starting from the beginning" in capsys.readouterr().out
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [1, 2]
