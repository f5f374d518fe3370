"""msvit bench, from the command line to the file of results."""

import json

import pytest
import timm
import torch
from smoke_runs import call, done, write_images

import msvit
from msvit_lab.bench.rows import ROWS

TINY = [
    part
    for setting in ("patch_size=8", "embed_dim=32", "depth=2", "num_heads=2", "num_classes=5")
    for part in ("--set", f"model.options.{setting}")
] + ["--model", "vit_tiny_patch16_224", "--size", "64", "--rounds", "4", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _few_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msvit_lab.bench.images.NUM_SCENES", 40)


def records(*arguments: object) -> list[dict]:
    result = call("bench", *TINY, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]  # nothing but JSON


def test_json_has_a_line_per_workload_and_the_file_keeps_them(tmp_path):
    out = tmp_path / "results" / "cpu.json"
    photos = write_images(tmp_path / "photos", each=4)
    options = ["--images", photos, "--rows", "dense,packed,masked", "--out", out]
    found = records(*options, "--batch", "1,3", "--share", 0.5, "--commit", "abc")
    assert [(work["batch"], work["images"]["num"], work["images"]["sets"]) for work in found] == [(1, 4, 4), (3, 12, 4)]
    assert found == json.loads(out.read_text())["workloads"]
    for work in found:
        assert work["gate"] == "from default", "the trained one, unless another is asked for"
        assert [row["name"] for row in work["rows"]] == ["dense", "packed", "masked"]
        assert {"machine", "versions", "commit", "dirty", "date", "command"} == work["record"].keys()
        assert str(tmp_path) not in json.dumps(work["images"])

    late = call("bench", *TINY, *options, "--batch", "4", "--minutes", 0, "--json")
    assert (late.exit_code, late.stdout) == (0, "")
    assert "0 minutes are over" in late.stderr


def test_the_table_has_no_columns_that_only_a_gpu_has_and_names_what_failed_below(monkeypatch):
    def fails(subject: object) -> None:
        raise RuntimeError("no [such] kernel")

    monkeypatch.setitem(ROWS, "packed compiled", fails)
    said = done("bench", *TINY, "--batch", 2, "--rows", "dense,packed,packed compiled")
    wanted = ("vit_tiny_patch16_224, 64 px, batch 2", "speed-up", "share", "fewer multiply-adds", "images/s", "packed")
    assert all(words in said for words in wanted)
    assert not any(words in said for words in ("back to back", "peak memory", "{"))
    assert "packed compiled failed: RuntimeError: no [such] kernel" in said


def test_a_saved_model_is_timed_as_it_is_beside_its_dense_host(tmp_path):
    host = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    model = msvit.convert(host.eval(), gate=msvit.DiscGate(16, share=0.5), reducer=msvit.ToMe(r=3))
    msvit.save(model, tmp_path / "saved")
    found = json.loads(done("bench", tmp_path / "saved", "--rounds", 2, "--device", "cpu", "--batch", 2, "--json"))
    assert (found["size"], found["gate"], [row["name"] for row in found["rows"]]) == (
        64, "its own", ["dense", "packed", "packed compiled"],
    )  # fmt: skip
    assert not any(row["trouble"] for row in found["rows"])
    images = torch.zeros(1, 3, 64, 64)
    ratio = msvit.macs(msvit.convert(host, 16, "all-fine"), images) / msvit.macs(model, images)
    assert found["mac_ratio"] == pytest.approx(ratio.item(), rel=1e-3)


def test_the_shipped_gate_is_timed_beside_the_learned_one_and_all_tokens():
    names = ["dense", "all fine compiled", "packed compiled", "shipped gate compiled"]
    (found,) = records("--batch", 2, "--rows", ",".join(names), "--gate", "learned")
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == names
    assert [rows[name]["tokens"] for name in names[:2]] == [64, 64]
    assert rows[names[3]]["tokens"] == pytest.approx(found["tokens"]["mean"], rel=0.05), "as many fine cells"
    assert rows[names[3]]["mac_ratio"] != rows[names[2]]["mac_ratio"], "its gate has multiply-adds of its own"


def test_bench_times_a_training_step_with_a_trained_gate(trained):
    (found,) = records("--batch", 4, "--train", "--gate", trained / "gated", "--rows", "dense,packed")
    assert (found["train"], found["gate"]) == (True, "of the run gated")
    assert [row["trouble"] for row in found["rows"]] == [None, None]
