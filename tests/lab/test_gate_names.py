"""A gate has one name for every command."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_host
from typer.testing import CliRunner

import msvit
from msvit_lab.bench.calibration import choose_gate
from msvit_lab.cli import app
from msvit_lab.gate_names import find_gate, gate_names, is_trained


@pytest.mark.parametrize("name", gate_names())
def test_every_known_name_gives_a_gate_for_the_cells_asked_for(name: str) -> None:
    gate, data = find_gate(name, coarse=16, share=0.5)
    assert gate.coarse == 16
    assert gate.eval()(torch.rand(1, 3, 64, 64)).mask.shape == (1, 4, 4)
    assert data is None
    assert gate.config.get("share", 0.5) == 0.5


def test_a_saved_gate_keeps_its_own_cells_and_the_default_is_the_one_that_comes_with_msvit(tmp_path: Path) -> None:
    msvit.save_gate(msvit.DiscGate(coarse=24, share=0.7), tmp_path / "mine")
    gate, _ = find_gate(str(tmp_path / "mine"))
    assert (gate.coarse, gate.config["share"]) == (24, 0.7)
    assert is_trained("default")
    assert find_gate("default")[0].config == msvit.load_gate("default").config
    with pytest.raises(ValueError, match=r"unknown gate 'disk'; known: default, learned, .*coarse, and folders"):
        find_gate("disk")


def test_a_name_comes_before_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("disc", "default"):
        (tmp_path / name).mkdir()
    assert isinstance(find_gate("disc")[0], msvit.DiscGate)
    assert isinstance(find_gate("default")[0], msvit.ContextGate)
    msvit.save_gate(msvit.DiscGate(coarse=8), "default")
    assert isinstance(find_gate("default")[0], msvit.DiscGate), "but a gate that was saved there is meant"


def test_the_benchmark_takes_the_same_names(tmp_path: Path) -> None:
    model = msvit.convert(tiny_host(img_size=64, dtype=torch.float32), coarse=8)
    msvit.save_gate(msvit.DiscGate(coarse=24), tmp_path)
    for name, kind in (("default", msvit.ContextGate), (str(tmp_path), msvit.DiscGate), ("fine", msvit.AllFine)):
        chosen = choose_gate(name, None, model, share=0.3)
        assert isinstance(chosen.gate, kind)
        assert chosen.trained
        assert chosen.gate.coarse == 8
    assert not choose_gate("context", None, model, share=0.3).trained, "its logits are spread before it is timed"


def test_training_takes_the_gate_that_comes_with_msvit(tmp_path: Path) -> None:
    options = ["--smoke", "--gate", "default", "--freeze-gate", "--no-evaluate", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["train", "scenes", *options])
    assert result.exit_code == 0, result.output
    want = msvit.load_gate("default").state_dict()
    gate, data = find_gate(str(tmp_path / "run"))
    assert all(torch.equal(weight, want[name]) for name, weight in gate.state_dict().items())
    assert gate.coarse == 16
    assert data is not None
