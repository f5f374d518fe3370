"""A mistake on the command line is answered with a sentence and exit code 2, and nothing is written."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from smoke_runs import files, refused, write_images

import msvit

TINY = " ".join(f"--set model.options.{text}" for text in ("patch_size=8", "embed_dim=32", "depth=2", "num_heads=2"))
BENCH = f"bench --model vit_tiny_patch16_224 --size 64 --rounds 4 --device cpu {TINY}"
CALIBRATE = "calibrate {gated} --images {photos} --out {tmp}/out"
DISTILL = "distill {gated} --images {photos} --steps 2 --out {tmp}/out"
SPEED_UP = "speed-up {gated} --images {photos} --out {tmp}/out"
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
    ("sweep scenes --smoke --out {tmp}/out --on ray", "pip install 'msvit[ray]'"),
    ("sweep pets", "--data is missing: give a folder with train/ and val/"),
    ("train pets --gate learned --gate-loss gbas", "--data is missing: give a folder with train/ and val/"),
    ("train voc", "images and label maps"),
    ("train voc --smoke --out {tmp}/out --set data.stride=65", "stride is 65, but windows of 64 px leave gaps"),
    ("train folder", "a folder of images for every class in it, or train/"),
    ("eval {tmp}/[bold]x[/bold]", "[bold]x[/bold] is no folder, so it is no run"),
    ("eval {dense} --reducer dynamicvit", "must be trained"),
    ("eval {dense} --rate 0.8", "no reducer"),
    ("eval {dense} --rounds 1", "must be 0 or at least 2"),
    ("eval {dense} --reducer fast", "known: none, evit"),
    ("report {tmp}/nothing --out {tmp}/out", "nothing"),
    ("viz {photos}/ant/0.png {photos}/bee/0.png --out {tmp}/out", "would both be drawn to"),
    (f"{VIZ} --gate learned", "has to be trained before it is drawn"),
    (f"{VIZ} --gate disk", "unknown gate 'disk'; known: default"),
    (f"{VIZ} --run {{tmp}}/nothing", "nothing is no folder; give a run of msvit train"),
    (f"{VIZ} --run {{gated}} --gate disc", "has its own gate"),
    (f"{VIZ} --run {{unfinished}}", "is not finished"),
    (f"{VIZ} --zoom 0", "Invalid value for '--zoom'"),
    ("viz {photos}/ant/0.png {photos}/ant/1.png --out {tmp}/y.png", "one file, but there are 2 images; give a folder"),
    ("viz {photos}/ant/0.png --out {tmp}/y.jpg", "written as PNG; call it"),
    ("viz https://x.org/a.jpg", "viz reads files, not URLs: download https://x.org/a.jpg first"),
    ("predict no-run photo.jpg", "no-run is no folder; give a run of msvit train"),
    ("predict {gated}", "Missing argument"),
    ("predict {gated} https://a.b/c.jpg", "predict reads files, not URLs"),
    ("predict {gated} {gated}/evaluations", "has no images in it"),
    ("predict {gated}/evaluations photo.jpg", "pass a folder written by msvit.save"),
    ("predict {unfinished} photo.jpg", "is not finished"),
    ("predict {gated} {photos} --overlay {tmp}/one.png", "must be a folder"),
    ("predict {gated} {photos} --out {tmp}/a.xls", "must end with one of .parquet, .csv, .jsonl; call it a.csv"),
    ("predict {gated} {photos} --out {empty}", "empty.csv, which is a folder; give a file in it"),
    ("predict {gated} {photos}/ant/0.png --out {tmp}/a.csv", "--out is for all images of one folder"),
    ("predict {gated} {photos} --out {tmp}/a.csv --overlay {tmp}/b", "with --out nothing is drawn"),
    ("predict {gated} {photos} --out {tmp}/a.parquet", "pip install 'pyarrow>=15', or call it a.csv or a.jsonl"),
    (f"{CALIBRATE} --budget 0.01", "pass a number between them"),
    (f"{CALIBRATE} --budget 0.6 --size 60", "multiple of 16"),
    (f"{CALIBRATE} --budget 0.6 --weights w.bin", "has weights of its own; leave out --weights"),
    ("calibrate {merged} --images {photos} --out {tmp}/out --budget 0.6", "for a model of speed_up call that again"),
    (f"{DISTILL} --budget 0.01", "pass a number between them"),
    (f"{DISTILL} --budget 0.6 --images nowhere", "nowhere does not exist"),
    (f"{DISTILL} --budget 0.6 --set rate=3", "unknown setting of distill"),
    (f"{DISTILL} --budget 0.6 --num 1", "another held back"),
    (f"{DISTILL} --budget 0.6 --num 0", "Invalid value for '--num'"),
    (f"{CALIBRATE} --budget 0.6 --num 0", "Invalid value for '--num'"),
    ("distill {gated} --images {photos} --budget 0.6 --out {gated}", "holds another run or model"),
    (f"{SPEED_UP} --budget 2", "budget is 2.0, but must be"),
    (f"{SPEED_UP} --budget 60", "pass 0.6 for 60 %"),
    (f"{SPEED_UP} --device tpu", "--device is 'tpu', but must be cuda or cpu"),
    ("speed-up {gated} --images {tmp}/nowhere --out {tmp}/out", "nowhere does not exist"),
    (f"{SPEED_UP} --weights w.bin", "has weights of its own"),
    ("speed-up {gated} --images {photos} --out {photos}/ant/0.png", "(File exists); choose another --out"),
    ("calibrate {gated} --images {photos} --budget 0.6 --out {photos}/ant/0.png", "choose another --out"),
    ("speed-up no_such_model --images {photos} --out {tmp}/out", "no_such_model"),
    ("export {gated}", "either --out NAME.onnx"),
    ("export {gated} --out a.onnx --web page", "either --out NAME.onnx"),
    ("export {gated} --out {tmp}/out.txt", "call it NAME.onnx or NAME.pt2"),
    (f"{EXPORT} --batch few", "batch is 'few'"),
    (f"{BENCH} --rows dense,fast", "unknown row 'fast'; known: dense, dense compiled, dense CUDA graphs, masked"),
    (f"{BENCH} --rows packed", "nothing to be compared with"),
    (f"{BENCH} --reducer pitome", "unknown reducer 'pitome'; known: evit, dynamicvit, tome"),
    (f"{BENCH} --suite a100", "unknown suite 'a100'; known: readme, cpu"),
    (f"{BENCH} --images nowhere", "nowhere does not exist; give --images"),
    (f"{BENCH} --batch 0", "--batch is 0, but both must be at least 1"),
    (f"{BENCH} --batch ''", "nothing to time"),
    (f"{BENCH} --batch 50", "scenes has 40 different images, but a batch of 50"),
    (f"{BENCH} --dtype int8", "--dtype is 'int8', but must be one of float32"),
    (f"{BENCH} --dtype float16 --train", "give --dtype bfloat16"),
    (f"{BENCH} --device tpu", "--device is 'tpu', but must be cuda or cpu"),
    ("bench {gated} --gate disc", "has a gate of its own"),
    ("bench --runs {gated} --batch 64", "has fewer validation images than a batch, 64; give a smaller --batch"),
    (f"{BENCH} --device cuda", "torch finds no CUDA device here; leave it out, or give --device cpu"),
]


@pytest.fixture(scope="module")
def places(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    shutil.copytree(trained / "gated", folder / "unfinished", ignore=shutil.ignore_patterns("model"))
    write_images(folder / "photos", ("ant", "bee"), each=2)
    (folder / "empty.csv").mkdir()
    model = msvit.load(trained / "dense").with_options(reducer=msvit.ToMe(r=2))
    msvit.save(model, folder / "merged")
    runs = {name: trained / name for name in ("gated", "dense")} | {"merged": folder / "merged"}
    return runs | {name: folder / name for name in ("unfinished", "photos")} | {"empty": folder / "empty.csv"}


@pytest.mark.parametrize(("line", "words"), MISTAKES)
def test_a_mistake_is_a_sentence_and_nothing_is_written(places, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("msvit_lab.bench.images.NUM_SCENES", 40)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("pyarrow", "pyarrow.parquet", "ray"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    before = files(places["gated"])
    assert words in refused(*shlex.split(line.format(**places, tmp=tmp_path))).replace("\n", "")
    assert files(places["gated"]) == before
    assert not files(tmp_path)
