"""The examples run, and do what they say."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_gate_spends_tokens_on_the_detail(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_gate.py"), run_name="__main__")
    first, second = (int(line.split()[0]) for line in capsys.readouterr().out.splitlines())
    assert first == 49 + 3 * 6  # two by three cells hold the noise
    assert second == 49
