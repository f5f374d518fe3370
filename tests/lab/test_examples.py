"""The examples run, and do what they say."""

import json
import runpy
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"


def test_the_readmes_first_lines_run_as_pasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a small host and random weights: tests download nothing."""
    page = (ROOT / "README.md").read_text()
    code, printed = page.split("```python\n")[1].split("```")[0], page.split("```\n")[4].split("```")[0]
    given = '"vit_base_patch16_224", pretrained=True'
    assert given in code
    small = '"vit_tiny_patch16_224", img_size=32, depth=4'
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    picture = Image.open(ROOT / "docs/images/chelsea.jpg")
    for index, name in enumerate(("cat.jpg", *(f"{num}.png" for num in range(7)))):
        picture.crop((index, index, index + 200, index + 200)).save(tmp_path / "photos" / name)
    found: dict[str, Any] = {"images": torch.rand(2, 3, 32, 32)}
    exec(code.replace(given, small), found)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [line.split(":")[0] for line in printed.splitlines()]
    assert found["model"].budget == (0.6, "macs")
    assert (tmp_path / "vit-60/model.safetensors").is_file()


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


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_executed_with_its_pictures() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert NOTEBOOK.stat().st_size < 1.5e6


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
