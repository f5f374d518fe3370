"""The report: one page that needs nothing else, says what eval.json says, and says what is missing."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from msvit.report import write_report
from msvit.viz import figures

VOID = {"meta", "link", "br", "img"}
REST = ("metrics.jsonl", "samples.safetensors")
FILES = ("metrics.jsonl", "eval.json", "samples.safetensors")


def make_run(folder: Path, dense: bool = False, without: tuple[str, ...] = (), **evaluation: Any) -> Path:
    """A run of 32 px images with cells of 16 px."""
    folder.mkdir(parents=True)
    model = {"name": "tiny", "gate": "none" if dense else "learned", "coarse": 16, "mode": "packed"}
    gate = {"loss": "gbas", "weight": 4, "target": 0.25}
    config = {"data": {"img_size": 32}, "model": model, "gate": gate, "seed": 0}
    about = {"format": 1, "recipe": "scenes", "config": config, "versions": {"torch": "9.8.7"}, "machine": {"cores": 2}}
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
    (folder / "eval.json").write_text(json.dumps({**result, **evaluation}))
    numbers = np.random.default_rng(0)
    tensors = {
        "images": numbers.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8),
        "masks": np.array([[[1, 0], [0, 0]]] * 3, dtype=np.uint8),
        "labels": np.array([0, 1, 7]),
        "predictions": np.array([0, 0, 7]),
    }
    names = json.dumps(["cat <b>&", "dog"])
    save_file(tensors, folder / "samples.safetensors", metadata={"classes": names, "coarse": "16", "fine": "8"})
    for name in without:
        (folder / name).unlink()
    return folder


def report(*runs: Path) -> str:
    html = write_report(list(runs), runs[0].parent / "report.html").read_text(encoding="utf-8")
    return re.sub(r"base64,[A-Za-z0-9+/=\s]+", "base64,", html)  # in pictures any letters may follow each other


def table(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", re.search(r'<table class="summary">.*?</table>', html, re.DOTALL)[0])
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]
    return [[unescape(re.sub(r"<.*?>", "", cell)).replace("\u00a0", " ") for cell in row] for row in cells]


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
    assert Balance(html).num_figures == len(figures_) == 2 + 1 + 4 + 2 * 3  # costs, dense run, gated run, images
    ids = re.findall(r'\bid="([^"]+)"', html)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', html))
    assert used <= set(ids)


def test_the_numbers_in_the_table_are_those_of_the_evaluation(tmp_path: Path) -> None:
    dense = make_run(tmp_path / "dense", True, REST, gmacs={"mean": 0.62, "dense": 0.62}, fine_on_object=None)
    head, first, second = table(report(dense, make_run(tmp_path / "gated", False, REST)))
    assert dict(zip(head, second, strict=True)) == {
        "run": "gated", "gate": "learned (gbas, target 0.25)", "input px": "32", "top-1": "87.6 %", "top-5": "99.1 %",
        "tokens": "9.2 ± 2.5 of 16", "GMACs": "0.31", "of dense": "50 %", "images/s": "5,678 (packed)",
        "fine on object": "77.1 %", "fine on ground": "12.3 %",
    }  # fmt: skip
    assert first[1] == "none (dense)"
    assert first[8:10] == ["4,321 (dense host)", "–"]  # noqa: RUF001


def test_the_answer_stands_first(tmp_path: Path) -> None:
    small = make_run(tmp_path / "small", True, REST, gmacs={"mean": 0.2, "dense": 0.2}, img_size=16, top1=0.7)
    large = make_run(tmp_path / "large", True, REST, gmacs={"mean": 0.6, "dense": 0.6}, top1=0.9)
    poor, good = (make_run(tmp_path / name, False, REST, top1=top1) for name, top1 in (("poor", 0.5), ("good", 0.85)))
    html = report(poor, small, large, good)
    lead = re.search(r"<header>(.*?)</header>", html, re.DOTALL)[1].replace("\u00a0", " ")
    assert '<p class="answer">good: 85.0 % at 0.31 GMACs, 50 % of dense; dense 90.0 %</p>' in lead
    assert "the dense curve gives 75.5 %: the gate gains 9.5 points" in lead  # 0.7 + (0.31 - 0.2) / 0.4 * 0.2


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    html = report(make_run(tmp_path / "<i>a&b", machine="<script>"), make_run(tmp_path / "_$x$"))
    assert "<i>" not in html
    assert "<script>" not in html
    assert "&lt;i&gt;a&amp;b" in html
    assert "cat <b>" not in html
    assert "label <b>cat &lt;b&gt;&amp;</b><br>predicted cat &lt;b&gt;&amp;: <b>right</b>" in html
    assert "label <b>dog</b><br>predicted cat &lt;b&gt;&amp;: <b>wrong</b>" in html
    assert "<b>class 7</b>" in html
    assert len(re.findall(r">\s*_\$x\$<", html)) >= 3  # table, heading, legend: a name is no formula and not hidden


@pytest.mark.parametrize("name", FILES)
def test_what_is_missing_is_said_in_its_place(tmp_path: Path, name: str) -> None:
    html = report(make_run(tmp_path / "run", without=(name,)))
    assert f"There is no {name}" in html
    Balance(html)


def test_a_run_that_only_began_is_a_run(tmp_path: Path) -> None:
    html = report(make_run(tmp_path / "run", without=FILES))
    assert "No accuracy yet" in html
    assert all(f"There is no {name}" in html for name in FILES)
    assert "<figure" not in html
    assert "&quot;seed&quot;: 0" in html
    assert "9.8.7" in html


def test_an_evaluation_with_holes_and_nans_gives_dashes(tmp_path: Path) -> None:
    nan = float("nan")
    holes: dict[str, Any] = {"top1": nan, "tokens": None, "gmacs": {"mean": "?"}, "latency": [{"what": "packed"}]}
    html = report(make_run(tmp_path / "run", **holes, mask_mean=[[1, nan]], img_size=None))
    assert table(html)[1][2:9] == ["32", "–", "99.1 %", "–", "–", "–", "–"]  # noqa: RUF001
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
    save_file(tensors | answers, run / "samples.safetensors", metadata={"coarse": "16", "fine": "8"})
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
    runs = [make_run(tmp_path / "a" / "run", without=FILES), make_run(tmp_path / "b" / "run", without=("eval.json",))]
    html = report(*runs, runs[0])
    assert [row[0] for row in table(html)[1:]] == ["a/run", "b/run"]
    assert report(*runs) == html


def test_a_figure_takes_the_colour_of_the_page(tmp_path: Path) -> None:
    plot = figures.token_histogram([0.0, 1.0, 2.0], [3.0, 4.0], num_dense=2)
    assert "currentColor" in plot.svg
    assert figures.INK not in plot.svg
    assert "7 images" in plot.caption
    with pytest.raises(ValueError, match="2 edges for 2 counts"):
        figures.token_histogram([0.0, 1.0], [3.0, 4.0])
