"""What came of a sweep: collected from its folders, shown in the docs without a number typed by hand."""

from pathlib import Path

import pytest
from scripts import load_script
from smoke_runs import smoke

from msvit_lab.json_values import write_json
from msvit_lab.runs import write_config

ROOT = Path(__file__).resolve().parents[3]
collect = load_script("collect")


def write_run(folder: Path, gate: str, seed: int, score: float, gmacs: float) -> None:
    (folder / "evaluations").mkdir(parents=True)
    write_config(folder, smoke(task="segment", model__gate=gate, seed=seed), "voc", [])
    found = {"miou": score, "img_size": 64, "tokens": {"mean": 40.0}, "gmacs": {"mean": gmacs}, "latency": []}
    write_json(folder / "evaluations/val.json", found | {"task": "segment"})


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
    assert collect.readable(name) == words


def test_a_file_of_times_belongs_to_the_sweep_of_its_name(tmp_path):
    assert collect.timed_runs("cub", {"cub_paper"}) == ("cub_curves", "times/cub")
    assert collect.timed_runs("cub_paper", {"cub_paper"}) == ("cub_paper", "times/cub_paper")
    assert collect.timed_runs("cub384", set()) == ("cub_curves384", "times/cub384")
    assert collect.timed_runs("pets_reducers", set()) == ("pets_curves", "times/pets")
    (tmp_path / "times").mkdir()
    (tmp_path / "times/cub.json").write_text("{}")
    with pytest.raises(SystemExit, match="TIMED does not say whose runs times/cub has times of"):
        collect.tables(tmp_path)
