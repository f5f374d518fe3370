"""Results are kept whole, and the README's table is made from them."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from scripts import load_script

import msvit
from msvit.lab.bench import record
from msvit.lab.bench.record import make_record, source_commit
from msvit.lab.bench.results import read_results, write_result
from msvit.lab.bench.suites import SUITES, suite

ROOT = Path(msvit.__file__).parents[1]


@pytest.fixture(scope="module")
def table():
    return load_script("table")


def result(**changes):
    def row(name, ms, mac_ratio=1.0):
        spread = {"median": ms, "low": ms, "high": ms}
        faster = {"median": 12 / ms, "low": 12 / ms, "high": 12 / ms}
        return {
            "name": name, "trouble": None, "ms": spread, "burst_ms": None, "images_per_second": 1.0, "speed_up": faster,
            "mac_ratio": mac_ratio, "share": 12 / ms / mac_ratio, "memory": {"peak_mb": 5120.4}, "tokens": 97.4,
            "tokens_share": 10 / ms / mac_ratio, "floors": {"matrix_ms": 1.0, "traffic_ms": 2.0},
            "speed_up_over_all_tokens": {"median": 10 / ms, "low": 10 / ms, "high": 10 / ms},
        }  # fmt: skip

    return {
        "model": "vit_small_patch16_224", "size": 224, "fine": 16, "batch": 64, "train": False,
        "device": "cpu", "dtype": "float32", "asked": {},
        "mac_ratio": 2.0, "baseline": "dense compiled", "basis": "single calls", "tokens": {"mean": 97.4, "dense": 196},
        "rows": [
            row("dense compiled", 12.0), row("all fine accelerated", 10.0), row("packed accelerated", 7.5, 2.0),
            row("shipped gate accelerated", 8.0, 2.0),
        ],
        "record": {
            "machine": "A card", "commit": "abc", "dirty": False, "versions": {"torch": "2.11"},
            "command": "msvit bench x",
        },
        **changes,
    }  # fmt: skip


def test_a_workload_measured_again_takes_its_old_place_and_others_stay(tmp_path):
    path = tmp_path / "new" / "h200.json"
    for found in (result(), result(batch=1), result(mac_ratio=3.0), result(train=True)):
        write_result(path, found)
    assert [(work["batch"], work["train"], work["mac_ratio"]) for work in read_results(path)] == [
        (1, False, 2.0), (64, False, 3.0), (64, True, 2.0),
    ]  # fmt: skip


def test_a_file_of_something_else_is_refused(tmp_path):
    for text in ("no json", "[]", "{}"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match=r"a\.json is no file of msvit bench"):
            write_result(tmp_path / "a.json", result())
        assert (tmp_path / "a.json").read_text() == text
    (tmp_path / "a.json").write_text(json.dumps({"format": 0, "workloads": []}))
    with pytest.raises(ValueError, match="format 0, but this msvit reads format 1"):
        read_results(tmp_path / "a.json")


def test_the_table_shows_the_files_numbers_with_both_speed_ups(table, tmp_path):
    write_result(tmp_path / "a.json", result())
    write_result(tmp_path / "a.json", result(model="deit_tiny_patch16_224", batch=1, train=True))
    failed = result(size=384)
    failed["rows"] = [failed["rows"][0], {"name": "all fine accelerated", "trouble": "OutOfMemoryError"}]
    write_result(tmp_path / "a.json", failed)
    write_result(tmp_path / "a.json", result(asked={"reducers": ["evit"]}))
    source = ["", "A card, float32, torch 2.11, commit abc; dense is the host under `torch.compile`;"]
    source.append("`msvit bench x`.")
    assert table.make_table(tmp_path / "a.json", "full").splitlines()[2:] == [
        f"| {name} | {gate} | 97 of 196 | 1/2.00 | 12 ms | 10 ms | {ms} ms | **{over:.2f}x** | {fewer:.2f}x "
        f"| {over / 2:.2f} | {fewer / 2:.2f} | 3 ms | 5,120 | 5,120 | 5,120 |"
        for name in ("ViT-S/16, 224 px, 64 images", "`deit_tiny_patch16_224`, 224 px, 1 image, training step")
        for gate, ms, over, fewer in (("learned", 7.5, 1.6, 4 / 3), ("shipped", 8, 1.5, 1.25))
    ] + source
    brief = "| ViT-S/16, 224 px, 64 images | 97 of 196 | 1/2.00 | 12 ms | 8 ms | **1.50x** | 1.25x |"
    assert table.make_table(tmp_path / "a.json", "brief").splitlines()[2:] == [brief, *source]


def test_a_table_is_of_one_commit(table, tmp_path):
    write_result(tmp_path / "a.json", result())
    later = result(batch=1)
    later["record"] |= {"commit": "abd"}
    write_result(tmp_path / "a.json", later)
    with pytest.raises(ValueError, match=r"mixes .* commit abc; .* commit abd; measure all of it again"):
        table.make_table(tmp_path / "a.json", "full")


def test_the_table_takes_the_place_between_the_marks(table):
    text = "before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n"
    assert table.put(text, "new") == "before\n<!-- bench -->\nnew\n<!-- /bench -->\nafter\n"
    assert table.put(table.put(text, "new"), "new") == table.put(text, "new")
    with pytest.raises(ValueError, match="no place for the table"):
        table.put("before", "new")


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_tables_are_what_the_files_give(table, page):
    text = (ROOT / page).read_text()
    assert text == table.put(text, table.make_tables(ROOT / table.RESULTS, table.PAGES[page]))


def test_a_record_says_machine_versions_commit_and_command():
    found = make_record(torch.device("cpu"), ["bench", "--images", "/somewhere/far/pets/val", "--batch", "1"])
    assert found["command"] == "msvit bench --images pets/val --batch 1"
    assert f"{torch.get_num_threads()} threads" in found["machine"]
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["date"]) == 10


def test_the_commit_is_the_sources_and_not_that_of_a_folder_around_it(tmp_path, monkeypatch):
    package = tmp_path / "venv" / "msvit"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(record.msvit, "__file__", str(package / "__init__.py"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    assert source_commit() == {"commit": None, "dirty": None}
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "other").write_text("")
    subprocess.run([*git, "add", "other"], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    assert source_commit() == {"commit": None, "dirty": None}
    assert make_record(torch.device("cpu"), [], commit="told")["commit"] == "told"
    subprocess.run([*git, "add", "venv"], check=True)
    subprocess.run([*git, "commit", "-qm", "b"], check=True)
    known = source_commit()
    assert (len(known["commit"]), known["dirty"]) == (12, False)
    assert make_record(torch.device("cpu"), [], commit="told")["commit"] == known["commit"]
    (tmp_path / "other").write_text("changed")
    assert source_commit()["dirty"] is False
    (package / "__init__.py").write_text("changed")
    assert source_commit()["dirty"] is True
    assert make_record(torch.device("cpu"), [], commit="told")["commit"] == "told"


def test_suites_hold_what_they_promise():
    works = suite("h200")
    assert {work.size for work in works} == {224, 384, 512}
    assert {work.batch for work in works if work.model.startswith("vit_small") and work.size == 224} == {1, 64, 256}
    assert {work.model.split("_")[1] for work in works} == {"small", "base", "large"}
    assert any(work.train for work in works)
    assert all(len(set(map(str, works))) == len(works) for works in SUITES.values())
    with pytest.raises(ValueError, match="unknown suite 'a100'; known: readme, h200, cpu"):
        suite("a100")


def test_the_script_writes_the_readme_of_its_checkout(table, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for page in table.PAGES:
        (tmp_path / page).write_text("a\n<!-- bench --><!-- /bench -->\nb\n")
    table.main()
    assert table.NOTHING in (tmp_path / "README.md").read_text()
    write_result(tmp_path / table.RESULTS / "readme_a.json", result())
    table.main()
    text = (tmp_path / "README.md").read_text()
    made = table.make_tables(tmp_path / table.RESULTS, "brief")
    assert text == f"a\n<!-- bench -->\n{made}\n<!-- /bench -->\nb\n"
    assert "ViT-S/16" in text
    assert "| ViT-S/16, 224 px, 64 images | learned |" in (tmp_path / "docs/performance.md").read_text()
