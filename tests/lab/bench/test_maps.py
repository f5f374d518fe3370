"""Maps of masks: collected with a sweep, and drawn."""

import json
import sys

import pytest
from scripts import load_script
from smoke_runs import smoke

from msvit.lab.evaluate import evaluate_run
from msvit.lab.training.loop import train


def test_maps_of_a_sweep_are_kept_if_asked_and_drawn_with_the_priors(tmp_path, monkeypatch):
    collect, maps = load_script("collect"), load_script("maps")
    for loss in ("gbas", "l0"):
        train(smoke(gate__loss=loss), tmp_path / f"runs/{loss}-0.25-s0", quiet=True)
        evaluate_run(tmp_path / f"runs/{loss}-0.25-s0", rounds=0)
    assert "mask_mean" not in collect.collect(tmp_path / "runs", "", "")["runs"][0]
    found = collect.collect(tmp_path / "runs", "", "", maps=True)
    gbas, l0 = found["runs"]
    known = json.loads((tmp_path / "runs/gbas-0.25-s0/evaluations/val.json").read_text())
    assert sum(map(sum, gbas["mask_mean"])) == pytest.approx(sum(map(sum, known["mask_mean"])), abs=1e-2)
    assert l0["priors"] == []
    assert [line["step"] for line in gbas["priors"]][-1] == 2
    top, last = maps.maps([gbas, l0])["prior, step 2"]
    assert (top, last) == (1.0, [gbas["priors"][-1]["theta"], None])

    sweep, out = tmp_path / "found.json", tmp_path / "new/maps.svg"
    sweep.write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["maps.py", str(sweep), "--only", "gbas", "--out", str(out)])
    maps.main()
    assert "prior, step 2" in out.read_text()
    monkeypatch.setattr(sys, "argv", ["maps.py", str(sweep), "--only", "nothing", "--out", str(out)])
    with pytest.raises(SystemExit, match="has no maps of such runs"):
        maps.main()
