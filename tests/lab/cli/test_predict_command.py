"""msvit predict: what a run says of image files is what its evaluation says of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from smoke_runs import smoke, write_images
from typer.testing import CliRunner

import msvit
from msvit_lab.build import make_loader
from msvit_lab.cli import app
from msvit_lab.config import override
from msvit_lab.data import open_source
from msvit_lab.hosts import read_run
from msvit_lab.recipes import recipe
from msvit_lab.training.loop import train


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["predict", *map(str, arguments)], terminal_width=200)


def found_by(*arguments: object) -> list[dict]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("photos") / "val", each=2)


@pytest.mark.parametrize("eval_crop", [1.0, 0.8])
def test_predictions_are_those_of_the_evaluation_of_a_run(tmp_path: Path, photos: Path, eval_crop: float) -> None:
    """Image by image, to the bit: what `msvit.load(RUN).preprocessing` makes of a file, and then the probabilities."""
    data = {"data__source": photos.parent, "data__eval_crop": eval_crop, "data__interpolation": "bicubic"}
    config = smoke(**data, model__gate="entropy")
    train_folder = photos.parent / "train"
    if not train_folder.exists():
        write_images(train_folder, each=6)
    run = train(config, tmp_path / "run", quiet=True)
    model, config = read_run(run)
    (batch,) = make_loader(open_source(str(photos.parent), "val"), config, train=False, device="cpu").iterate(0)
    loaded = msvit.load(run)
    assert loaded.classes == ("ant", "bee", "cat")
    listed = found_by(run, photos, "--top", 3)
    paths = [found["path"] for found in listed]
    prepared = [loaded.preprocessing(Image.open(path).convert("RGB")) for path in paths]
    assert torch.equal(torch.stack(prepared), batch.image)
    with torch.inference_mode():
        out = model(batch.image)
    for row, found in enumerate(listed):
        values = {each["class"]: each["probability"] for each in found["top"]}
        want = out.logits[row].softmax(0).tolist()
        assert [values[name] for name in model.classes] == pytest.approx(want, abs=1e-6)
        assert (found["tokens"], found["max_tokens"]) == (int(out.tokens.count[row]), 64)
    assert [each.name for each in loaded.predict(paths)] == [found["top"][0]["class"] for found in listed]


def test_files_folders_and_patterns_of_a_run_or_a_saved_model(trained: Path, photos: Path) -> None:
    run = trained / "gated"
    by_run = found_by(run, photos)
    assert len(by_run) == 6
    assert by_run == found_by(run / "model", photos) == found_by(run, f"{photos}/*/*.png")
    assert [each["path"] for each in found_by(run, photos / "bee/1.png")] == [str(photos / "bee/1.png")]
    line = call(trained / "dense", photos / "bee/1.png", "--top", 2).output
    assert line.count(" %, ") == 1
    assert line.strip().endswith("; 64 of 64 tokens (100 %)")


def test_an_overlay_shows_what_the_model_saw(trained: Path, photos: Path, tmp_path: Path) -> None:
    found = found_by(trained / "gated", photos / "ant", "--overlay", tmp_path)
    assert [Path(each["pictures"][0]) for each in found] == [tmp_path / f"{i}.tokens.png" for i in range(2)]
    with Image.open(found[0]["pictures"][0]) as picture:
        assert picture.width / picture.height < 36 / 40, "the whole image, with a caption below"
    assert "must be a folder" in call(trained / "gated", photos, "--overlay", tmp_path / "one.png").output


def test_a_corrupt_file_is_one_line_and_exit_code_1(trained: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no image")
    (tmp_path / "b.png").write_bytes((photos / "ant/0.png").read_bytes())
    result = call(trained / "gated", tmp_path, "--json")
    assert result.exit_code == 1
    bad, good = map(json.loads, result.output.splitlines())
    assert bad.keys() == {"path", "error"}
    assert "a.jpg cannot be read as an image" in bad["error"]
    assert good["top"]
    first, second = call(trained / "gated", tmp_path).output.splitlines()
    assert first == bad["error"]
    assert second.startswith(f"{tmp_path / 'b.png'}: ")


def test_a_segmentation_run_counts_pixels_and_writes_label_maps(tmp_path: Path, photos: Path) -> None:
    config = override(recipe("voc", smoke=True), {"data.short_side": "48"})
    run = train(config, tmp_path / "run", quiet=True)
    (found,) = found_by(run, photos / "ant/0.png", "--top", 20, "--overlay", tmp_path / "drawn")
    labels, drawn = found["pictures"]
    with Image.open(labels) as picture:
        values = np.asarray(picture)
    assert values.shape == (40, 36), "as large as the image"
    classes = msvit.load(run).classes
    assert {each["class"]: each["probability"] for each in found["top"]} == {
        classes[label]: pytest.approx((values == label).mean()) for label in np.unique(values)
    }
    assert Path(drawn).name == "0.segmentation.png"
    refused = call(run / "model", photos)
    assert refused.exit_code == 2
    assert "give the run folder" in refused.output


def test_a_model_without_names_shows_numbers(trained: Path, photos: Path, tmp_path: Path) -> None:
    model = msvit.load(trained / "gated")
    model.classes = None
    result = call(msvit.save(model, tmp_path), photos / "ant/0.png", "--top", 1)
    assert result.exit_code == 0
    assert "set model.classes and save it again" in result.output
    assert ": class " in result.output
