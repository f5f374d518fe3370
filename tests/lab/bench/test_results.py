"""Results are kept whole, and the tables of the docs are made from them, without a number typed by hand."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from scripts import load_script
from smoke_runs import smoke

import msvit
from msvit_lab.bench import results
from msvit_lab.bench.results import make_record, read_results, source_commit, write_result
from msvit_lab.bench.rows import DENSE_GRAPHS
from msvit_lab.bench.workload import SUITES
from msvit_lab.json_values import write_json
from msvit_lab.runs import write_config

ROOT = Path(msvit.__file__).parents[1]
CPU = torch.device("cpu")
collect, table = map(load_script, ("collect", "table"))


def result(**changes):
    def row(name, ms, mac_ratio=1.0):
        return {
            "name": name, "trouble": None, "ms": {"median": ms}, "burst_ms": None, "speed_up": {"median": 12 / ms},
            "mac_ratio": mac_ratio, "share": 12 / ms / mac_ratio, "memory": {"peak_mb": 5120.4}, "tokens": 97.4,
            "tokens_share": 10 / ms / mac_ratio, "floors": {"matrix_ms": 1.0, "traffic_ms": 2.0},
            "speed_up_over_all_tokens": {"median": 10 / ms},
        }  # fmt: skip

    return {
        "model": "vit_small_patch16_224", "size": 224, "fine": 16, "batch": 64, "train": False, "device": "cpu",
        "dtype": "float32", "asked": {}, "mac_ratio": 2.0, "baseline": "dense compiled", "basis": "single calls",
        "tokens": {"mean": 97.4, "dense": 196},
        "rows": [
            row("dense compiled", 12.0), row("all fine compiled", 10.0), row("packed compiled", 7.5, 2.0),
            row("shipped gate compiled", 8.0, 2.0),
        ],
        "record": {
            "machine": "A card", "commit": "abc", "dirty": False, "versions": {"torch": "2.11"},
            "command": "msvit bench x",
        },
        **changes,
    }  # fmt: skip


def test_a_workload_measured_again_replaces_itself_and_others_stay(tmp_path):
    path = tmp_path / "new" / "h200.json"
    for found in (result(), result(batch=1), result(mac_ratio=3.0), result(train=True)):
        write_result(path, found)
    assert [(work["batch"], work["train"], work["mac_ratio"]) for work in read_results(path)] == [
        (1, False, 2.0), (64, False, 3.0), (64, True, 2.0),
    ]  # fmt: skip


def test_a_file_of_something_else_stays_as_it_is(tmp_path):
    old = json.dumps({"format": 0, "workloads": []})
    for text, sentence in (
        *((text, r"a\.json is no file of msvit bench") for text in ("no json", "[]", "{}")),
        (old, "format 0, but this msvit reads format 1"),
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match=sentence):
            write_result(tmp_path / "a.json", result())
        assert (tmp_path / "a.json").read_text() == text


def test_the_table_shows_the_files_numbers_with_both_speed_ups_and_is_of_one_commit(tmp_path):
    failed = result(size=384)
    failed["rows"] = [failed["rows"][0], {"name": "all fine compiled", "trouble": "OutOfMemoryError"}]
    other = result(model="deit_tiny_patch16_224", batch=1, train=True)
    for found in (result(), other, failed, result(asked={"reducers": ["evit"]})):
        write_result(tmp_path / "a.json", found)
    source = ["", "A card, float32, torch 2.11, commit abc; dense is the host under `torch.compile`;"]
    source.append("`msvit bench x`.")
    assert table.make_table(tmp_path / "a.json", "full").splitlines()[2:] == [
        f"| {name} | {gate} | 97 of 196 | 1/2.00 | 12 ms | 10 ms | {ms} ms | {over:.2f}x | **{fewer:.2f}x** "
        f"| {over / 2:.2f} | {fewer / 2:.2f} | 3 ms | 5,120 | 5,120 | 5,120 |"
        for name in ("ViT-S/16, 224 px, 64 images", "`deit_tiny_patch16_224`, 224 px, 1 image, training step")
        for gate, ms, over, fewer in (("learned", 7.5, 1.6, 4 / 3), ("shipped", 8, 1.5, 1.25))
    ] + source
    brief = "| ViT-S/16, 224 px, 64 images | 97 of 196 | 1/2.00 | 12 ms | 8 ms | 1.50x | **1.25x** |"
    assert table.make_table(tmp_path / "a.json", "brief").splitlines()[2:] == [brief, *source]
    write_result(tmp_path / "a.json", result(batch=1, record=result()["record"] | {"commit": "abd"}))
    with pytest.raises(ValueError, match=r"mixes .* commit abc; .* commit abd; measure all of it again"):
        table.make_table(tmp_path / "a.json", "full")


def test_one_image_has_the_time_of_the_host_by_cuda_graphs_where_that_was_measured(tmp_path):
    """In the suite it is timed for one image; tables of files without it have no such column."""
    timed = [work.batch for work in SUITES["readme"] if DENSE_GRAPHS in (work.rows or ())]
    assert timed == [1]
    write_result(tmp_path / "a.json", result())
    assert "CUDA graphs" not in table.make_table(tmp_path / "a.json", "full")
    one = result(batch=1)
    one["rows"].append(one["rows"][0] | {"name": DENSE_GRAPHS, "ms": {"median": 11.0}})
    write_result(tmp_path / "a.json", one)
    head, _, many, _, first, *_ = table.make_table(tmp_path / "a.json", "full").splitlines()
    assert "| dense | dense, CUDA graphs | all tokens |" in head
    assert "| 12 ms | | 10 ms |" in many
    assert "| 12 ms | 11 ms | 10 ms |" in first


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_tables_are_what_the_files_give(page):
    for mark, text in table.parts(ROOT / table.RESULTS, table.PAGES[page]).items():
        assert f"<!-- {mark} -->\n{text}\n<!-- /{mark} -->" in (ROOT / page).read_text()


def test_the_script_writes_the_pages_of_its_checkout_between_the_marks(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for page in table.PAGES:
        (tmp_path / page).write_text("a\n<!-- bench --><!-- /bench -->\nb\n<!-- bench-source --><!-- /bench-source -->")
    table.main()
    assert table.NOTHING in (tmp_path / "README.md").read_text()
    write_result(tmp_path / table.RESULTS / "readme.json", result())
    for _ in range(2):
        table.main()
        made, source = table.make_tables(tmp_path / table.RESULTS, "brief").split("\n\n")
        text = f"a\n<!-- bench -->\n{made}\n<!-- /bench -->\nb\n<!-- bench-source -->\n{source}\n<!-- /bench-source -->"
        assert (tmp_path / "README.md").read_text() == text
    assert "| ViT-S/16, 224 px, 64 images | learned |" in (tmp_path / "docs/performance.md").read_text()
    (tmp_path / "README.md").write_text("a")
    with pytest.raises(ValueError, match=r"README.md has no place for the table; put <!-- bench -->"):
        table.main()


def test_a_record_says_machine_versions_and_command():
    words = ["--images", "/somewhere/far/pets/val", "--dense", "cub=/far/runs/cub/s0,/far/runs/cub/s1", "voc=runs/voc"]
    found = make_record(CPU, ["bench", *words, "--batch", "1"])
    assert found["command"] == "msvit bench --images pets/val --dense cub=cub/s0,cub/s1 voc=runs/voc --batch 1"
    assert f"{torch.get_num_threads()} threads" in found["machine"]
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["date"]) == 10


def test_the_commit_is_the_sources_and_not_that_of_a_folder_around_it(tmp_path, monkeypatch):
    package = tmp_path / "venv" / "msvit"
    package.mkdir(parents=True)
    for file in (package / "__init__.py", tmp_path / "other"):
        file.write_text("")
    monkeypatch.setattr(results.msvit, "__file__", str(package / "__init__.py"))

    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True)

    assert source_commit() == {"commit": None, "dirty": None}
    git("init", "-q")
    for tracked in ("other", "venv"):
        assert source_commit() == {"commit": None, "dirty": None}
        assert make_record(CPU, [], commit="given")["commit"] == "given"
        git("add", tracked)
        git("commit", "-qm", "a")
    known = source_commit()
    assert (len(known["commit"]), known["dirty"]) == (12, False)
    assert make_record(CPU, [], commit="given")["commit"] == known["commit"]
    (tmp_path / "other").write_text("changed")
    assert source_commit()["dirty"] is False
    (package / "__init__.py").write_text("changed")
    assert source_commit()["dirty"] is True
    assert make_record(CPU, [], commit="given")["commit"] == "given"


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
