"""A mistake on the command line is answered with a sentence and exit code 2, and nothing is written."""

import shlex
import shutil
from pathlib import Path

import pytest
from smoke_runs import write_images
from typer.testing import CliRunner

from msvit_lab.cli import app

TINY = " ".join(f"--set model.options.{text}" for text in ("patch_size=8", "embed_dim=32", "depth=2", "num_heads=2"))
BENCH = f"bench --model vit_tiny_patch16_224 --size 64 --rounds 4 --device cpu {TINY}"
CALIBRATE = "calibrate {gated} --images {photos} --out {tmp}/out"
DISTILL = "distill {gated} --images {photos} --steps 2 --out {tmp}/out"
EXPORT = "export {gated} --out {tmp}/out.onnx"
VIZ = "viz {photos}/ant/0.png --out {tmp}/out"

MISTAKES = [
    ("train scene --smoke", "unknown recipe 'scene'; did you mean scenes"),
    ("train scenes --smoke --out {tmp}/out --set optim.lr", "--set optim.lr has no value; write it as --set optim.lr="),
    ("train scenes --smoke --out {tmp}/out --no-such-option", "--no-such-option"),
    ("train scenes --smoke --out {tmp}/out --set model.options.num_classes=5", "8 classes, but the model's head has 5"),
    ("train scenes --smoke --force", "--force is for --resume"),
    ("train scenes --smoke --out {gated}", "holds a run already"),
    ("train pets --resume --out {gated}", "is a run of scenes, not of pets"),
    ("sweep scenes --out {tmp}/out --target a,b", "'a,b' is no list of numbers"),
    ("sweep scenes --out {tmp}/out --dense-sizes 50", "dense sizes [50] are no multiples of 8 px"),
    ("sweep scenes --out {tmp}/out --set optim.lrr=1", "did you mean optim.lr"),
    ("eval {tmp}/[bold]x[/bold]", "[bold]x[/bold] is no folder, so it is no run"),
    ("eval {dense} --reducer dynamicvit", "must be trained"),
    ("eval {dense} --rate 0.8", "no reducer"),
    ("eval {dense} --rounds 1", "must be 0 or at least 2"),
    ("eval {dense} --reducer fast", "known: none, evit"),
    ("report {tmp}/nothing --out {tmp}/out", "nothing"),
    ("viz {photos}/ant/0.png {photos}/bee/0.png --out {tmp}/out", "would both be drawn to"),
    (f"{VIZ} --gate learned", "has to be trained before it is drawn"),
    (f"{VIZ} --gate disk", "unknown gate 'disk'; known: default"),
    (f"{VIZ} --run {{tmp}}/nothing", "is no run"),
    (f"{VIZ} --run {{unfinished}}", "is not finished"),
    (f"{VIZ} --run {{gated}} --gate disc", "has its own gate"),
    ("predict no-run photo.jpg", "no-run is no folder; give a run of msvit train"),
    ("predict {gated}", "Missing argument"),
    ("predict {gated} https://a.b/c.jpg", "predict reads files, not URLs"),
    ("predict {gated} {gated}/evaluations", "has no images in it"),
    ("predict {gated}/evaluations photo.jpg", "pass a folder written by msvit.save"),
    ("predict {unfinished} photo.jpg", "is not finished"),
    (f"{CALIBRATE} --budget 0.01", "pass a number between them"),
    (f"{CALIBRATE} --budget 0.6 --size 60", "multiple of 16"),
    (f"{CALIBRATE} --budget 0.6 --pretrained", "leave out --weights and --pretrained"),
    (f"{DISTILL} --budget 0.01", "pass a number between them"),
    (f"{DISTILL} --budget 0.6 --images nowhere", "nowhere does not exist"),
    (f"{DISTILL} --budget 0.6 --set rate=3", "unknown setting of distill"),
    (f"{DISTILL} --budget 0.6 --num 1", "another held back"),
    ("export {gated}", "either --out NAME.onnx"),
    ("export {gated} --out a.onnx --web page", "either --out NAME.onnx"),
    ("export {gated} --out {tmp}/out.txt", "call it NAME.onnx or NAME.pt2"),
    (f"{EXPORT} --batch few", "batch is 'few'"),
    (f"{BENCH} --rows dense,fast", "unknown row 'fast'; known: dense, dense compiled, dense CUDA graphs, masked"),
    (f"{BENCH} --rows packed", "nothing to be compared with"),
    (f"{BENCH} --reducer pitome", "unknown reducer 'pitome'; known: evit, dynamicvit, tome"),
    (f"{BENCH} --suite a100", "unknown suite 'a100'; known: readme, cpu"),
    (f"{BENCH} --gate nowhere", "unknown gate 'nowhere'"),
    (f"{BENCH} --images nowhere", "nowhere does not exist; give --images"),
    (f"{BENCH} --batch 0", "--batch is 0, but both must be at least 1"),
    (f"{BENCH} --batch ''", "nothing to time"),
    (f"{BENCH} --batch 50", "scenes has 40 different images, but a batch of 50"),
    (f"{BENCH} --dtype int8", "--dtype is 'int8', but must be one of float32"),
    (f"{BENCH} --dtype float16 --train", "give --dtype bfloat16"),
    (f"{BENCH} --device tpu", "--device is 'tpu', but must be cuda or cpu"),
    (f"{BENCH} --device cuda", "torch finds no CUDA device here; leave it out, or give --device cpu"),
]


@pytest.fixture(scope="module")
def places(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    shutil.copytree(trained / "gated", folder / "unfinished", ignore=shutil.ignore_patterns("model"))
    write_images(folder / "photos", ("ant", "bee"), each=2)
    runs = {name: trained / name for name in ("gated", "dense")}
    return runs | {name: folder / name for name in ("unfinished", "photos")}


@pytest.mark.parametrize(("line", "words"), MISTAKES)
def test_a_mistake_is_a_sentence_and_nothing_is_written(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("msvit_lab.bench.images.NUM_SCENES", 40)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, shlex.split(line.format(**places, tmp=tmp_path)), terminal_width=400)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert words in result.output.replace("\n", "")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
