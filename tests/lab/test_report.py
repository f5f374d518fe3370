"""The report: one page that needs nothing else, shows the numbers of the evaluation, and names what is missing."""

import json
import re
from base64 import b64decode
from html import unescape
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from golden import assert_golden
from PIL import Image
from safetensors.numpy import load_file, save_file

import msvit
from msvit.speed_report import wilson
from msvit_lab.config import override
from msvit_lab.evaluate import evaluate_run
from msvit_lab.evaluation_files import Samples
from msvit_lab.recipes import recipe
from msvit_lab.report import image_values, write_report
from msvit_lab.training.loop import train
from msvit_lab.viz import figures

VAL, SAMPLES = "evaluations/val.json", "evaluations/val.safetensors"
REST = ("metrics.jsonl", SAMPLES)
FILES = ("metrics.jsonl", VAL, SAMPLES)
NONE = "–"  # noqa: RUF001
GATE = {"loss": "gbas", "weight": 4, "target": 0.25}
CLASSES = ["ground", "cat <b>&", "dog", "never"]
SEGMENT: dict[str, Any] = {
    "task": "segment", "miou": 0.5123, "pixel_accuracy": 0.9345, "class_accuracy": 0.6789, "top1": 0.1234,
    "iou": [0.911, 0.222, 0.333, None], "class_coarse": [0.85, 0.15, 0.45, None],
    "class_frequency": [0.9, 0.07, 0.03, 0.0], "decoder_gmacs": 0.077, "fine_on_object": None, "fine_on_ground": None,
}  # fmt: skip


@pytest.fixture
def svg() -> None:
    """For tests that read figures."""


@pytest.fixture(autouse=True)
def _figures_are_not_drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib takes 0.2 s for each."""
    if "svg" not in request.fixturenames:
        monkeypatch.setattr(figures, "_plot", lambda figure, caption: figures.Plot("<svg></svg>", caption))


def speeds(dtype: str = "float32", batch: int = 8, **found: float) -> list[dict[str, Any]]:
    """Rows of measured time; `dense` is the host."""
    about = {"device": "cpu", "dtype": dtype, "batch": batch, "ms_per_image": 0.2, "quartiles": [0.1, 0.3]}
    dense = found.pop("dense")
    rows = [about | {"what": key, "images_per_second": v, "speed_up": v / dense} for key, v in found.items()]
    return [about | {"what": "dense host", "images_per_second": dense, "speed_up": None}, *rows]


def make_run(
    folder: Path, dense: bool = False, without: tuple[str, ...] = (), config: Any = None, **values: Any
) -> Path:
    """A run of 32 px images with cells of 16 px."""
    (folder / "evaluations").mkdir(parents=True)
    segment = values.get("task") == "segment"
    model = {"name": "tiny", "gate": "none" if dense else "learned", "coarse": 16, "mode": "packed"}
    settings = {"data": {"img_size": 32, "source": "scenes"}, "model": model, "gate": GATE, "seed": 0, **(config or {})}
    about = {"format": 3, "recipe": "scenes", "config": settings | ({"task": "segment"} if segment else {})}
    about |= {"versions": {"torch": "9.8.7"}, "machine": {"cores": 2}, "classes": values.pop("classes", CLASSES)}
    (folder / "config.json").write_text(json.dumps(about))
    lines: list[dict[str, Any]] = []
    for step in range(3):
        time = {"step": step, "epoch": step / 2}
        lines.append({"kind": "train", **time, "task": 1.0, "gate": 0.1, "accuracy": 0.5, "tokens": 13})
        lines.append({"kind": "eval", **time, "miou" if segment else "top1": 0.5, "tokens": 12})
        lines += [] if dense else [{"kind": "prior", **time, "theta": [[0, 1], [0.25, 0.5]]}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {
        "task": "classify", "top1": 0.8765, "top5": 0.9911, "num_images": 64, "img_size": 32, "dense": dense,
        "tokens": {"mean": 9.25, "std": 2.5, "dense": 16},
        "gmacs": {"mean": 0.31, "std": 0.01, "dense": 0.62}, "fine_share": 0.44,
        "mask_mean": [[0, 1], [0.5, 0.25]], "mask_var": [[0, 0], [0.25, 0.1875]],
        "fine_on_object": 0.771, "fine_on_ground": 0.123, "measured": {"at": "today"},
        "latency": speeds(dense=4321) if dense else speeds(dense=4000, packed=5678),
    }  # fmt: skip
    (folder / VAL).write_text(json.dumps({**result, **values}))
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    tensors = {"images": images, "masks": np.array([[[1, 0], [0, 0]]] * 3, dtype=np.uint8)}
    tensors |= {"labels": np.array([1, 2, 7]), "predictions": np.array([1, 1, 7])}
    if segment:  # a dog on ground, taken for a cat, beside pixels that are ignored
        label = np.zeros((3, 32, 32), np.uint8)
        label[:, 8:16, 8:16], label[:, :, 30:] = 2, 255
        tensors |= {"labels": label, "predictions": np.where(label == 2, 1, 0).astype(np.uint8)}
    write_samples(folder, tensors, about["classes"])
    for name in without:
        (folder / name).unlink()
    return folder


def write_samples(folder: Path, tensors: dict[str, np.ndarray], classes: Any = ()) -> None:
    save_file(tensors, folder / SAMPLES, metadata={"classes": json.dumps(classes), "coarse": "16", "fine": "8"})


def make_segmentation(folder: Path, *given: Any, **changes: Any) -> Path:
    return make_run(folder, *given, **(SEGMENT | changes))


def report(*runs: Path) -> str:
    """The page, whose tags are closed in their order, without the content of its pictures."""
    html = write_report(list(runs), runs[0].parent / "report.html").read_text(encoding="utf-8")
    html = re.sub(r"base64,[A-Za-z0-9+/=]+", "base64,", html).replace("\u00a0", " ")
    xml = re.sub(r"<(meta|link|br|img)\b([^>]*)>", r"<\1\2/>", html.removeprefix("<!doctype html>"))
    ElementTree.fromstring(xml.replace("<details open>", "<details>").replace("xlink:", ""))
    return html


def tables(html: str, kind: str = "summary") -> list[list[list[str]]]:
    found = []
    for text in re.findall(rf'<table class="{kind}">.*?</table>', html, re.DOTALL):
        rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"(?s)<tr>(.*?)</tr>", text)]
        found.append([[unescape(re.sub(r"<.*?>", "", cell)) for cell in row] for row in rows])
    return found


def lead(html: str) -> str:
    found = re.search(r"<header>(.*?)</header>", html, re.DOTALL)
    assert found
    return unescape(found[1])


def gaps(html: str) -> str:
    return unescape(" ".join(re.findall(r'class="missing">(.*?)</p>', html)))


def holds(text: str, *words: str) -> None:
    assert not [each for each in words if each not in text]


def test_the_page_needs_no_network_and_its_figures_have_captions_and_its_colour(tmp_path: Path, svg: None) -> None:
    html = report(make_run(tmp_path / "dense", dense=True), make_run(tmp_path / "gated"))
    for word in ("http", 'src="/', "<script", "@import", "url(/", "//cdn", "$", "{{", "{%", figures.INK):
        assert word not in html
    assert "currentColor" in html
    shown = re.findall(r"<figure>(.*?)</figure>", html, re.DOTALL)
    assert all(re.search(r"<figcaption>.{9,}</figcaption>", figure, re.DOTALL) for figure in shown)
    assert len(shown) == 3 + 1 + 1 + 3 + 2 * 3  # opening, costs, dense run, gated run, images
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', html))
    assert used <= set(re.findall(r'\bid="([^"]+)"', html))


def words(html: str) -> str:
    """What a reader sees, a line for each piece of text."""
    html = re.sub(r"(?s)<style>.*?</style>|<details>.*?</details>", "", html)
    pieces = (" ".join(unescape(piece).split()) for piece in re.split(r"<[^>]+>", html))
    return "".join(f"{piece}\n" for piece in pieces if piece)


@pytest.mark.parametrize(("make", "key"), [(make_run, "top1"), (make_segmentation, "miou")])
def test_the_page_of_a_sweep_reads_as_it_should(tmp_path: Path, make: Any, key: str) -> None:
    """Two dense sizes, a gate that is too poor and one that is chosen: numbers, sentences, table, images, classes."""
    small = make(tmp_path / "dense-16-s0", True, REST, gmacs={"mean": 0.2, "dense": 0.2}, img_size=16, **{key: 0.7})
    large = make(tmp_path / "dense-32-s0", True, REST, gmacs={"mean": 0.6, "dense": 0.6}, **{key: 0.9})
    other = {"gate": GATE | {"target": 0.1}}
    poor = make(tmp_path / "t0.1-w1-s0", False, REST, config=other, gmacs={"mean": 0.1, "dense": 0.62}, **{key: 0.5})
    good = make(tmp_path / "t0.25-w1-s0", **{key: 0.895})
    text = words(report(poor, small, large, good)).replace(f"msvit {msvit.__version__}", "msvit VERSION")
    assert_golden(f"report_{key}.txt", text)


def test_a_run_alone_says_how_to_get_a_dense_one_and_how_sure_its_score_is(tmp_path: Path) -> None:
    text = unescape(report(make_run(tmp_path / "one", top1=0.895)))
    assert text.count("train one, msvit train scenes --img-size 32 --gate none, and report on both") == 1
    assert text.count("95 % interval 79.6 to 94.9 %") == 2, "below the result, and of the run"
    many = unescape(report(make_run(tmp_path / "many", top1=0.895, num_images=1000)))
    assert "interval" not in many
    assert wilson(0.9, 10) == pytest.approx((0.596, 0.982), abs=5e-4), "as in tables of Wilson's interval"
    assert (wilson(1.0, 50)[1], f"{wilson(0.0, 40)[0]:.1%}") == (pytest.approx(1), "0.0%")


def test_the_first_images_of_the_page_are_typical_ones() -> None:
    masks = np.zeros((9, 2, 2), np.uint8)
    masks[:3] = 1
    masks[3:, 0, 0] = 1
    images, labels = np.zeros((9, 8, 8, 3), np.uint8), np.zeros(9, int)
    samples = Samples(images, masks, labels, labels, fine=2, coarse=4, classes=["a"])
    values = image_values(samples)
    assert [each["num_tokens"] for each in values["opening"]] == [7] * 6
    assert [each["num_tokens"] for each in values["shown"]] == [16] * 3 + [7] * 6


def test_speeds_of_different_evaluations_are_not_compared(tmp_path: Path) -> None:
    """A dense run that was timed on a machine ten times as fast changes nothing."""
    runs = make_run(tmp_path / "dense", True, REST), make_run(tmp_path / "gated", False, REST)
    html, fast = report(*runs), report(make_run(tmp_path / "x/dense", True, REST, latency=speeds(dense=43210)), runs[1])
    assert (tables(fast), lead(fast)) == (tables(html), lead(html))
    assert "runs 1.42 times as fast at batch 8" in lead(html)
    host, own = speeds(dense=200, packed=300)
    for name, rows, words in (
        ("paired", [host, own | {"speed_up": 1.6}], "runs 1.60 times as fast at batch 8"),  # of neighbours in time
        ("slow", speeds(dense=10, packed=5, batch=1), ", but is slower: 0.50 times the speed at batch 1"),
        ("alone", [host], "of the dense model's multiply-adds.<"),
    ):
        assert words in lead(report(make_run(tmp_path / name, False, REST, latency=rows)))


def test_runs_of_several_seeds_are_means_in_the_sentence_and_rows_in_the_table(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"t0.25-w1-s{i}", False, REST, {"seed": i}, top1=0.8 + i / 10) for i in range(2)]
    html = report(*runs)
    holds(lead(html), "answers 85.0 % right with", "Means over 2 seeds.")
    assert [row[0] for row in tables(html)[0][1:]] == ["gate 0.25, seed 0", "gate 0.25, seed 1"]


def test_the_sentence_is_about_a_trained_gate_and_compares_one_that_is_not(tmp_path: Path) -> None:
    gated, disc = {"gmacs": {"mean": 0.32, "dense": 0.62}}, {"model": {"name": "tiny", "gate": "disc", "coarse": 16}}
    runs = make_run(tmp_path / "dense", True, REST), make_run(tmp_path / "t0.3-w1-s0", False, REST, **gated)
    html = report(*runs, make_run(tmp_path / "disc-0.4-s0", False, REST, disc, top1=0.87))
    words = "A gate that was not trained (disc 0.4) answers 87.0 % right at 0.31 GMACs."
    holds(lead(html), "The mixed-scale model answers 87.6 % right", words)
    assert "The mixed-scale model answers 87.0 % right" in lead(report(tmp_path / "disc-0.4-s0")), "if it is all"


def test_the_task_is_that_of_the_evaluation_or_of_the_configuration(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first, second = tables(report(run, make_segmentation(tmp_path / "begun", without=FILES)))
    assert first[0][2:4] == ["top-1", "top-5"]
    assert second[0][2] == "mIoU"  # nothing but its configuration says so
    assert len(first) == len(second) == 2, "runs of both tasks share no table"
    wrong = gaps(report(make_run(tmp_path / "wrong", task="pose")))
    assert "evaluations/val.json is of task 'pose', but known are classify and segment" in wrong
    (run / "evaluations/val.json").write_text("[]")
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write("null\n")
    holds(gaps(report(run)), "evaluations/val.json is of task None", "One line of metrics.jsonl could not be read")


def test_names_from_files_are_escaped(tmp_path: Path, svg: None) -> None:
    hostile: dict[str, Any] = {"measured": {"at": "<i>"}, "machine": "<script>", "versions": {"<i>": 1}}
    hostile |= {"latency": [row | {"what": "<i>packed"} for row in speeds(dense=2, packed=3)]}
    names = "<i>a&b", "_$x$"
    html = report(*(make_run(tmp_path / name, without=REST[:1], **(hostile if "<" in name else {})) for name in names))
    assert "<i>" not in html
    assert "<script>" not in html
    assert "cat <b>" not in html
    holds(
        html, "&lt;i&gt;a&amp;b", "label <b>cat &lt;b&gt;&amp;</b><br>predicted cat &lt;b&gt;&amp;: <b>right</b>",
        "label <b>dog</b><br>predicted cat &lt;b&gt;&amp;: <b>wrong</b>", "<b>class 7</b>",
    )  # fmt: skip
    assert len(re.findall(r">\s*_\$x\$<", html)) >= 3  # table, heading, legend: a name is no formula


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_cut_in_the_middle_is_said_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    path = make_run(tmp_path / "run") / name
    path.write_bytes(path.read_bytes()[:-20])
    html = report(tmp_path / "run")
    assert re.search(rf"{name}[^<]* could not be read|{name} is not readable", gaps(html))
    holds(html, "Over training", "Configuration")
    path.unlink()
    html = report(tmp_path / "run")
    assert f"There is no {name}" in gaps(html)
    holds(html, "&#34;seed&#34;: 0", "9.8.7")


def test_a_run_that_only_began_is_a_run(tmp_path: Path) -> None:
    html = report(make_run(tmp_path / "run", without=FILES))
    holds(gaps(html), *(f"There is no {name}" for name in FILES))
    holds(html, "&#34;seed&#34;: 0", "9.8.7")
    assert "No top-1 yet: of 1 run(s), none has one." in lead(html)
    assert "<figure" not in html


def test_what_an_evaluation_did_not_measure_is_a_sentence_or_a_dash(tmp_path: Path) -> None:
    html = report(make_segmentation(tmp_path / "run", miou=None, latency=[]))
    holds(gaps(html), "No time was measured", "No run has both mIoU and GMACs")
    assert dict(zip(*tables(html)[0], strict=True))["mIoU"] == NONE


def test_samples_that_do_not_fit_their_images_are_said(tmp_path: Path) -> None:
    run = make_segmentation(tmp_path / "run")
    good, small = load_file(run / SAMPLES), np.zeros((3, 8, 8), np.uint8)
    for change, words in (
        ({"masks": np.zeros((3, 3, 3), np.uint8)}, "masks: masks are (3, 3) cells of 16px, but images are 32x32px"),
        ({"masks": np.full((3, 2, 2), 7, np.uint8)}, "with their masks: mask has 7 in it"),
        ({"labels": small, "predictions": small}, "labels are (3, 8, 8) and predictions (3, 8, 8), but must both be"),
        ({"labels": np.full((3, 32, 32), 300)}, "with classes 0 to 255, got (256, 256) with 300 to 300"),
    ):
        write_samples(run, good | change)
        assert words in gaps(report(run))


def test_a_folder_that_is_no_run_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "report.html"
    for name in ("empty", "foreign"):
        (tmp_path / name).mkdir()
    (tmp_path / "foreign/config.json").write_text('{"architecture": "vit"}')
    for name, path, words in (
        ("empty", out, "empty has no config.json.*metrics.jsonl"), ("gone", out, "gone is no folder.*metrics.jsonl"),
        ("foreign", out, "format None.*format 3"), ("run", tmp_path, r"is a folder.*report\.html"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            write_report([run, tmp_path / name], path)
    assert not out.exists()


def test_runs_of_one_name_are_told_apart_and_the_page_is_the_same_every_time(tmp_path: Path, svg: None) -> None:
    runs = [make_run(tmp_path / "a" / "run", without=FILES), make_run(tmp_path / "b" / "run", without=(VAL,))]
    html = report(*runs, runs[0])
    assert [row[0] for row in tables(html)[0][1:]] == ["a/run", "b/run"]
    assert report(*runs) == html


def test_a_real_segmentation_run_is_shown_without_a_gap(tmp_path: Path) -> None:
    changes = {"model.gate": "disc", "data.num_train": "16", "data.num_val": "4", "optim.epochs": "1"}
    run = train(override(recipe("voc", smoke=True), changes), tmp_path / "run", recipe="voc", quiet=True)
    evaluate_run(run, rounds=2)
    html = report(run)
    assert re.findall(r'class="missing">(.*?),', html) == ["This run learned no priors"]
    found = json.loads((run / VAL).read_text())
    assert dict(zip(*tables(html)[0], strict=True))["mIoU"] == f"{100 * found['miou']:.1f} %"
    assert html.count('<div class="row">') == 4
    assert "top-1" not in html


def test_a_row_is_image_mask_prediction_and_ground_truth_with_its_classes(tmp_path: Path) -> None:
    run = make_segmentation(tmp_path / "run")
    html = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    rows = re.findall(r'<li><figure><div class="row">(.*?)</figure></li>', html, re.DOTALL)
    assert len(rows) == 3
    assert re.findall(r"<div><span>(.*?)</span>", rows[0]) == ["image", "mask", "prediction", "ground truth"]
    pictures = [b64decode(data) for data in re.findall(r'base64,([^"]+)"', rows[0])]
    seen = [np.asarray(Image.open(BytesIO(data)).convert("RGB")) for data in pictures]
    plain, _, prediction, truth = (picture[4::8, 4::8] for picture in seen)  # enlarged 8 times
    assert np.abs(plain.astype(int) - load_file(run / SAMPLES)["images"][0]).mean() < 30  # WebP is not exact
    assert (prediction[12, 12] == (128, 0, 0)).all()
    assert (truth[12, 12] == (0, 128, 0)).all()
    assert (prediction[0] == 0).all(), "ground is black, also where the truth is ignored"
    assert truth[:, 30:].min() > 150 > 0 == truth[:, :8].max()
    legend = re.findall(r'style="background:(.*?)"></i>(.*?)</span>', rows[0])
    assert [name for _, name in legend] == ["ground", "cat &lt;b&gt;&amp;", "dog", "ignored"]
    assert [colour for colour, _ in legend][:3] == ["#000000", "#800000", "#008000"]
    assert "<b>7 tokens</b>, 93\u00a0% of\n960 labelled pixels right" in rows[0]  # 4 cells, 1 fine; 64 px of 960 wrong
