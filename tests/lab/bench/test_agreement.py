"""How often gates decide alike: on one grid or two, as they are or with equal shares of fine cells."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import load_script
from smoke_runs import smoke

import msvit
from msvit.lab.build import make_loader, open_val, read_run
from msvit.lab.evaluate import evaluate_run
from msvit.lab.runs import read_config, write_config
from msvit.lab.training.loop import train


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("agreement")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gate for each of two input sizes, half of the cells fine; the first saved alone, a quarter fine; a disc."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in {"large": {}, "small": {"data__img_size": 48}, "disc": {"model__gate": "disc"}}.items():
        train(smoke(**changes), folder / name, quiet=True)
        if name != "disc":
            set_share(folder / name, 0.5)
        evaluate_run(folder / name, rounds=0)
    set_share(folder / "large", 0.25, folder / "alone")
    return folder


@torch.no_grad()
def set_share(run: Path, share: float, alone: Path | None = None) -> None:
    """In two steps of training a gate lets go of nothing."""
    model, config = read_run(run)
    loader = make_loader(open_val(config, read_config(run)["classes"]), config, train=False)
    logits = torch.cat([model.gate(batch.image).logits for batch in loader.iterate(0)])
    model.gate.threshold = logits.quantile(1 - share).item()
    msvit.save(model, run / "model") if alone is None else msvit.save_gate(model.gate, alone)


def test_agreement_and_chance_are_what_they_are_by_hand(script):
    one = torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]]])
    other = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    found = script.compare(one, other)
    assert found["agreement"] == 6 / 8
    assert found["fine_share"] == [3 / 8, 3 / 8]
    assert found["chance"] == pytest.approx((3 * 3 + 5 * 5) / 64)
    assert found["chance_by_place"] == pytest.approx((1 + 0.5 + 1 + 0.5) / 4)  # (1, 1), (1/2, 0), (0, 0), (0, 1/2)


def test_the_coarser_grid_is_read_at_the_centres_of_the_finer_ones_cells(script):
    small = torch.zeros(1, 3, 3)
    small[0, 1, 2] = 1
    large = torch.zeros(1, 4, 4)
    large[0, 1:3, 3] = 1
    for pair in ((small, large), (large, small)):
        found = script.compare(*pair)
        assert (found["agreement"], found["cells"]) == (1.0, [4, 4])
        assert found["fine_share"] == [2 / 16, 2 / 16]


def call(script: Any, monkeypatch: Any, out: Path, *words: object) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["benchmarks/agreement.py", *map(str, words), "--out", str(out)])
    script.main()
    return json.loads(out.read_text())


def test_runs_saved_gates_and_the_default_are_compared_pair_by_pair(script, runs, tmp_path, monkeypatch, capsys):
    words = (runs / "large", runs / "small", runs / "alone", "default")
    found = call(script, monkeypatch, tmp_path / "new/found.json", *words)
    gates, pairs = (
        {str(row[key]): row for row in found[rows]} for rows, key in (("gates", "name"), ("pairs", "gates"))
    )
    for name in ("large", "small"):
        known = json.loads((runs / name / "evaluations/val.json").read_text())
        assert (gates[name]["fine_share"], gates[name]["img_size"]) == (known["fine_share"], known["img_size"])
    assert (gates["alone"]["img_size"], gates["default"]["coarse"]) == (64, 16)  # as the first run has it
    assert len(pairs) == 6
    shares = gates["large"]["fine_share"], gates["alone"]["fine_share"]
    assert shares == (0.5, 0.25)
    assert pairs["['large', 'alone']"]["agreement"] == 1 - (shares[0] - shares[1])  # one's fine cells are the other's
    assert pairs["['large', 'alone']"]["chance"] == 0.5
    assert pairs["['large', 'small']"]["cells"] == [4, 4]
    assert found["num_images"] == 16
    assert found["command"].startswith("python benchmarks/agreement.py ")
    assert {"commit", "machine", "versions"} <= found.keys()
    assert "| large and alone | 4x4 | 50.0% and 25.0% | **75.0%** | 50.0% |" in capsys.readouterr().out


def test_what_changes_in_a_copy_is_the_share_of_cells_that_are_decided_otherwise(script):
    """A gate that calls bright cells fine: of a negative all change, of a grey image none."""

    class Bright(torch.nn.Module):
        def forward(self, image):
            cells = torch.nn.functional.avg_pool2d(image.mean(1, keepdim=True), 32)[:, 0]
            return msvit.types.GateOutput.from_mask((cells > 0).float())

    data = smoke().data
    image = torch.empty(2, 3, 64, 64).uniform_(0.2, 0.9) * torch.tensor([1.0, -1.0])[:, None, None, None]
    known = script.Known("bright", Bright(), data)
    found = script.changes(known, image, Bright()(image).mask)
    assert found.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]  # negative, dark, gamma, grey; mean and deviation are 1/2


def test_matched_gates_have_one_share_of_fine_cells(script, runs, tmp_path, monkeypatch):
    words = (runs / "large", runs / "alone", runs / "small", "--match")
    found = call(script, monkeypatch, tmp_path / "found.json", *words)
    large, alone, small = found["gates"]
    assert large["fine_share"] == alone["fine_share"] == pytest.approx((0.5 + 0.25 + 0.5) / 3, abs=0.01)
    assert small["fine_share"] == pytest.approx(large["fine_share"], abs=0.02)
    assert large["threshold"] == alone["threshold"]
    assert found["pairs"][0]["agreement"] == 1


def test_what_cannot_be_compared_is_refused_in_a_sentence(script, runs, tmp_path):
    for words, matched, sentence in (
        (["large"], False, "1 gate was given, but two decide alike or not"),
        (["alone", "alone"], False, "nobody says which images to look at; add one"),
        (["large", "disc"], True, r"--match moves thresholds, but disc \(DiscGate\) has none"),
    ):
        with pytest.raises(ValueError, match=sentence):
            script.collect([runs / word for word in words], None, matched, None)
    about = read_config(runs / "large")
    data = about["config"].data
    for change, sentence in (
        ({"eval_crop": 0.875}, "has data.eval_crop=0.875, but .* has 1.0; their cells show different places"),
        ({"source": "pets"}, "trained on scenes, pets; say with --data"),
    ):
        write_config(tmp_path, replace(about["config"], data=replace(data, **change)), "scenes", about["classes"])
        with pytest.raises(ValueError, match=sentence):
            script.collect([runs / "large", tmp_path], None, False, None)
