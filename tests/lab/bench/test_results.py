"""Results are kept whole, and the tables of the docs are made from them, without a number typed by hand."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from scripts import load_script

import msvit
from msvit_lab.bench import results
from msvit_lab.bench.results import make_record, read_results, source_commit, write_result

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


def test_a_table_is_of_one_commit(tmp_path):
    for found in (result(), result(batch=1, record=result()["record"] | {"commit": "abd"})):
        write_result(tmp_path / "a.json", found)
    with pytest.raises(ValueError, match=r"mixes .* commit abc; .* commit abd; measure all of it again"):
        table.make_table(tmp_path / "a.json", "full")


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
        made, source = table.make_table(tmp_path / table.RESULTS / "readme.json", "brief").split("\n\n")
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


def test_a_run_is_held_against_the_line_between_two_dense_ones_of_its_own_seed():
    dense = [{"name": f"dense-64-s{seed}", "gate": "none", "seed": seed, "top1": seed / 10} for seed in (1, 2)]
    assert collect.dense_curve(dense, {1}, "top1", {"dense-64": 4.0}) == [(4.0, 0.1)]
    curve = [(1.0, 0.5), (3.0, 0.7)]
    assert [collect.above(curve, cost, 0.65) for cost in (0.5, 1.0, 2.0, 3.5)] == ["", "+15.0", "+5.0", ""]


def test_the_docs_show_the_tables_of_the_results():
    pages = [page.read_text() for page in (*(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/results/TABLES.md")]
    for stem, table in collect.tables(ROOT / "benchmarks/results").items():
        assert sum(f"<!-- {stem} -->\n{table}\n<!-- /{stem} -->" in page for page in pages) == 1, stem


def test_a_file_of_times_belongs_to_the_sweep_of_its_name(tmp_path):
    assert collect.timed_runs("cub", {"cub_paper"}) == ("cub_curves", "times/cub")
    assert collect.timed_runs("cub_paper", {"cub_paper"}) == ("cub_paper", "times/cub_paper")
    assert collect.timed_runs("cub384", set()) == ("cub_curves384", "times/cub384")
    assert collect.timed_runs("pets_reducers", set()) == ("pets_curves", "times/pets")
    (tmp_path / "times").mkdir()
    (tmp_path / "times/cub.json").write_text("{}")
    with pytest.raises(SystemExit, match="TIMED does not say whose runs times/cub has times of"):
        collect.tables(tmp_path)
