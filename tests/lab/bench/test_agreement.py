"""How often gates decide alike, on one grid or two, and what becomes of runs under zooms and shifts."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scripts import load_script, run_script
from smoke_runs import smoke

import msvit
from msvit_lab.runs import read_config, write_config

agreement, robustness = map(load_script, ("agreement", "robustness"))


def call(monkeypatch, out, *words):
    run_script(agreement, monkeypatch, *words, "--out", out)
    return json.loads(out.read_text())


def test_agreement_and_chance_are_what_they_are_by_hand():
    one = torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]]])
    other = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    found = agreement.compare(one, other)
    assert (found["agreement"], found["fine_share"]) == (6 / 8, [3 / 8, 3 / 8])
    assert found["chance"] == pytest.approx((3 * 3 + 5 * 5) / 64)
    assert found["chance_by_place"] == pytest.approx((1 + 0.5 + 1 + 0.5) / 4)  # (1, 1), (1/2, 0), (0, 0), (0, 1/2)


def test_runs_saved_gates_and_the_default_are_compared_pair_by_pair(run, quarter, tmp_path, monkeypatch, capsys):
    words = (run("gated-s0"), run("small-s0"), quarter, "default")
    found = call(monkeypatch, tmp_path / "new/found.json", *words)
    gates = {row["name"]: row for row in found["gates"]}
    pairs = {tuple(row["gates"]): row for row in found["pairs"]}
    for name in ("gated-s0", "small-s0"):
        known = json.loads((run(name) / "evaluations/val.json").read_text())
        assert (gates[name]["fine_share"], gates[name]["img_size"]) == (known["fine_share"], known["img_size"])
    assert (gates["alone"]["img_size"], gates["default"]["coarse"]) == (64, 16)  # as the first run has it
    assert len(pairs) == 6
    assert (gates["gated-s0"]["fine_share"], gates["alone"]["fine_share"]) == (0.5, 0.25)
    both = pairs["gated-s0", "alone"]
    assert (both["agreement"], both["chance"]) == (0.75, 0.5)  # the fine cells of one are fine in the other
    assert pairs["gated-s0", "small-s0"]["cells"] == [4, 4]
    assert found["num_images"] == 16
    assert found["command"].startswith("python benchmarks/agreement.py ")
    assert {"commit", "machine", "versions"} <= found.keys()
    assert "| gated-s0 and alone | 4x4 | 50.0% and 25.0% | **75.0%** | 50.0% |" in capsys.readouterr().out


def test_what_changes_in_a_copy_is_the_share_of_cells_that_are_decided_otherwise():
    """A gate that calls bright cells fine: of a negative all change, of a grey image none."""

    def bright(image):
        cells = F.avg_pool2d(image.mean(1, keepdim=True), 32)[:, 0]
        return msvit.types.GateOutput.from_mask((cells > 0).float())

    image = torch.empty(2, 3, 64, 64).uniform_(0.2, 0.9) * torch.tensor([1.0, -1.0])[:, None, None, None]
    found = agreement.changes(agreement.Named("bright", bright, smoke().data), image, bright(image).mask)
    assert found.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]  # negative, dark, gamma, grey; mean and deviation are 1/2


def test_matched_gates_have_one_share_of_fine_cells(run, quarter, tmp_path, monkeypatch):
    words = (run("gated-s0"), quarter, run("small-s0"), "--match")
    found = call(monkeypatch, tmp_path / "found.json", *words)
    large, alone, small = found["gates"]
    assert large["fine_share"] == alone["fine_share"] == pytest.approx((0.5 + 0.25 + 0.5) / 3, abs=0.01)
    assert small["fine_share"] == pytest.approx(large["fine_share"], abs=0.02)
    assert large["threshold"] == alone["threshold"]
    assert found["pairs"][0]["agreement"] == 1


def test_what_cannot_be_compared_is_an_error(run, quarter, tmp_path):
    about = read_config(run("gated-s0"))
    others = {"crop": {"eval_crop": 0.875}, "pets": {"source": "pets"}}
    for name, change in others.items():
        (tmp_path / name).mkdir()
        config = replace(about["config"], data=replace(about["config"].data, **change))
        write_config(tmp_path / name, config, "scenes", about["classes"])
    for words, matched, sentence in (
        ([run("gated-s0")], False, "1 gate was given, but two decide alike or not"),
        ([quarter, quarter], False, "is a run, which would say what images to decide for; add one"),
        ([run("gated-s0"), run("disc-s0")], True, r"--match moves thresholds, but disc-s0 \(DiscGate\) has none"),
        ([run("gated-s0"), tmp_path / "crop"], False, "data.eval_crop=0.875, but .* has 1.0; their cells show"),
        ([run("gated-s0"), tmp_path / "pets"], False, "trained on scenes, pets; say with --data"),
    ):
        with pytest.raises(ValueError, match=sentence):
            agreement.collect(words, None, matched, None)


def test_content_is_moved_over_its_mean_colour_and_zoomed_about_its_centre():
    def show(image, **how):
        return robustness.show(image, robustness.View("random", **how))

    image, columns = torch.randn(2, 3, 16, 16), torch.arange(16.0)
    moved = show(image, right=0.25, down=-0.125)
    torch.testing.assert_close(moved[:, :, :14, 4:], image[:, :, 2:, :12])
    assert max(moved[:, :, :, :4].abs().max(), moved[:, :, 14:].abs().max()) < 1e-5
    shrunk = F.interpolate(image, scale_factor=0.5, mode="bilinear", antialias=True)
    torch.testing.assert_close(show(image, zoom=0.5), F.pad(shrunk, (4, 4, 4, 4)))
    large = show(columns.expand(1, 1, 16, 16), zoom=2.0, right=0.25)
    torch.testing.assert_close(large, ((columns + 0.5 - 8 - 4) / 2 + 8 - 0.5).expand(1, 1, 16, 16))
    assert torch.equal(robustness.show(image, robustness.View("as it is")), image)


def test_views_are_the_same_every_time_and_stay_in_the_grids_range():
    views = robustness.make_views(50)
    assert views == robustness.make_views(50)
    assert views[0] == robustness.View("as it is")
    assert len(set(views)) == 1 + 6 + 6 + 6 + 50
    for zoom, right, down in (view[1:] for view in views):
        assert 0.5 <= zoom <= 2
        assert max(abs(right), abs(down)) <= 0.375
    assert [each.words for each in views[6:9]] == ["zoom 2", "left 37.5%", "left 25.0%"]


def test_every_run_is_judged_in_every_view_and_seeds_are_one_setting(run, tmp_path, monkeypatch, capsys):
    out, plot = tmp_path / "new/found.json", tmp_path / "images/plot.svg"
    names = ("gated-s0", "gated-s1", "disc-s0")
    run_script(robustness, monkeypatch, *map(run, names), "--out", out, "--plot", plot, "--random", 2)
    found = json.loads(out.read_text())
    for row in found["runs"]:
        known = json.loads((run(row["name"]) / "evaluations/val.json").read_text())
        assert row["top1"][0] == pytest.approx(known["top1"])
        assert row["gmacs"][0] == pytest.approx(known["gmacs"]["mean"])
        assert row["fine_share"][0] == pytest.approx(known["fine_share"])
        assert len(row["top1"]) == len(found["views"]) == 21
    first, second, disc = found["runs"]
    gated, fixed = found["settings"]
    assert (gated["name"], gated["num_runs"], fixed["name"], fixed["num_runs"]) == ("gated", 2, "disc", 1)
    assert gated["gmacs"][3] == pytest.approx((first["gmacs"][3] + second["gmacs"][3]) / 2)
    assert gated["gmacs_change"][3] == pytest.approx(gated["gmacs"][3] - gated["gmacs"][0])
    assert gated["gmacs_change"][1] != 0
    assert set(disc["gmacs"]) == {disc["gmacs"][0]}  # a disc looks at nothing, so it costs the same
    assert found["command"].startswith("python benchmarks/robustness.py ")
    assert {"commit", "machine", "versions"} <= found.keys()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| content | gated, top-1 | gated, GMACs | disc, top-1 | disc, GMACs | top-1 over disc |"
    assert len(lines) == 2 + 20 + 2
    assert lines[21].startswith("| random, mean of 2 |")
    assert all(text in plot.read_text() for text in ("moved right", "GMACs, over disc"))
