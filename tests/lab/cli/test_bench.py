"""msvit bench, from the command line to the file of results."""

import json

import pytest
from click.testing import Result
from smoke_runs import write_images
from typer.testing import CliRunner

from msvit.lab.cli import app

TINY = [
    part
    for setting in ("patch_size=8", "embed_dim=32", "depth=2", "num_heads=2", "num_classes=5")
    for part in ("--set", f"model.options.{setting}")
] + ["--model", "vit_tiny_patch16_224", "--size", "64", "--rounds", "12", "--device", "cpu"]


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--json"], terminal_width=200)


def lines(result: Result) -> list[dict]:
    return [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]


def test_bench_prints_a_table_and_a_line_of_json_for_each_workload_and_keeps_them(tmp_path):
    out = tmp_path / "results" / "cpu.json"
    photos = write_images(tmp_path / "photos", each=4)
    options = [*TINY, "--images", photos, "--rows", "dense,packed,masked", "--out", out]
    result = bench(*options, "--batch", "1,3", "--gate", "gradient", "--share", 0.5, "--commit", "abc")
    assert result.exit_code == 0, result.output
    found = lines(result)
    shown = [(work["batch"], work["images"]["num"], work["images"]["sets"]) for work in found]
    assert shown == [(1, 12, 12), (3, 12, 4)]
    assert found == json.loads(out.read_text())["workloads"]
    for work in found:
        assert [row["name"] for row in work["rows"]] == ["dense", "packed", "masked"]
        assert work["fine_share"]["mean"] == pytest.approx(0.5, abs=0.05)
        assert {"machine", "versions", "commit", "dirty", "date", "command"} == work["record"].keys()
        assert str(tmp_path) not in json.dumps(work["images"])
    for words in ("vit_tiny_patch16_224, 64 px, batch 3", "speed-up", "share", "fewer multiply-adds", "masked"):
        assert words in result.output

    again = bench(*options, "--batch", "1,2", "--gate", "gradient", "--share", 0.5, "--resume")
    assert again.exit_code == 0, again.output
    assert "left out: vit_tiny_patch16_224, 64 px, batch 1" in again.output
    assert [work["batch"] for work in lines(again)] == [2]
    assert [work["batch"] for work in json.loads(out.read_text())["workloads"]] == [1, 3, 2]
    other = bench(*options, "--batch", "1", "--gate", "gradient", "--share", 0.3, "--resume")
    assert [work["fine_share"]["mean"] for work in lines(other)] == [pytest.approx(0.3, abs=0.05)]
    late = bench(*options, "--batch", "4", "--minutes", 0)
    assert (late.exit_code, lines(late)) == (0, [])
    assert "0 minutes are over" in late.output


def test_a_cpu_shows_no_columns_that_only_a_gpu_has_and_json_only_if_asked():
    arguments = ["bench", *TINY, "--batch", "2", "--rows", "dense,packed", "--rounds", "4"]
    output = CliRunner().invoke(app, arguments, terminal_width=200).output
    assert "images/s" in output
    assert not any(word in output for word in ("back to back", "peak memory", "{"))


@pytest.mark.parametrize("step", [[], ["--train"]])
def test_the_shipped_gate_is_timed_beside_the_learned_one_and_all_tokens(step):
    names = ["dense", "all fine accelerated", "packed accelerated", "shipped gate accelerated"]
    result = bench(*TINY, "--batch", 2, "--rows", ",".join(names), *step)
    assert result.exit_code == 0, result.output
    (found,) = lines(result)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == names
    assert [rows[name]["tokens"] for name in names[:2]] == [64, 64]
    assert rows[names[3]]["tokens"] == pytest.approx(found["tokens"]["mean"], rel=0.15), "the same share of fine cells"
    assert rows[names[3]]["mac_ratio"] != rows[names[2]]["mac_ratio"], "its gate has multiply-adds of its own"
    for row in (rows[name] for name in names[2:]):
        assert row["tokens_share"] == pytest.approx(row["speed_up_over_all_tokens"]["median"] / row["mac_ratio"], 1e-3)


def test_bench_times_a_training_step_with_a_trained_gate(trained):
    result = bench(*TINY, "--batch", 4, "--train", "--gate-from", trained / "gated", "--rows", "dense,packed")
    assert result.exit_code == 0, result.output
    (found,) = lines(result)
    assert (found["train"], found["gate"]) == (True, "of the run gated")
    assert [row["trouble"] for row in found["rows"]] == [None, None]


def test_a_row_that_fails_is_told_below_the_table(monkeypatch):
    from msvit.lab.bench import workload

    def fails(subject: object) -> None:
        raise RuntimeError("no [such] kernel")

    monkeypatch.setitem(workload.ROWS, "packed compiled", fails)
    result = bench(*TINY, "--batch", 2, "--rows", "dense,packed compiled")
    assert result.exit_code == 0, result.output
    assert "packed compiled failed: RuntimeError: no [such] kernel" in result.output
    assert lines(result)[0]["rows"][1]["trouble"] == "RuntimeError: no [such] kernel"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "dense,fast"], "unknown row 'fast'; known: dense, dense compiled, masked"),
        (["--rows", "packed"], "nothing to be compared with"),
        (["--reducer", "pitome"], "unknown reducer 'pitome'; known: evit, dynamicvit, tome"),
        (["--suite", "a100"], "unknown suite 'a100'; known: readme, h200, cpu"),
        (["--gate", "best"], "unknown gate 'best'; known: default, learned"),
        (["--gate-from", "nowhere"], "no gate.json"),
        (["--share", "2"], "share is 2.0"),
        (["--images", "nowhere"], "nowhere does not exist; give --images"),
        (["--model", "vit_smal"], "timm has no model 'vit_smal'"),
        (["--size", "40"], "multiples of 16"),
        (["--size", "x"], "'x' is no list of numbers"),
        (["--batch", "0"], "--batch is 0, but both must be at least 1"),
        (["--batch", ""], "nothing to time"),
        (["--batch", "5000"], "scenes has 4096 different images, but a batch of 5000"),
        (["--dtype", "int8"], "--dtype is 'int8', but must be one of float32"),
        (["--dtype", "float16", "--train"], "give --dtype bfloat16"),
        (["--device", "tpu"], "--device is 'tpu', but must be cuda or cpu"),
        (["--set", "model.nam=x"], "there is no setting 'model.nam'"),
    ],
)
def test_bench_answers_a_mistake(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("msvit.lab.bench.images.NUM_SCENES", 4096 if "5000" not in arguments else 40)
    result = bench(*TINY, *arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert words.replace("4096", "40") in result.output.replace("\n", "")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = bench(*TINY, "--device", "cuda")
    assert result.exit_code == 2
    assert "torch finds no CUDA device here; leave it out, or give --device cpu" in result.output
