"""The plot of a sweep: which runs are one curve, and what its points are."""

from typing import Any

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("curves")


RUNS = [
    {"name": "dense-224-s0", "gmacs": 4.6, "top1": 0.90},
    {"name": "dense-224-s1", "gmacs": 4.6, "top1": 0.92},
    {"name": "dense-160-s0", "gmacs": 2.3, "top1": 0.88},
    {"name": "dense-224-evit-0.7-s0", "gmacs": 3.0, "top1": 0.89},
    {"name": "dense-224-tome-r8-s0", "gmacs": 3.1, "top1": 0.87},
    {"name": "t0.3-w1-s0", "gmacs": 2.0, "top1": 0.895},
    {"name": "t0.3-w1-evit-0.7-s0", "gmacs": 1.5, "top1": 0.885},
    {"name": "disc-0.3-evit-0.5-s0", "gmacs": 1.2, "top1": 0.86},
]


def test_a_curve_is_what_differs_in_an_amount_alone(script):
    found = script.curves(RUNS, script.mean_cost(RUNS), "top1")
    assert set(found) == {"dense", "EViT", "ToMe", "gate", "gate + EViT", "disc + EViT"}
    small, large = found["dense"]
    assert (small.cost, small.scores) == (2.3, [88.0])
    assert large.cost == pytest.approx(4.6)
    assert large.scores == pytest.approx([90.0, 92.0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t0.65-w1-dynamicvit-0.7-s0", "gate 0.65 + DynamicViT 0.7"), ("t0.3-w50-s1", "gate 0.3, weight 50"),
        ("dense-224-tome-r8-s2", "dense 224 px + ToMe r8"), ("t0.3-w10", "gate 0.3, weight 10"),
        ("bas-flat-light-0.25-s0", "bas flat light 0.25"),
    ],
)  # fmt: skip
def test_runs_have_names_for_readers(script, name, words):
    assert script.readable(name) == words


def test_it_is_drawn_against_cost_and_time(script, tmp_path):
    times = {
        "rows": [{"name": name, "speed_up": {"median": 2}} for name in ("dense-224-s0", "t0.3-w1-s0")],
        "baseline": "dense-224-s0", "batch": 256, "record": {"machine": "a card"},
    }  # fmt: skip
    again = times | {"rows": [{"name": "t0.3-w1-s0", "speed_up": {"median": 2.5}}]}
    assert script.time_taken(times, again) == {"dense-224": 0.5, "t0.3-w1": 0.4}
    script.plot({"task": "classify", "runs": RUNS}, [times, again], tmp_path / "images/plot.svg")
    text = (tmp_path / "images/plot.svg").read_text()
    wanted = ("time over that of dense 224 px, a card, batch 256", "GMACs per image", "gate + EViT")
    assert all(words in text for words in wanted)
