"""Predictions of a folder as a table: one row per image, whatever happens on the way."""

import csv
import json
import os
import signal
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from smoke_runs import call, refused
from tiny import tiny_model

import msvit
from msvit.prediction import predict_batch, predict_sorted, stack
from msvit_lab import predictions
from msvit_lab.folder_lock import locked
from msvit_lab.interrupts import RESUME_CODE
from msvit_lab.predict import predict_files, read_predictor
from msvit_lab.predictions import MANIFEST, ROWS, write_predictions


def write_model(folder: Path, seed: int = 0) -> Path:
    """A classifier whose gate decides by contrast: numbers of tokens differ from image to image."""
    torch.manual_seed(seed)
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2))
    model = tiny_model(dtype=torch.float32, gate=gate).eval()
    model.classes = list("abcde")
    model.preprocessing = msvit.Preprocessing(size=16, mean=(0.5,) * 3, std=(0.25,) * 3, crop=1.0)
    with torch.inference_mode():
        gate.threshold = float(gate(torch.randn(64, 3, 16, 16)).logits.median())
    return msvit.save(model, folder)


def write_photos(folder: Path, num: int) -> Path:
    """i.png and below/i.jpg in turn; the second is no image, and of the last one half is missing."""
    (folder / "below").mkdir(parents=True)
    for i in range(num):
        path = folder / (f"{i}.png" if i % 2 == 0 else f"below/{i}.jpg")
        draw = np.random.default_rng(i)
        pixels = draw.normal(draw.uniform(60, 190), draw.uniform(1, 60), (24, 30, 3)).clip(0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        if i == 1:
            path.write_bytes(b"no image")
        elif i == num - 1:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), num=23)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "SHARD", 4)


def read(path: Path) -> list[dict]:
    """Rows with the types of the columns."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    with path.open(newline="") as file:
        return [{name: typed(name, value) for name, value in row.items()} for row in csv.DictReader(file)]


def typed(name: str, value: str) -> object:
    kind = int if "tokens" in name else float if name.startswith(("prob", "gmacs")) else str
    return kind(value) if value else None


def test_a_table_has_one_row_per_image_by_path_the_same_in_all_formats(model, photos, tmp_path):
    endings = [".csv", ".jsonl", *([".parquet"] if find_spec("pyarrow") else [])]
    tables = []
    for ending in endings:
        out = tmp_path / f"found{ending}"
        result = call("predict", model, photos, "--top", 2, "--out", out, "--json")
        assert result.exit_code == 1, result.output
        assert json.loads(result.stdout) == {"out": str(out), "images": 23, "failed": 2}
        tables.append(read(out))
    assert all(table == tables[0] for table in tables[1:])
    assert sorted(os.listdir(tmp_path)) == sorted(f"found{ending}" for ending in endings), "no parts, no locks"
    one_by_one = predict_files(read_predictor(model), [photos], 2)
    want = {each.path.relative_to(photos).as_posix(): each for each in one_by_one}
    assert [row["path"] for row in tables[0]] == sorted(want)
    gmacs = set()
    for row in tables[0]:
        each = want[row["path"]]
        assert row["error"] == each.error
        scores = [(row[f"label_{i}"], row[f"probability_{i}"]) for i in (1, 2) if row[f"label_{i}"] is not None]
        assert [name for name, _ in scores] == [score.name for score in each.top]
        assert [value for _, value in scores] == pytest.approx([score.probability for score in each.top], abs=1e-6)
        assert (row["tokens"], row["max_tokens"]) == ((each.tokens, each.max_tokens) if each.top else (None, None))
        gmacs.add(row["gmacs"])
    assert len(gmacs) > 2, "they follow the tokens"


@pytest.mark.parametrize("mode", ["packed", "trimmed"])
def test_batches_of_similar_token_counts_change_no_prediction(mode):
    model = tiny_model(gate=msvit.LearnedGate(coarse=8, grid=(2, 2)), mode=mode).eval()
    images = [torch.randn(3, 16, 16, dtype=torch.float64) for _ in range(11)]
    with torch.inference_mode():
        model.gate.threshold = float(model.gate(torch.stack(images)).logits.median())
        want = predict_batch(model, stack(model, images), 3)
    found = predict_sorted(model, images, 3, 4)
    assert len({each.tokens for each in found}) > 2, "the images differ"
    for ours, theirs in zip(found, want, strict=True):
        assert (ours.name, ours.tokens, ours.gmacs) == (theirs.name, theirs.tokens, theirs.gmacs)
        assert ours.probability == pytest.approx(theirs.probability, abs=1e-12)


def test_after_an_interruption_only_what_is_missing_is_predicted(model, photos, tmp_path, monkeypatch):
    out, parts = tmp_path / "found.jsonl", tmp_path / "found.jsonl.parts"
    assert call("predict", model, photos, "--out", tmp_path / "whole.jsonl").exit_code == 1
    read_shard, seen = predictions.predict_rows, []
    stopped = []

    def interrupted(predictor, images, paths, top):
        seen.extend(paths)
        if len(seen) == 12 and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return read_shard(predictor, images, paths, top)

    monkeypatch.setattr(predictions, "predict_rows", interrupted)
    first = call("predict", model, photos, "--out", out)
    assert first.exit_code == RESUME_CODE, first.output
    assert "the same command goes on from there" in first.output
    assert sorted(path.name for path in parts.iterdir()) == [MANIFEST, ROWS]
    with (parts / ROWS).open("a") as file:
        file.write('{"path": "4')  # as a kill leaves it
    del seen[8:]  # the third was not written
    second = call("predict", model, photos, "--out", out)
    assert "23/23" in second.stderr
    assert len(seen) == len(set(seen)) == 23
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not parts.exists()


def test_a_kill_between_the_table_and_the_end_leaves_a_finished_table(model, photos, tmp_path, monkeypatch):
    out = tmp_path / "found.csv"
    predict = partial(write_predictions, model, read_predictor(model), photos, out)
    with monkeypatch.context() as patch:
        patch.setattr(predictions.shutil, "rmtree", lambda *_, **__: None)
        want = predict()
    rows = tmp_path / "found.csv.parts" / ROWS
    before = out.stat().st_mtime_ns
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([*lines[:-1], lines[0]]))
    with pytest.raises(ValueError, match=r"rows\.jsonl is damaged .*; delete .*found\.csv\.parts to begin anew"):
        predict()
    rows.write_text("".join(lines))
    assert predict() == want
    assert not rows.parent.exists()
    assert out.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"found\.csv exists; delete it, or choose another --out"):
        predict()


def test_other_arguments_for_a_table_that_was_begun_are_an_error(model, tmp_path, monkeypatch):
    photos, out = write_photos(tmp_path / "photos", num=9), tmp_path / "found.csv"
    parts = tmp_path / "found.csv.parts"

    with monkeypatch.context() as patch:
        patch.setattr(predictions, "predict_rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_predictions(model, read_predictor(model), photos, out)

    words = "begun with top 5, but now it is 3; repeat the command that began it, or delete"
    assert words in refused("predict", model, photos, "--out", out, "--top", 3)
    other = write_model(tmp_path / "other", seed=1)
    assert "begun with run" in refused("predict", other, photos, "--out", out)
    (photos / "0.png").rename(photos / "00.png")
    assert "had 9 images when" in (words := refused("predict", model, photos, "--out", out))
    assert "0.png was removed" in words
    (photos / "00.png").rename(photos / "0.png")
    with locked(parts):
        assert f"is in use by process {os.getpid()}" in refused("predict", model, photos, "--out", out)
    assert call("predict", model, photos, "--out", out).exit_code == 1
    assert len(read(out)) == 9
