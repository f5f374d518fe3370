"""A run folder may come from anywhere: what its config.json says opens no file of weights and no address."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
from smoke_runs import done, refused, smoke

from msvit.saving import file
from msvit_lab.evaluate import evaluate_run
from msvit_lab.hosts import read_run
from msvit_lab.training.loop import train


def change(run: Path, part: str = "model", **values: Any) -> None:
    about = json.loads((run / "config.json").read_text())
    about["config"][part] |= values
    (run / "config.json").write_text(json.dumps(about))


@pytest.fixture(scope="module")
def undescribed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose host is built by its configuration, as words do not describe it."""
    plan = smoke(model__options__act_layer="relu")
    return train(plan, tmp_path_factory.mktemp("runs") / "relu", recipe="scenes", quiet=True)


@pytest.fixture
def run(undescribed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(undescribed, tmp_path / "run")


def options(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())["config"]["model"]["options"]


def test_a_host_that_words_do_not_describe_is_built_by_the_configuration(run):
    assert read_run(run)[0].host.blocks[0].mlp.act.__class__.__name__ == "ReLU"


@pytest.mark.parametrize(
    "option",
    [
        {"checkpoint_path": "x.pth"}, {"pretrained": True}, {"pretrained_cfg_overlay": {"url": "http://127.0.0.1:9"}},
        {"pretrained_cfg": {"file": "x.pth"}, "cache_dir": "/tmp"}, {"features_only": True}, {"act_layer": "a/b:c"},
        {"embed_dim": 10**9}, {"depth": 10**7},
    ],
)  # fmt: skip
def test_options_of_a_folder_are_arguments_of_a_constructor_or_nothing(run, monkeypatch, option):
    change(run, options=options(run) | option)
    monkeypatch.setattr(timm, "create_model", lambda *a, **k: pytest.fail("timm was asked"))
    with pytest.raises(ValueError, match="the option"):
        read_run(run)
    with pytest.raises(ValueError, match="the option"):
        evaluate_run(run, rounds=0)
    assert "the option" in refused("train", "scenes", "--smoke", "--out", run, "--resume")


def test_an_option_given_on_the_command_line_is_taken(run):
    change(run, options=options(run) | {"scriptable": False})
    arguments = ("train", "scenes", "--smoke", "--out", run, "--resume", "--no-evaluate")
    refused(*arguments)
    done(*arguments, "--set", "model.options.scriptable=false")


@pytest.mark.parametrize("model", [{"pretrained": True}, {"weights": "WEIGHTS"}])
def test_a_run_that_goes_on_takes_its_weights_from_the_checkpoint_alone(run, tmp_path, monkeypatch, model):
    (tmp_path / "w.pth").write_bytes(b"anything")
    change(run, **{key: str(tmp_path / "w.pth") if value == "WEIGHTS" else value for key, value in model.items()})
    real = timm.create_model

    def create(*args: Any, **kwargs: Any) -> Any:
        assert not kwargs.get("pretrained")
        assert not kwargs.get("pretrained_cfg_overlay", {}).keys() & {"file", "url", "hf_hub_id"}
        return real(*args, **kwargs)

    monkeypatch.setattr(timm, "create_model", create)
    done("train", "scenes", "--smoke", "--out", run, "--resume", "--no-evaluate")
    read_run(run)


def test_an_evaluation_in_a_folder_that_cannot_be_written_is_a_sentence(run, monkeypatch):
    def claim(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(file, "claim", claim)
    words = "cannot be written (Read-only file system); copy the run to a folder of yours"
    assert words in refused("eval", run, "--rounds", 0)


def test_brackets_in_a_folders_name_are_no_markup(tmp_path):
    assert "[/red]x" in done("train", "scenes", "--smoke", "--rounds", 0, "--out", tmp_path / "[/red]x")
