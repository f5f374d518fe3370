"""The report: one page that needs nothing else, says what the evaluation says, and says what is missing."""

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from html import unescape
from html.parser import HTMLParser
from inspect import isfunction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from msvit.lab.cli.app import console
from msvit.lab.cli.tables import show_runs
from msvit.lab.config import override
from msvit.lab.evaluate import evaluate_run
from msvit.lab.recipes import recipe
from msvit.lab.report import write_report
from msvit.lab.runs import METRICS, read_runs
from msvit.lab.training.loop import train
from msvit.lab.viz import Point, accuracy_against_gmacs, figures
from msvit.lab.viz.compare import labels

VOID = {"meta", "link", "br", "img"}
VAL, SAMPLES = "evaluations/val.json", "evaluations/val.safetensors"
REST = ("metrics.jsonl", SAMPLES)
FILES = ("metrics.jsonl", VAL, SAMPLES)


@pytest.fixture(scope="module", autouse=True)
def _each_figure_is_drawn_once() -> Iterator[None]:
    """Pages of these tests show the same few figures over and over, and matplotlib takes 0.2 s for each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, draw in list(vars(figures).items()):
            if isfunction(draw) and not name.startswith("_"):
                patch.setattr(figures, name, remembered(draw))
        yield


def remembered(draw: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, kwargs))
        if key not in known:
            known[key] = draw(*args, **kwargs)
        return known[key]

    return call


def make_run(
    folder: Path,
    dense: bool = False,
    without: tuple[str, ...] = (),
    config: dict[str, Any] | None = None,
    **values: Any,
) -> Path:
    """A run of 32 px images with cells of 16 px."""
    folder.mkdir(parents=True)
    model = {"name": "tiny", "gate": "none" if dense else "learned", "coarse": 16, "mode": "packed"}
    gate = {"loss": "gbas", "weight": 4, "target": 0.25}
    settings = {"data": {"img_size": 32, "source": "scenes"}, "model": model, "gate": gate, "seed": 0, **(config or {})}
    about = {"format": 1, "recipe": "scenes", "config": settings}
    about |= {"versions": {"torch": "9.8.7"}, "machine": {"cores": 2}}
    (folder / "config.json").write_text(json.dumps(about))
    lines: list[dict[str, Any]] = []
    for step in range(3):
        time = {"step": step, "epoch": step / 2}
        lines.append({"kind": "train", **time, "task": 1.0, "gate": 0.1, "accuracy": 0.5, "tokens": 13})
        lines.append({"kind": "eval", **time, "top1": 0.5, "top5": 0.9, "tokens": 12})
        lines += [] if dense else [{"kind": "prior", **time, "theta": [[0, 1], [0.25, 0.5]]}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    speeds = [("dense host", 4321)] if dense else [("dense host", 4000), ("trimmed", 5000), ("packed", 5678)]
    latency = [
        {"device": "cpu", "dtype": "float32", "batch": 8, "what": what, "ms_per_image": 1e3 / speed,
         "quartiles": [0.1, 0.3], "images_per_second": speed} for what, speed in speeds
    ]  # fmt: skip
    result = {
        "top1": 0.8765, "top5": 0.9911, "num_images": 64, "img_size": 32, "dense": dense,
        "tokens": {"mean": 9.25, "std": 2.5, "dense": 16, "histogram": {"edges": [4, 8, 16], "counts": [40, 24]}},
        "gmacs": {"mean": 0.31, "std": 0.01, "dense": 0.62}, "fine_share": 0.44,
        "mask_mean": [[0, 1], [0.5, 0.25]], "mask_var": [[0, 0], [0.25, 0.1875]],
        "fine_on_object": 0.771, "fine_on_ground": 0.123, "latency": latency,
    }  # fmt: skip
    (folder / "evaluations").mkdir()
    (folder / VAL).write_text(json.dumps({**result, **values}))
    numbers = np.random.default_rng(0)
    tensors = {
        "images": numbers.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8),
        "masks": np.array([[[1, 0], [0, 0]]] * 3, dtype=np.uint8),
        "labels": np.array([0, 1, 7]),
        "predictions": np.array([0, 0, 7]),
    }
    names = json.dumps(["cat <b>&", "dog"])
    save_file(tensors, folder / SAMPLES, metadata={"classes": names, "coarse": "16", "fine": "8"})
    for name in without:
        (folder / name).unlink()
    return folder


CLASSES = ["ground", "cat <b>&", "dog", "never"]
SCORES: dict[str, Any] = {
    "task": "segment", "miou": 0.5123, "pixel_accuracy": 0.9345, "class_accuracy": 0.6789, "top1": 0.1234,
    "iou": [0.911, 0.222, 0.333, None], "class_coarse": [0.85, 0.15, 0.45, None],
    "class_frequency": [0.9, 0.07, 0.03, 0.0], "decoder_gmacs": 0.077, "fine_on_object": None, "fine_on_ground": None,
}  # fmt: skip


def make_segmentation(
    folder: Path, dense: bool = False, without: tuple[str, ...] = (), classes: list[str] = CLASSES, **changes: Any
) -> Path:
    """The same with label maps: a dog on ground, taken for a cat, beside pixels that are ignored."""
    make_run(folder, dense, **(SCORES | changes))
    about = json.loads((folder / "config.json").read_text())
    about["config"]["task"] = "segment"
    (folder / "config.json").write_text(json.dumps({**about, "classes": classes}))
    lines = (folder / "metrics.jsonl").read_text().replace('"top1": 0.5', '"miou": 0.5')
    (folder / "metrics.jsonl").write_text(lines)
    labels = np.zeros((3, 32, 32), np.uint8)
    labels[:, 8:16, 8:16] = 2
    predictions = np.where(labels == 2, 1, labels).astype(np.uint8)
    labels[:, :, 30:] = 255
    tensors = {**load_file(folder / SAMPLES), "labels": labels, "predictions": predictions}
    about = {"classes": json.dumps(classes), "coarse": "16", "fine": "8"}
    save_file(tensors, folder / SAMPLES, metadata=about)
    for name in without:
        (folder / name).unlink()
    return folder


def report(*runs: Path) -> str:
    html = write_report(list(runs), runs[0].parent / "report.html").read_text(encoding="utf-8")
    return re.sub(r"base64,[A-Za-z0-9+/=\s]+", "base64,", html)  # in pictures any letters may follow each other


def tables(html: str, kind: str = "summary") -> list[list[list[str]]]:
    found = []
    for text in re.findall(rf'<table class="{kind}">.*?</table>', html, re.DOTALL):
        cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
        found.append([[unescape(re.sub(r"<.*?>", "", cell)).replace("\u00a0", " ") for cell in row] for row in cells])
    return found


def table(html: str) -> list[list[str]]:
    return tables(html)[0]


class Balance(HTMLParser):
    """Every tag closed in its order, and the figures counted."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.num_figures = 0
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num_figures += tag == "figure"
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    html = report(make_run(tmp_path / "dense", dense=True), make_run(tmp_path / "gated"))
    for word in ("http", 'src="/', "<script", "@import", "url(/", "//cdn", "$"):
        assert word not in html
    figures_ = re.findall(r"<figure>(.*?)</figure>", html, re.DOTALL)
    assert all(re.search(r"<figcaption>.{9,}</figcaption>", figure, re.DOTALL) for figure in figures_)
    num = 3 + 2 + 1 + 4 + 2 * 3  # opening, costs, dense run, gated run, images
    assert Balance(html).num_figures == len(figures_) == num
    ids = re.findall(r'\bid="([^"]+)"', html)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', html))
    assert used <= set(ids)


def test_the_numbers_in_the_table_are_those_of_the_evaluation(tmp_path: Path) -> None:
    dense = make_run(tmp_path / "dense", True, REST, gmacs={"mean": 0.62, "dense": 0.62}, fine_on_object=None)
    small = make_run(tmp_path / "small", True, REST, gmacs={"mean": 0.2, "dense": 0.2}, img_size=16)
    head, first, second, third = table(report(dense, small, make_run(tmp_path / "gated", False, REST)))
    assert dict(zip(head, third, strict=True)) == {
        "run": "gate 0.25", "input px": "32", "top-1": "87.6 %", "top-5": "99.1 %",
        "tokens": "9.2 ± 2.5 of 16", "GMACs": "0.31", "of dense": "50 %",
        "images/s at batch 8": "1.42x (5,678, dense 4,000)", "fine on object": "77.1 %", "fine on ground": "12.3 %",
    }  # fmt: skip
    assert (first[0], first[6], first[8]) == ("dense 32 px", "100 %", "–")  # noqa: RUF001
    assert (second[0], second[6]) == ("dense 16 px", "32 % of 32 px")


def test_speeds_of_different_evaluations_are_not_compared(tmp_path: Path) -> None:
    """A dense run that was timed on a machine ten times as fast changes nothing."""
    row = {"device": "cpu", "dtype": "float32", "batch": 8, "what": "dense host", "images_per_second": 43210}
    runs = make_run(tmp_path / "dense", True, REST), make_run(tmp_path / "gated", False, REST)
    html = report(*runs)
    fast = report(make_run(tmp_path / "x/dense", True, REST, latency=[row]), runs[1])
    assert table(fast) == table(html)
    assert lead(fast) == lead(html)
    assert "runs 1.42 times as fast at batch 8" in lead(html)
    paired = {"batch": 8, "device": "cpu", "dtype": "float32"}
    rows = [paired | {"what": "packed", "images_per_second": 300, "speed_up": 1.6}]
    rows.append(paired | {"what": "dense host", "images_per_second": 200})
    own = report(make_run(tmp_path / "paired", False, REST, latency=rows))
    assert "runs 1.60 times as fast at batch 8" in lead(own), "the ratios of neighbours in time, not of medians"
    alone = report(make_run(tmp_path / "alone", False, REST, latency=rows[:1]))
    assert "times as fast" not in lead(alone)


def lead(html: str) -> str:
    found = re.search(r"<header>(.*?)</header>", html, re.DOTALL)
    assert found
    return unescape(re.sub(r"<img.*?>", "", found[1])).replace("\u00a0", " ")


def test_the_result_is_one_sentence_at_the_top_and_images_with_their_tokens_follow(tmp_path: Path) -> None:
    small = make_run(tmp_path / "small", True, REST, gmacs={"mean": 0.2, "dense": 0.2}, img_size=16, top1=0.7)
    large = make_run(tmp_path / "large", True, REST, gmacs={"mean": 0.6, "dense": 0.6}, top1=0.9)
    other = {"gate": {"loss": "gbas", "weight": 4, "target": 0.1}}
    poor = make_run(tmp_path / "poor", False, REST, other, top1=0.5, gmacs={"mean": 0.1, "dense": 0.62})
    good = make_run(tmp_path / "good", False, ("metrics.jsonl",), top1=0.895)
    html = report(poor, small, large, good)
    words = lead(html)
    assert (
        '<p class="answer">The mixed-scale model (gate 0.25) answers 89.5 % right (dense 90.0 %) with 50 % of the '
        "dense model's multiply-adds and runs 1.42 times as fast at batch 8.</p>"
    ) in words
    assert "The cheapest of 2 settings that is at most 1.5 points below dense." in words
    assert "give 75.5 % for as many multiply-adds: this one 14.0 points more" in words  # 0.7 + (0.31 - 0.2) / 0.4 * 0.2
    assert words.count("<b>7 tokens</b> instead of 16") == 3
    assert "large square: 1 token<" in words
    assert "4 small squares: 4 tokens" in words
    assert html.index('class="opening"') < html.index("<table") < html.index("<svg")
    assert "<title>Mixed-scale tokens, recipe scenes: 4 runs</title>" in html
    worse = report(poor, large)
    assert "answers 50.0 % right (dense 90.0 %) with 16 % of" in lead(worse)
    row = {"device": "c", "dtype": "f", "batch": 1}
    slow = [row | {"what": what, "images_per_second": speed} for what, speed in (("packed", 5), ("dense host", 10))]
    assert ", but is slower: 0.50 times the speed at batch 1" in lead(report(make_run(tmp_path / "s", latency=slow)))


def test_where_no_dense_run_is_cheaper_the_nearest_is_named(tmp_path: Path) -> None:
    large = make_run(tmp_path / "large", True, REST, gmacs={"mean": 0.6, "dense": 0.6}, top1=0.9)
    small = make_run(tmp_path / "small", True, REST, gmacs={"mean": 0.4, "dense": 0.4}, img_size=16, top1=0.8)
    gated = make_run(tmp_path / "gated", False, REST)
    words = lead(report(large, small, gated))
    assert "A dense model at 16 px answers 80.0 % right with 67 % of the multiply-adds." in words
    assert "dense model at" not in lead(report(large, gated))


def test_seeds_are_means_in_the_sentence_and_rows_in_the_table(tmp_path: Path) -> None:
    found = enumerate((0.8, 0.9))
    runs = [make_run(tmp_path / f"s{seed}", False, REST, {"seed": seed}, top1=top1) for seed, top1 in found]
    html = report(*runs)
    assert "answers 85.0 % right with" in lead(html)
    assert "Means over 2 seeds." in lead(html)
    assert [row[0] for row in table(html)[1:]] == ["gate 0.25, seed 0", "gate 0.25, seed 1"]


def test_runs_have_names_for_readers(tmp_path: Path) -> None:
    gate = {"loss": "gbas", "weight": 4, "target": 0.65}
    changes: list[dict[str, Any]] = [
        {}, {"gate": gate}, {"gate": gate | {"weight": 20.0}},
        {"gate": gate | {"target": 0.3}, "reducer": {"name": "dynamicvit", "rate": 0.7}},
        {"model": {"gate": "none"}, "reducer": {"name": "tome", "rate": None, "r": 8}},
        {"model": {"gate": "disc", "share": 0.3}}, {"model": {"gate": "context"}},
    ]  # fmt: skip
    runs = read_runs([make_run(tmp_path / f"r{i}", False, REST, config) for i, config in enumerate(changes)])
    assert list(labels(runs).values()) == [
        "gate 0.25", "gate 0.65, weight 4", "gate 0.65, weight 20", "gate 0.3 + DynamicViT 0.7",
        "dense 32 px + ToMe r8", "disc 0.3", "context gate 0.25",
    ]  # fmt: skip


def test_other_evaluations_are_listed_beside_the_runs_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", False, REST)
    html = report(run)
    more = json.loads((run / VAL).read_text()) | {"top1": 0.1234, "data": "<i>flowers"}
    (run / "evaluations/data-flowers.json").write_text(json.dumps(more))
    shown = report(run)
    assert tables(shown, "plain")[-1][1:] == [["data-flowers", "<i>flowers", "12.3 %", "9.25", "0.31"]]
    assert lead(shown) == lead(html)
    assert table(shown) == table(html)


def test_a_run_of_the_time_before_names_reads_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    html = report(run)
    (run / VAL).rename(run / "eval.json")
    (run / SAMPLES).rename(run / "samples.safetensors")
    assert report(run) == html


def test_a_loss_of_one_step_is_not_blank() -> None:
    line = {"kind": "train", "step": 1, "epoch": 0.5, "task": 1.0}
    many = [line | {"step": step, "epoch": step / 2} for step in range(100)]
    assert marks(figures.training_curves([line], [], METRICS["classify"]).svg) > marks(
        figures.training_curves(many, [], METRICS["classify"]).svg
    )


def marks(svg: str) -> int:
    """Markers drawn, without the ticks of axes."""
    return len(re.findall(r'<use [^>]*style="fill: #0072b2', svg))


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    html = report(make_run(tmp_path / "<i>a&b", machine="<script>"), make_run(tmp_path / "_$x$"))
    assert "<i>" not in html
    assert "<script>" not in html
    assert "&lt;i&gt;a&amp;b" in html
    assert "cat <b>" not in html
    assert "label <b>cat &lt;b&gt;&amp;</b><br>predicted cat &lt;b&gt;&amp;: <b>right</b>" in html
    assert "label <b>dog</b><br>predicted cat &lt;b&gt;&amp;: <b>wrong</b>" in html
    assert "<b>class 7</b>" in html
    assert len(re.findall(r">\s*gate 0.25 \(_\$x\$\)<", html)) >= 3  # table, heading, legend: a name is no formula


@pytest.mark.parametrize("name", FILES)
def test_what_is_missing_is_said_in_its_place(tmp_path: Path, name: str) -> None:
    html = report(make_run(tmp_path / "run", without=(name,)))
    assert f"There is no {name}" in html
    Balance(html)


def test_a_run_that_only_began_is_a_run(tmp_path: Path) -> None:
    html = report(make_run(tmp_path / "run", without=FILES))
    assert "No top-1 yet" in html
    assert all(f"There is no {name}" in html for name in FILES)
    assert "<figure" not in html
    assert "&quot;seed&quot;: 0" in html
    assert "9.8.7" in html


def test_an_evaluation_with_holes_and_nans_gives_dashes(tmp_path: Path) -> None:
    nan = float("nan")
    holes: dict[str, Any] = {"top1": nan, "tokens": None, "gmacs": {"mean": "?"}, "latency": [{"what": "packed"}]}
    html = report(make_run(tmp_path / "run", **holes, mask_mean=[[1, nan]], img_size=None))
    assert table(html)[1][1:8] == ["32", "–", "99.1 %", "–", "–", "–", "77.1 %"]  # noqa: RUF001
    assert "There is no mean and variance" in html
    assert "There is no histogram" in html
    assert "No time was measured" in html


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_in_the_middle_is_said_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    path = make_run(tmp_path / "run") / name
    path.write_bytes(path.read_bytes()[:-20])
    html = report(tmp_path / "run")
    assert re.search(rf'class="missing">[^<]*{name}[^<]* could not be read|{name} is not readable', html)
    assert "Over training" in html
    assert "Configuration" in html


def test_masks_that_do_not_fit_their_images_are_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    tensors = {"images": np.zeros((1, 32, 32, 3), np.uint8), "masks": np.zeros((1, 3, 3), np.uint8)}
    answers = {"labels": np.zeros(1, np.int64), "predictions": np.zeros(1, np.int64)}
    save_file(tensors | answers, run / SAMPLES, metadata={"coarse": "16", "fine": "8"})
    assert "cannot be shown with their masks: mask is (3, 3)" in report(run)


def test_a_folder_that_is_no_run_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    run, other, out = make_run(tmp_path / "run"), tmp_path / "other", tmp_path / "report.html"
    other.mkdir()
    for folder, words in ((other, "other has no config.json"), (tmp_path / "gone", "gone is no folder")):
        with pytest.raises(ValueError, match=rf"{words}.*metrics.jsonl"):
            write_report([run, folder], out)
    (other / "config.json").write_text('{"architecture": "vit"}')
    with pytest.raises(ValueError, match=r"format None.*format 1"):
        write_report([other], out)
    with pytest.raises(ValueError, match="0 runs"):
        write_report([], out)
    with pytest.raises(ValueError, match=r"is a folder.*report\.html"):
        write_report([run], tmp_path)
    assert not out.exists()


def test_runs_of_one_name_are_told_apart_and_the_page_is_the_same_every_time(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a" / "run", without=FILES), make_run(tmp_path / "b" / "run", without=(VAL,))]
    html = report(*runs, runs[0])
    assert [row[0] for row in table(html)[1:]] == ["gate 0.25 (a/run)", "gate 0.25 (b/run)"]
    assert report(*runs) == html


def test_a_figure_takes_the_colour_of_the_page(tmp_path: Path) -> None:
    plot = figures.token_histogram([0.0, 1.0, 2.0], [3.0, 4.0], num_dense=2)
    assert "currentColor" in plot.svg
    assert figures.INK not in plot.svg
    assert "7 images" in plot.caption
    with pytest.raises(ValueError, match="2 edges for 2 counts"):
        figures.token_histogram([0.0, 1.0], [3.0, 4.0])


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A segmentation run as training and evaluation leave it."""
    folder = tmp_path_factory.mktemp("runs") / "segmented"
    changes = {"model.gate": "disc", "data.num_train": "16", "data.num_val": "4", "optim.epochs": "1"}
    train(override(recipe("voc", smoke=True), changes), folder, recipe="voc", quiet=True)
    evaluate_run(folder, rounds=2)
    return folder


def test_a_real_segmentation_run_is_shown_without_a_gap(segmented: Path) -> None:
    html = report(segmented)
    found = json.loads((segmented / VAL).read_text())
    gaps = re.findall(r'class="missing">(.*?)</p>', html)
    assert [gap for gap in gaps if "No dense run" not in gap and "learned no priors" not in gap] == []
    assert dict(zip(*table(html), strict=True))["mIoU"] == f"{100 * found['miou']:.1f} %"
    assert len(re.findall(r'<div class="row">(?:<div><span>[^<]*</span><img [^>]*></div>){4}</div>', html)) == 4
    assert "Classes most and least often coarse, of" in html
    assert "top-1" not in html
    Balance(html)


def test_a_segmentation_run_is_judged_by_miou_everywhere(tmp_path: Path) -> None:
    small = make_segmentation(tmp_path / "small", True, REST, gmacs={"mean": 0.2, "dense": 0.2}, miou=0.4)
    large = make_segmentation(tmp_path / "large", True, REST, gmacs={"mean": 0.6, "dense": 0.6}, miou=0.6)
    html = report(small, large, make_segmentation(tmp_path / "gated")).replace("\u00a0", " ")
    assert dict(zip(*table(html)[::3], strict=True)) == {
        "run": "gate 0.25", "input px": "32", "mIoU": "51.2 %",
        "pixel accuracy": "93.5 %", "mean class accuracy": "67.9 %", "tokens": "9.2 ± 2.5 of 16", "GMACs": "0.31",
        "of dense": "50 %", "windows/s at batch 8": "1.42x (5,678, dense 4,000)",
    }  # fmt: skip
    assert "Here of gate and encoder; the decoder comes on top." in html
    assert "The mixed-scale model reaches 51.2 % mIoU (dense 60.0 %) with 50 % of the dense model's" in lead(html)
    assert "give 45.5 % for as many multiply-adds: this one 5.7 points more" in html  # 0.4 + (0.31 - 0.2) / 0.4 * 0.2
    assert "51.2 % mIoU on 64 images" in html
    assert html.count(">mIoU (%)</text>") == 2
    assert ">evaluation, mIoU</text>" in html
    for word in ("top-1", "12.3 %", "images/s", "per image"):
        assert word not in html


def test_runs_of_both_tasks_share_no_table_and_no_curve(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "label"), make_segmentation(tmp_path / "map"), make_run(tmp_path / "other")]
    html = report(*runs)
    first, second = tables(html)
    assert [row[0] for row in first] == ["run", "gate 0.25 (label)", "gate 0.25 (other)"]
    assert [row[0] for row in second] == ["run", "gate 0.25 (map)"]
    assert "mIoU" not in first[0]
    assert "top-1" not in second[0]
    assert re.findall(r'<p class="answer">.*? (answers|reaches) ', html) == ["answers", "reaches"]
    links = dict(re.findall(r'<a href="#(run-\d)">([^<]+)</a>', html))
    assert len(links) == 3
    assert links == dict(re.findall(r'<section id="(run-\d)">\s*<h2>([^<]+)</h2>', html))
    points = [Point("a", True, 32, METRICS[task], 0.5, gmacs=0.1) for task in METRICS]
    with pytest.raises(ValueError, match="2 points have top-1 and mIoU, but a curve shows one"):
        accuracy_against_gmacs(points)


def test_an_old_run_without_a_task_classifies(tmp_path: Path) -> None:
    old, begun = make_run(tmp_path / "old"), make_segmentation(tmp_path / "begun", without=FILES)
    assert "task" not in json.loads((old / VAL).read_text())
    first, second = tables(report(old, begun))
    assert first[0][2:4] == ["top-1", "top-5"]
    assert second[0][2] == "mIoU"  # nothing but its configuration says so
    wrong = report(make_run(tmp_path / "wrong", task="pose"))
    assert "evaluations/val.json is of task &#x27;pose&#x27;, but known are classify and segment" in wrong


def test_a_row_is_image_mask_prediction_and_ground_truth_with_its_classes(tmp_path: Path) -> None:
    run = make_segmentation(tmp_path / "run")
    html = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    rows = re.findall(r'<li><figure><div class="row">(.*?)</figure></li>', html, re.DOTALL)
    assert len(rows) == 3
    assert re.findall(r"<div><span>(.*?)</span>", rows[0]) == ["image", "mask", "prediction", "ground truth"]
    pictures = [b64decode(data) for data in re.findall(r'base64,([^"]+)"', rows[0])]
    seen = [np.asarray(Image.open(BytesIO(data)).convert("RGB")) for data in pictures]
    plain, _, prediction, truth = (picture[4::8, 4::8] for picture in seen)  # enlarged 8 times
    samples = load_file(run / SAMPLES)
    assert np.abs(plain.astype(int) - samples["images"][0]).mean() < 30  # WebP is not exact
    assert (prediction[12, 12] == (128, 0, 0)).all()
    assert (truth[12, 12] == (0, 128, 0)).all()
    assert (prediction[0] == 0).all(), "ground is black, also where the truth is ignored"
    assert truth[:, 30:].min() > 150 > 0 == truth[:, :8].max()
    legend = re.findall(r'style="background:(.*?)"></i>(.*?)</span>', rows[0])
    assert [name for _, name in legend] == ["ground", "cat &lt;b&gt;&amp;", "dog", "ignored"]
    assert [colour for colour, _ in legend][:3] == ["#000000", "#800000", "#008000"]
    assert "<b>7 tokens</b>, 93\u00a0% of 960 labelled pixels right" in rows[0]  # 4 cells, 1 fine; 64 px of 960 wrong


def test_rows_are_the_first_ones_in_the_order_they_came(tmp_path: Path) -> None:
    run = make_segmentation(tmp_path / "run")
    labels = np.stack([np.full((32, 32), index, np.uint8) for index in range(20)])
    images, masks = np.zeros((20, 32, 32, 3), np.uint8), np.zeros((20, 2, 2), np.uint8)
    tensors = {"images": images, "masks": masks, "labels": labels, "predictions": labels}
    save_file(tensors, run / SAMPLES, metadata={"coarse": "16", "fine": "8"})
    html = report(run)
    assert re.findall(r'alt="ground truth: class (\d+)"', html) == [str(index) for index in range(12)]
    assert "The first 12 of 20 kept, in the order they came, none chosen" in html


def test_classes_are_ranked_by_how_coarse_they_are_with_their_frequency(tmp_path: Path) -> None:
    html = report(make_segmentation(tmp_path / "run"))
    labels = [unescape(label) for label in re.findall(r">([^<>]+, [\d.]+ %)</text>", html)]
    assert labels == ["ground, 90 %", "dog, 3 %", "cat <b>&, 7 %"]
    assert "of 3 that occur" in html
    rows = tables(html, "plain")[0]
    assert rows[1:] == [
        ["ground", "91.1 %", "90.0 %", "85.0 %"],
        ["cat <b>&", "22.2 %", "7.0 %", "15.0 %"],
        ["dog", "33.3 %", "3.0 %", "45.0 %"],
        ["never", "–", "0.0 %", "–"],  # noqa: RUF001
    ]


def test_of_many_classes_the_ends_are_shown() -> None:
    names = [f"c{index}" for index in range(30)]
    plot = figures.class_bars(names, [index / 30 for index in range(30)], [1e-6, *[1 / 29] * 29])
    shown = re.findall(r">(c\d+), (.*?) %</text>", plot.svg)
    assert [name for name, _ in shown] == [f"c{index}" for index in [*range(29, 21, -1), *range(7, -1, -1)]]
    assert [often for _, often in shown[-2:]] == ["3.45", "under 0.01"]
    few = figures.class_bars(["a", "b", "c"], [0.1, None, 0.3], [0.5, None, 0.5])
    assert re.findall(r">([abc]), ", few.svg) == ["c", "a"]
    with pytest.raises(ValueError, match="3 classes, 2 shares, 3 frequencies"):
        figures.class_bars(names[:3], [0.1, 0.2], [0.1, 0.2, 0.7])
    with pytest.raises(ValueError, match="none of the 1 classes occurs"):
        figures.class_bars(["a"], [None], [0.0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"class_coarse": None}, "no shares of coarse pixels and frequencies of the classes in the evaluation"),
        ({"class_frequency": [0.5, 0.5]}, "no shares of coarse pixels and frequencies of the classes in the"),
        ({"class_coarse": [None, "?", float("nan"), None]}, "no shares of coarse pixels and frequencies"),
        ({"iou": None}, "There is no IoU of the classes in the evaluation"),
        ({"classes": []}, "There are no names of classes in config.json, so they have numbers"),
        ({"miou": float("nan")}, "No run has both mIoU and GMACs"),
    ],
)
def test_what_is_missing_of_the_classes_is_said(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    html = report(make_segmentation(tmp_path / "run", **changes))
    assert re.search(rf'class="missing">[^<]*{words}', html)
    assert html.count('<div class="row">') == 3
    Balance(html)


def test_where_nothing_is_labelled_there_are_dashes(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("miou", "pixel_accuracy", "class_accuracy"))
    lists = {key: [None] * 4 for key in ("iou", "class_coarse", "class_frequency")}
    html = report(make_segmentation(tmp_path / "run", **unknown, **lists))
    assert table(html)[1][2:6] == ["–", "–", "–", "9.2 ± 2.5 of 16"]  # noqa: RUF001
    assert "No mIoU yet: of 1 run(s), none has one." in html


def test_mIoU_of_many_passes_is_not_shown_at_the_cost_of_one(tmp_path: Path) -> None:  # noqa: N802
    run = make_segmentation(tmp_path / "run")
    html = report(run)
    many = json.loads((run / VAL).read_text()) | {"miou": 0.999, "flip": True, "scales": [0.5, 1.0]}
    (run / "evaluations/flip-0.5-1.json").write_text(json.dumps(many))
    again = report(run)
    assert lead(again) == lead(html)
    assert table(again) == table(html)
    assert again.count(">evaluation, mIoU<") == 1
    assert tables(again, "plain")[-1][1][:3] == ["flip-0.5-1", "–", "99.9 %"]  # noqa: RUF001


def test_a_dense_segmentation_run_has_no_coarse_classes(tmp_path: Path) -> None:
    html = report(make_segmentation(tmp_path / "run", dense=True))
    assert "least often coarse" not in html
    assert "IoU by class" in html
    assert "There are no shares" not in html


def test_label_maps_that_do_not_fit_their_images_are_said(tmp_path: Path) -> None:
    run = make_segmentation(tmp_path / "run")
    tensors = load_file(run / SAMPLES)
    small = {**tensors, "labels": np.zeros((3, 8, 8), np.uint8), "predictions": np.zeros((3, 8, 8), np.uint8)}
    save_file(small, run / SAMPLES, metadata={"coarse": "16", "fine": "8"})
    assert "labels are (3, 8, 8) and predictions (3, 8, 8), but must both be (3,), or (3, 32, 32)" in report(run)
    odd = {**tensors, "labels": np.full((3, 32, 32), 300)}
    save_file(odd, run / SAMPLES, metadata={"coarse": "16", "fine": "8"})
    assert "with classes 0 to 255, got (32, 32) with 300 to 300" in report(run)


def test_a_sweeps_table_has_the_metric_of_its_task(tmp_path: Path) -> None:
    for make, word, value in ((make_run, "top-1", "87.6 %"), (make_segmentation, "mIoU", "51.2 %")):
        with console.capture() as shown:
            show_runs([make(tmp_path / word)])
        text = shown.get().replace("\u00a0", " ")
        head, row = (line for line in text.splitlines() if "GMACs" in line or "gate 0.25 " in line)
        assert word in head
        assert all(part in row for part in (value, "50 %", "1.42x"))
        assert " with 50 % of the dense model's multiply-adds and runs 1.42 times as fast" in text
