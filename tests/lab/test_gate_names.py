"""A gate has one name for every command."""

from pathlib import Path

import pytest
import torch

import msvit
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
    with pytest.raises(ValueError, match=r"unknown gate 'disk'; known: default, learned, .*and folders"):
        find_gate("disk")


def test_a_name_comes_before_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("disc", "default"):
        (tmp_path / name).mkdir()
    assert isinstance(find_gate("disc")[0], msvit.DiscGate)
    assert isinstance(find_gate("default")[0], msvit.ContextGate)
    msvit.save_gate(msvit.DiscGate(coarse=8), "default")
    assert isinstance(find_gate("default")[0], msvit.DiscGate), "but a gate that was saved there is meant"
