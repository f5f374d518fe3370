"""The examples run, and do what they say."""

import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_the_readmes_first_lines_run_as_pasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random weights: tests download nothing."""
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "pretrained=True" in code
    monkeypatch.chdir(ROOT)
    exec(code.replace("pretrained=True", "pretrained=False"), {})
    *times, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in times] == ["dense", "msvit"] * 2
    assert 49 < int(last.split()[0]) < 196, "the shipped gate coarsens some cells"


def test_knn_features_are_compared_with_and_without_a_gate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    example = runpy.run_path(str(EXAMPLES / "knn_features.py"))
    options = "--model vit_tiny_patch16_224 --size 64 --images 12 --batch 8 --workers 0 --share 0.25"
    found = example["main"]([*options.split(), "--out", str(tmp_path / "knn.json")])
    assert json.loads((tmp_path / "knn.json").read_text())["results"] == found
    assert found["dense"]["tokens"] == 16
    assert 4 < found["gated"]["tokens"] < 10, "about a quarter of four cells is fine"
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[3:]] == ["| dense", "| gated"]
    known = F.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.4, 0.6]]), dim=1)
    asked = F.normalize(torch.tensor([[1.0, 0.05], [0.1, 1.0]]), dim=1)
    assert example["knn"](known, torch.tensor([0, 0, 2, 1]), asked, k=2).tolist() == [0, 2]


def test_own_gate_spends_tokens_on_the_detail(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_gate.py"), run_name="__main__")
    first, second = (int(line.split()[0]) for line in capsys.readouterr().out.splitlines())
    assert first == 49 + 3 * 6  # two by three cells hold the noise
    assert second == 49


def test_dense_head_learns_depth_from_mixed_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "dense_head.py"), run_name="__main__")
    *steps, last = capsys.readouterr().out.splitlines()
    errors = [float(line.split("error ")[1].split(",")[0]) for line in steps]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.6 * float(steps[-1].split()[-1]), "better than the mean depth"
    assert 16 < int(last.split()[0]) < 64


def test_a_transformers_pipeline_runs_offline(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    runpy.run_path(str(EXAMPLES / "transformers_pipeline.py"), run_name="__main__")
    *found, last = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in found) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert sum(float(line.split()[1]) for line in found) == pytest.approx(1, abs=0.01)
    assert 49 <= int(last.split()[0]) < 196, "the shipped gate coarsens some cells"
