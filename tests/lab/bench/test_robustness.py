"""Runs under zooms and shifts: what a view shows, and that all runs are judged on it."""

import json

import pytest
import torch
import torch.nn.functional as F
from scripts import load_script, run_script

script = load_script("robustness")


def view(**how):
    return script.View("random", **how)


def test_moved_content_leaves_the_mean_colour_behind():
    image = torch.randn(2, 3, 16, 16)
    moved = script.show(image, view(right=0.25, down=-0.125))
    torch.testing.assert_close(moved[:, :, :14, 4:], image[:, :, 2:, :12])
    assert moved[:, :, :, :4].abs().max() < 1e-5
    assert moved[:, :, 14:].abs().max() < 1e-5


def test_smaller_content_has_a_border_and_larger_content_is_the_centre():
    image = torch.randn(2, 3, 16, 16)
    small = script.show(image, view(zoom=0.5))
    shrunk = F.interpolate(image, scale_factor=0.5, mode="bilinear", antialias=True)
    torch.testing.assert_close(small, F.pad(shrunk, (4, 4, 4, 4)))
    columns = torch.arange(16.0)
    large = script.show(columns.expand(1, 1, 16, 16), view(zoom=2.0, right=0.25))
    torch.testing.assert_close(large, ((columns + 0.5 - 8 - 4) / 2 + 8 - 0.5).expand(1, 1, 16, 16))
    assert torch.equal(script.show(image, script.View("as it is")), image)


def test_views_are_the_same_every_time_and_stay_in_the_grids_range():
    views = script.make_views(50)
    assert views == script.make_views(50)
    assert views[0] == script.View("as it is")
    assert len(set(views)) == 1 + 6 + 6 + 6 + 50
    for zoom, right, down in (view[1:] for view in views):
        assert 0.5 <= zoom <= 2
        assert max(abs(right), abs(down)) <= 0.375
    assert [each.words for each in views[6:9]] == ["zoom 2", "left 37.5%", "left 25.0%"]


def test_every_run_is_judged_in_every_view_and_seeds_are_one_setting(run, tmp_path, monkeypatch, capsys):
    out, plot = tmp_path / "new/found.json", tmp_path / "images/plot.svg"
    names = ("gated-s0", "gated-s1", "disc-s0")
    run_script(script, monkeypatch, *map(run, names), "--out", out, "--plot", plot, "--random", 2)
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
    assert all(text in plot.read_text() for text in ("moved right", "GMACs: gated - disc"))
