"""The examples run, and do what they say."""

import runpy
from pathlib import Path

import pytest

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


def test_own_gate_spends_tokens_on_the_detail(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_gate.py"), run_name="__main__")
    first, second = (int(line.split()[0]) for line in capsys.readouterr().out.splitlines())
    assert first == 49 + 3 * 6  # two by three cells hold the noise
    assert second == 49


def test_a_transformers_pipeline_runs_offline(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    runpy.run_path(str(EXAMPLES / "transformers_pipeline.py"), run_name="__main__")
    *found, last = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in found) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert sum(float(line.split()[1]) for line in found) == pytest.approx(1, abs=0.01)
    assert 49 <= int(last.split()[0]) < 196, "the shipped gate coarsens some cells"
