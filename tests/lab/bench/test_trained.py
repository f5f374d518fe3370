"""Trained runs, timed side by side."""

import json

import pytest
import torch
from smoke_runs import done, refused

from msvit_lab.bench.trained import find_runs, prepare

NAMES = ["dense-48-s0", "dense-64-s0", "disc-s0", "tome-s0"]


@pytest.fixture
def folder(run, tmp_path):
    sweep = tmp_path / "sweep"
    (sweep / "begun").mkdir(parents=True)
    for name in NAMES:
        (sweep / name).symlink_to(run(name))
    return sweep


def test_runs_are_found_by_folder_and_by_pattern(folder):
    assert [path.name for path in find_runs(str(folder))] == NAMES
    assert [path.name for path in find_runs(f"{folder}/d*-s0")] == NAMES[:3]
    assert find_runs(str(folder / NAMES[0])) == [folder / NAMES[0]]
    with pytest.raises(ValueError, match="has no evaluated run"):
        find_runs(str(folder / "nothing"))


def test_every_run_has_its_accuracy_cost_and_time_and_the_largest_dense_one_is_the_baseline(folder):
    out = folder / "found.json"
    assert "speed-up" in done("bench", "--runs", folder, "--batch", 4, "--rounds", 4, "--out", out)
    found = json.loads(out.read_text())
    assert found["baseline"] == "dense-64-s0"
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == NAMES
    assert rows["dense-64-s0"]["speed_up"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    for name, row in rows.items():
        assert row["ms"]["median"] > 0
        known = json.loads((folder / name / "evaluations/val.json").read_text())
        assert (row["top1"], row["gmacs"]) == (known["top1"], known["gmacs"]["mean"])
    assert found["record"]["command"].startswith("msvit")


def test_runs_that_segment_have_their_miou_and_are_timed_on_windows_with_their_decoder(run, tmp_path):
    names = ["segment-dense-s0", "segment-s0"]
    for name in names:
        (tmp_path / name).symlink_to(run(name))
    arguments = ["bench", "--runs", f"{tmp_path}/segment*", "--batch", 2, "--rounds", 4]
    said = done(*arguments, "--out", tmp_path / "found.json")
    assert all(words in said for words in ("mIoU", "encoder GMACs", "windows/s", "decoder included"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["task"], found["baseline"]) == ("segment", "segment-dense-s0")
    assert [row["name"] for row in found["rows"]] == names
    for row in found["rows"]:
        known = json.loads((tmp_path / row["name"] / "evaluations/val.json").read_text())
        assert (row["miou"], row["gmacs"]) == (known["miou"], known["gmacs"]["mean"])
        assert row["decoder_gmacs"] == known["decoder_gmacs"] > 0
        assert "top1" not in row
    model, sets = prepare(run("segment-s0"), torch.device("cpu"), torch.float32, 2, {})
    assert {tuple(images.shape) for images in sets} == {(2, 3, 64, 64)}
    with torch.inference_mode():
        assert model(sets[0]).logits.shape == (2, model.num_classes, 64, 64)
    (tmp_path / "segment-other").symlink_to(run("disc-s0"))
    assert "have different tasks" in refused(*arguments)
