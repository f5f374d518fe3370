"""examples/quickstart.ipynb: its cells run one after the other, and it is stored as executed, with its pictures."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

PAGE = Path(__file__).parents[2] / "examples/quickstart.ipynb"


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(PAGE.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_executed_with_its_pictures() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert PAGE.stat().st_size < 1.5e6


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib.use("Agg")
    names: dict[str, Any] = {}
    with torch.enable_grad():  # put back what the notebook switches off
        for number, cell in enumerate(code_cells(), 1):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    plt.close("all")
    assert "same class as the dense model: " in capsys.readouterr().out
    assert names["right"][0] > 0.9, "80 % of the multiply-adds"
    assert torch.equal(names["loaded"](names["x"][:2]).logits, names["gated"](names["x"][:2]).logits)
