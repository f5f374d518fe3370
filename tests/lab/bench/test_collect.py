"""What came of a sweep: collected from its folders, shown in the docs without a number typed by hand, and drawn."""

import json
import sys
from pathlib import Path

import pytest
from scripts import load_script
from smoke_runs import smoke

from msvit_lab.evaluate import evaluate_run
from msvit_lab.json_values import write_json
from msvit_lab.runs import write_config
from msvit_lab.training.loop import train

ROOT = Path(__file__).resolve().parents[3]
collect, curves, maps = (load_script(name) for name in ("collect", "curves", "maps"))


def write_run(folder: Path, gate: str, seed: int, score: float, gmacs: float) -> None:
    folder.mkdir(parents=True)
    write_config(folder, smoke(task="segment", model__gate=gate, seed=seed), "voc", [])
    found = {"miou": score, "img_size": 64, "tokens": {"mean": 40.0}, "gmacs": {"mean": gmacs}, "latency": []}
    write_json(folder / "eval.json", found)


def test_seeds_are_one_line_with_their_mean_and_dense_comes_first(tmp_path):
    write_run(tmp_path / "t0.5-w1-s0", "learned", 0, 0.61, 6.0)
    write_run(tmp_path / "t0.5-w1-s1", "learned", 1, 0.64, 6.2)
    write_run(tmp_path / "dense-64-s0", "none", 0, 0.66, 10.0)
    write_run(tmp_path / "dense-48-s0", "none", 0, 0.60, 5.0)
    (tmp_path / "begun-s0").mkdir()
    with pytest.raises(SystemExit, match="no evaluated run"):
        collect.collect(tmp_path / "begun-s0", "", "")
    found = collect.collect(tmp_path, "msvit sweep voc", "abc")
    lines = collect.table(found, found).splitlines()
    assert lines[2] == "| dense 64 px | 64 px | 40 | 10.00 | 100% | +0.0 |  | **66.0** | 66.0 |"
    assert lines[3] == "| dense 48 px | 64 px | 40 | 5.00 | 50% | -6.0 |  | **60.0** | 60.0 |"
    assert lines[4] == "| gate 0.5 | 64 px | 40 | 6.10 | 61% | -3.5 | +1.2 | **62.5** | 61.0, 64.0 |"  # over 61.32
    assert "`msvit sweep voc`" in lines[-1]
    assert "commit abc" in lines[-1]


def test_the_curve_has_no_reducers_and_no_ends_beyond_its_own():
    dense = {"gate": "none", "seed": 0, "img_size": 64, "tokens": 16, "reducer": None}
    runs = [
        dense | {"name": "dense-64-s0", "top1": 0.9, "gmacs": 4.0},
        dense | {"name": "dense-48-s0", "top1": 0.8, "gmacs": 2.0},
        dense | {"name": "dense-64-evit-0.7-s0", "top1": 0.88, "gmacs": 3.0, "reducer": "EViT(rate=0.7)"},
        dense | {"name": "disc-0.1-s0", "top1": 0.7, "gmacs": 1.5, "gate": "disc"},
    ]
    results = {"task": "classify", "command": "", "machine": "", "commit": "", "runs": runs}
    lines = {line.split(" | ")[0]: line for line in collect.table(results, results).splitlines()}
    assert "| -2.0 | +3.0 | **88.0** | 88.0 |" in lines["| dense 64 px + EViT 0.7"]  # 85 at 3 GMACs
    assert "| -20.0 |  | **70.0** | 70.0 |" in lines["| disc 0.1"]
    alone = results | {"runs": runs[3:]}
    assert collect.table(alone, results).splitlines()[2] == lines["| disc 0.1"]
    assert collect.table(alone, None).splitlines()[2] == "| disc 0.1 | 64 px | 16 | 1.50 | **70.0** | 70.0 |"
    better = results | {"runs": [*runs[:3], dense | {"name": "dense-64-s1", "seed": 1, "top1": 1.0, "gmacs": 4.0}]}
    assert collect.table(alone, better).splitlines()[2] == lines["| disc 0.1"]  # the dense runs of its own seed
    with pytest.raises(SystemExit, match=r"no dense runs of the seeds \[0\]"):
        collect.table(alone, alone)


def test_time_is_held_against_the_dense_runs_of_another_file():
    dense = {"gate": "none", "seed": 0, "reducer": None}
    runs = [
        dense | {"name": "dense-64-s0", "top1": 0.9},
        dense | {"name": "dense-64-s1", "top1": 0.8, "seed": 1},
        dense | {"name": "dense-48-s0", "top1": 0.65},
        dense | {"name": "t0.5-w1-s0", "top1": 0.79, "gate": "context"},
    ]
    both = {"dense-64-s0": 1.0, "dense-48-s0": 2.0}
    slow, fast = ({"rows": [timed(name, faster) for name, faster in rows.items()]}
                  for rows in (both, {"dense-64-s0": 1.0, "t0.5-w1-s0": 4 / 3}))  # fmt: skip
    made = {"command": "msvit bench", "machine": "a card", "commit": "1a2b"}
    fast |= {"dtype": "bfloat16", "batch": 8, "record": made}
    head, _, *lines = collect.time_table(fast, {"task": "classify", "runs": runs}, slow).splitlines()
    assert head.endswith("| speed-up | top-1, mean | above the dense curve at equal time |")
    assert lines[0] == "| dense 64 px | 16 | 1.50 | 2.00 | 4,000 | 1.00x | **85.0** |  |"
    assert lines[1].endswith("| 1.33x | **79.0** | +1.5 |")  # dense of its seed has 77.5 at 3/4 of the time
    assert lines[3] == "`msvit bench`, a card, bfloat16, batch 8, commit 1a2b."


def timed(name: str, faster: float) -> dict[str, object]:
    about = {"tokens": 16.0, "gmacs": 1.5, "ms": {"median": 2.0}, "images_per_second": 4000.0}
    return {"name": name, **about, "speed_up": {"median": faster}}


def test_the_docs_show_the_tables_of_the_results():
    pages = [page.read_text() for page in (*(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/results/TABLES.md")]
    for stem, table in collect.tables(ROOT / "benchmarks/results").items():
        assert sum(f"<!-- {stem} -->\n{table}\n<!-- /{stem} -->" in page for page in pages) == 1, stem


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


def test_a_curve_is_what_differs_in_an_amount_alone():
    found = curves.curves(RUNS, curves.mean_cost(RUNS), "top1")
    assert set(found) == {"dense", "EViT", "ToMe", "gate", "gate + EViT", "disc + EViT"}
    small, large = found["dense"]
    assert (small.cost, small.scores) == (2.3, [88.0])
    assert large.cost == pytest.approx(4.6)
    assert large.scores == pytest.approx([90.0, 92.0])


def test_a_sweep_is_drawn_against_cost_and_time(tmp_path):
    times = {
        "rows": [{"name": name, "speed_up": {"median": 2}} for name in ("dense-224-s0", "t0.3-w1-s0")],
        "baseline": "dense-224-s0", "batch": 256, "record": {"machine": "a card"},
    }  # fmt: skip
    again = times | {"rows": [{"name": "t0.3-w1-s0", "speed_up": {"median": 2.5}}]}
    assert curves.time_taken(times, again) == {"dense-224": 0.5, "t0.3-w1": 0.4}
    curves.plot({"task": "classify", "runs": RUNS}, [times, again], tmp_path / "images/plot.svg")
    text = (tmp_path / "images/plot.svg").read_text()
    wanted = ("time over that of dense 224 px, a card, batch 256", "GMACs per image", "gate + EViT")
    assert all(words in text for words in wanted)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t0.65-w1-dynamicvit-0.7-s0", "gate 0.65 + DynamicViT 0.7"), ("t0.3-w50-s1", "gate 0.3, weight 50"),
        ("dense-224-tome-r8-s2", "dense 224 px + ToMe r8"), ("t0.3-w10", "gate 0.3, weight 10"),
        ("bas-flat-light-0.25-s0", "bas flat light 0.25"),
        ("gbas-ctr-light-0.25-s0", "gbas ctr light 0.25"), ("trimmed-gbas-0.25-s0", "trimmed gbas 0.25"),
    ],
)  # fmt: skip
def test_runs_have_names_for_readers(name, words):
    assert curves.readable(name) == words


def test_a_file_of_times_belongs_to_the_sweep_of_its_name(tmp_path):
    assert collect.timed_runs("cub", {"cub_paper"}) == ("cub_curves", "times/cub")
    assert collect.timed_runs("cub_paper", {"cub_paper"}) == ("cub_paper", "times/cub_paper")
    assert collect.timed_runs("cub384", set()) == ("cub_curves384", "times/cub384")
    assert collect.timed_runs("pets_reducers", set()) == ("pets_curves", "times/pets")
    (tmp_path / "times").mkdir()
    (tmp_path / "times/cub.json").write_text("{}")
    with pytest.raises(SystemExit, match="TIMED does not say whose runs times/cub has times of"):
        collect.tables(tmp_path)


def test_maps_of_a_sweep_are_kept_if_asked_and_drawn_with_the_priors(tmp_path, monkeypatch):
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
