"""Every command does its work, says what it did, and answers a mistake with a sentence."""

import json
import shutil
import signal
from html import unescape

import pytest
import torch
import typer
from PIL import Image
from smoke_runs import call, done, lines, refused, write_images

import msvit
from msvit.integrations import export
from msvit_lab import interrupts
from msvit_lab.cli.recipes import resumable
from msvit_lab.gate_names import find_gate, gate_names, is_trained
from msvit_lab.interrupts import RESUME_CODE
from msvit_lab.runs import Run

COMMANDS = ["train", "eval", "predict", "sweep", "report", "viz", "bench"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_is_a_command(command):
    said = done(command, "--help")
    example = next(line for line in said.splitlines() if "Example: " in line).split("Example: ")[1].split()
    assert example[:2] == ["msvit", command]
    options = [word for word in example if word.startswith("--")]
    assert all(option in said.split("Example: ")[1] for option in options)


def test_msvit_alone_lists_the_commands_and_version_is_the_packages():
    assert all(f" {command} " in done("--help") for command in COMMANDS)
    assert done("--version").strip() == f"msvit {msvit.__version__}"


def test_train_leaves_a_run_with_its_evaluation(tmp_path):
    run = tmp_path / "run"
    options = ["--target", 0.1, "--gate-weight", 2, "--gate-loss", "l0", "--mode", "trimmed"]
    options += ["--seed", 3, "--img-size", 32, "--set", "optim.lr=0.01", "--model", "vit_small_patch16_224"]
    options += ["--set", "data.crops=light"]
    said = done("train", "scenes", "--smoke", *options, "--json", "--out", run)
    config = json.loads((run / "config.json").read_text())["config"]
    assert (config["gate"]["target"], config["gate"]["weight"], config["gate"]["loss"]) == (0.1, 2, "l0")
    assert (config["model"]["mode"], config["model"]["name"]) == ("trimmed", "vit_small_patch16_224")
    assert (config["data"]["crops"], config["data"]["img_size"]) == ("light", 32)
    assert (config["seed"], config["optim"]["lr"]) == (3, 0.01)
    found = json.loads(said.splitlines()[-1])
    assert found["top1"] == json.loads((run / "evaluations/val.json").read_text())["top1"]
    assert len(lines(run, "train")) == 2


def test_the_device_is_that_of_training_and_evaluation(tmp_path, monkeypatch):
    asked = []
    for name in ("training.loop.train", "evaluate.evaluate_run"):
        monkeypatch.setattr(f"msvit_lab.{name}", lambda *_, device, **__: asked.append(device.type) or {})
    monkeypatch.setattr("msvit_lab.cli.train.show_evaluation", lambda *_: None)
    for name, there in (("cpu", True), ("cuda", True), ("cuda", False), (None, False)):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        result = call("train", "scenes", "--smoke", "--out", tmp_path, *(["--device", name] if name else []))
    assert asked == ["cpu", "cpu", "cuda", "cuda", "cpu", "cpu"]
    assert result.exit_code == 0, result.output


def test_debug_shows_the_traceback_behind_a_sentence_and_its_cause(tmp_path):
    (tmp_path / "config.json").write_text("{")
    result = call("--debug", "eval", tmp_path)
    assert result.exit_code == 2
    *trace, sentence = result.output.strip().splitlines()
    assert trace[0].startswith("Traceback")
    assert any("JSONDecodeError" in line for line in trace), "what the sentence was raised for"
    assert sentence.startswith("error: ")
    assert sentence == refused("eval", tmp_path).strip()


def test_going_on_keeps_the_settings_with_or_without_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for more in (["--set", "optim.lr=0.5"], ["--resume", "--set", "optim.epochs=2"]):
        done("train", "scenes", "--smoke", "--no-evaluate", *more)
    (config,) = tmp_path.glob("runs/*/config.json")
    assert json.loads(config.read_text())["config"]["optim"]["lr"] == 0.5


def test_eval_prints_a_table_or_one_line_of_json(trained):
    said = done("eval", trained / "gated", "--rounds", 2)
    for words in ("top-1", "top-5", "tokens", "GMACs", "packed, batch 1, float32", "dense host, batch 1, float32"):
        assert words in said
    assert "95 % interval of top-1" in said, "of few images"
    assert "{" not in said
    assert f"written to {trained / 'gated/evaluations/val.json'}" in said
    found = json.loads(done("eval", trained / "gated", "--rounds", 2, "--json"))
    assert {"top1", "top5", "tokens", "gmacs", "latency", "machine", "versions", "fine_on_object"} <= found.keys()
    assert found["path"] == str(trained / "gated/evaluations/val.json")


def test_an_evaluation_with_other_settings_never_replaces_the_runs_own(tiny_run, tmp_path):
    run = tiny_run
    own = [run / "evaluations/val.json", run / "evaluations/val.safetensors"]
    before = [path.read_bytes() for path in own]
    classes = tuple(json.loads((run / "config.json").read_text())["classes"])
    for name in ("flowers", "more/flowers"):
        write_images(tmp_path / name / "val", classes, each=1)
    fast = ["--rounds", 0, "--json"]
    for options, name in [
        (["--data", tmp_path / "flowers"], "data-flowers"),
        (["--reducer", "tome", "--rate", 0.7], "tome-0.7"),
        (["--reducer", "tome", "--rate", 0.8, "--size", 32], "32px+tome-0.8"),
        (["--data", tmp_path / "flowers", "--name", "mine"], "mine"),
    ]:
        found = json.loads(done("eval", run, *options, *fast).splitlines()[-1])
        assert found["name"] == name
        assert Run(run).evaluations[name]["top1"] == found["top1"]
        assert Run(run).evaluations.samples(name).images.shape[1] == (32 if "32px" in name else 64)
    reduced, plain = (Run(run).evaluations[name] for name in ("tome-0.7", "val"))
    assert "latency" not in reduced, "those of the run are times of another model"
    assert reduced["reducer"] == "ToMe(rate=0.7)"
    assert reduced["tokens"]["mean"] == pytest.approx(0.7**2 * plain["tokens"]["mean"], rel=0.1), "in two blocks"
    assert [path.read_bytes() for path in own] == before
    other = ["--data", tmp_path / "more/flowers"]
    assert "give another --name" in refused("eval", run, *other, *fast), "other images under the same name"
    assert "val is the name of the run's own evaluation" in refused("eval", run, *other, "--name", "val")
    assert "cannot be named '../x'" in refused("eval", run, *other, "--name", "../x")
    done("eval", run, *other, "--name", "more", *fast)
    assert [path.read_bytes() for path in own] == before


def test_times_that_were_measured_stay_when_nothing_is_timed(tiny_run):
    before = Run(tiny_run).evaluations["val"]
    assert before["latency"]
    assert before["measured"]["at"]
    done("eval", tiny_run, "--rounds", 0)
    after = Run(tiny_run).evaluations["val"]
    assert [after[key] for key in ("latency", "measured")] == [before[key] for key in ("latency", "measured")]


def test_report_takes_runs_and_folders_of_runs_evaluated_or_not(trained, tmp_path):
    found = json.loads(done("report", trained, "--out", tmp_path / "page.html", "--json"))
    page = (tmp_path / "page.html").read_text()
    assert all(name in page for name in ("gated", "dense", "begun", "There is no evaluations/val.json"))
    assert [row["run"] for row in found["runs"]] == ["begun", "dense", "gated"]
    assert found["results"][0] in unescape(page)


def test_viz_draws_with_a_run_or_without(trained, tmp_path):
    image = write_images(tmp_path / "images", ("ant",), each=1) / "ant/0.png"
    Image.open(image).resize((48, 48)).save(image)
    for options, tokens in (
        (["--run", trained / "gated"], 64),  # after two steps all cells are fine still
        (["--share", 0.3], 49 + 3 * 15),  # the gate that comes with msvit
        (["--gate", "disc", "--share", 0, "--size", 64], 4),
    ):
        out = tmp_path / "drawn"
        assert f": {tokens} of" in done("viz", image, *options, "--out", out)
        with Image.open(out / "0.tokens.png") as drawn:
            assert drawn.height > drawn.width == 640, "a square, and what it means below"
        shutil.rmtree(out)


def test_a_run_is_exported_with_its_classes_and_size(trained, tmp_path, monkeypatch):
    """What the file holds: tests/library/test_export.py."""
    asked = {}

    def write(model, out, **options):
        out.write_text("")
        asked.update(options, model=model)
        return [out]

    monkeypatch.setattr(export, "export", write)
    said = done("export", trained / "gated", "--out", tmp_path / "model.pt2", "--batch", "dynamic")
    assert "model.pt2: " in said
    assert (asked["batch"], asked["size"]) == ("dynamic", 64)
    assert asked["model"].classes == msvit.load(trained / "gated").classes


@pytest.mark.parametrize("call_number", [2, 4, 5])
def test_a_signal_while_handlers_are_set_or_put_back_ends_with_the_same_code(monkeypatch, call_number):
    """There are three: those for Ctrl-C, SIGTERM and SIGUSR1 are set one after the other, and put back so."""
    real, calls = signal.signal, []

    def setting(number, handler):
        calls.append(number)
        if len(calls) == call_number:
            signal.raise_signal(signal.SIGINT if call_number == 2 else signal.SIGTERM)
        return real(number, handler)

    monkeypatch.setattr(interrupts.signal, "signal", setting)
    with pytest.raises(typer.Exit) as ended:
        resumable("the same command goes on")(lambda: None)()
    assert ended.value.exit_code == RESUME_CODE
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        real(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.mark.parametrize("name", gate_names())
def test_every_known_name_gives_a_gate_for_the_cells_asked_for(name):
    gate = find_gate(name, coarse=16, share=0.5)
    assert gate.coarse == 16
    assert gate.eval()(torch.rand(1, 3, 64, 64)).mask.shape == (1, 4, 4)
    assert gate.config.get("share", 0.5) == 0.5


def test_a_saved_gate_keeps_its_own_cells_the_default_is_msvits_and_a_name_precedes_a_folder(tmp_path, monkeypatch):
    msvit.save_gate(msvit.DiscGate(coarse=24, share=0.7), tmp_path / "mine")
    gate = find_gate(str(tmp_path / "mine"))
    assert (gate.coarse, gate.config["share"]) == (24, 0.7)
    assert is_trained("default")
    assert find_gate("default").config == msvit.load_gate("default").config
    monkeypatch.chdir(tmp_path)
    for name in ("disc", "default"):
        (tmp_path / name).mkdir()
    assert isinstance(find_gate("disc"), msvit.DiscGate)
    assert isinstance(find_gate("default"), msvit.ContextGate)
    msvit.save_gate(msvit.DiscGate(coarse=8), "default")
    assert isinstance(find_gate("default"), msvit.DiscGate), "but a gate that was saved there is meant"
