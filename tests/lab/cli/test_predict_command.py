"""msvit predict: what a run says of image files is what its evaluation says of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from smoke_runs import call, done, refused, smoke, write_images

import msvit
from msvit_lab.build import make_loader
from msvit_lab.data import open_source
from msvit_lab.evaluation.sliding import predict
from msvit_lab.hosts import read_run
from msvit_lab.predict import PixelClassifier
from msvit_lab.tasks import slide
from msvit_lab.training.loop import train
from msvit_lab.viz.pictures import PALETTE, enlarge


def found_by(*arguments: object) -> list[dict]:
    return [json.loads(line) for line in done("predict", *arguments, "--json").splitlines()]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("photos") / "val", each=2)


def test_predictions_are_those_of_the_evaluation_of_a_run(tmp_path: Path, photos: Path) -> None:
    """Image by image, to the bit: what `msvit.load(RUN).preprocessing` makes of a file, and then the probabilities."""
    write_images(photos.parent / "train", each=6)
    data = {"data__source": photos.parent, "data__eval_crop": 0.8, "data__interpolation": "bicubic"}
    config = smoke(**data, model__gate="entropy")
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


def test_files_and_folders_of_a_run_or_a_saved_model_with_names_or_numbers(trained, photos, tmp_path):
    run = trained / "gated"
    by_run = found_by(run, photos)
    assert len(by_run) == 6
    assert by_run == found_by(run / "model", photos)
    assert [each["path"] for each in found_by(run, photos / "bee/1.png")] == [str(photos / "bee/1.png")]
    line = done("predict", trained / "dense", photos / "bee/1.png", "--top", 2)
    assert line.count(" %, ") == 1
    assert line.strip().endswith("; 64 of 64 tokens (100 %)")
    model = msvit.load(trained / "gated")
    model.classes = None
    said = done("predict", msvit.save(model, tmp_path), photos / "ant/0.png", "--top", 1)
    assert "set model.classes and save it again" in said
    assert ": class " in said


def test_tokens_of_a_model_that_merges_are_those_at_the_end(trained: Path, photos: Path, tmp_path: Path) -> None:
    model = msvit.load(trained / "dense").with_options(reducer=msvit.ToMe(r=2))
    model.classes = ("ant", "bee", "cat", *"defgh")
    saved = msvit.save(model, tmp_path / "merged")
    assert done("predict", saved, photos / "bee/1.png").strip().endswith("; 60 of 64 tokens at the end (94 %)")
    assert "tokens, at the end" in done("eval", saved, "--data", photos)


def test_a_saved_model_of_transformers_predicts_by_its_labels(photos: Path, tmp_path: Path) -> None:
    from tiny_transformers import tiny_transformers

    host = tiny_transformers("ViTForImageClassification", torch.float32)
    host.config.id2label = dict(enumerate(("ant", "bee", "cat", "dog", "elk")))
    model = msvit.convert(host, gate=msvit.DiscGate(coarse=8, share=0.5)).eval()
    model.preprocessing = msvit.Preprocessing(16, (0.5,) * 3, (0.5,) * 3)
    printed = call("predict", msvit.save(model, tmp_path / "model"), photos / "bee", "--top", 5, "--json").stdout
    found = [json.loads(line) for line in printed.splitlines()]  # stderr has transformers' progress
    names = model.config.id2label.values()
    assert {each["class"] for each in found[0]["top"]} == set(names)
    with torch.inference_mode():
        want = model(model.preprocessing(Image.open(photos / "bee/0.png"))[None]).logits.argmax().item()
    assert found[0]["top"][0]["class"] == list(names)[want]


def test_an_overlay_shows_what_the_model_saw(trained: Path, photos: Path, tmp_path: Path) -> None:
    found = found_by(trained / "gated", photos / "ant", "--overlay", tmp_path)
    assert [Path(each["pictures"][0]) for each in found] == [tmp_path / f"{i}.tokens.png" for i in range(2)]
    with Image.open(found[0]["pictures"][0]) as picture:
        assert picture.width / picture.height < 36 / 40, "the whole image, with a caption below"


def test_a_corrupt_file_is_one_line_and_exit_code_1(trained: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no image")
    (tmp_path / "b.png").write_bytes((photos / "ant/0.png").read_bytes())
    result = call("predict", trained / "gated", tmp_path, "--json")
    assert result.exit_code == 1
    bad, good = map(json.loads, result.output.splitlines())
    assert bad.keys() == {"path", "error"}
    assert "a.jpg cannot be read as an image" in bad["error"]
    assert good["top"]
    first, second = call("predict", trained / "gated", tmp_path).output.splitlines()
    assert first == bad["error"]
    assert second.startswith(f"{tmp_path / 'b.png'}: ")


def test_a_segmentation_run_counts_pixels_and_draws_masks_beside_classes(tmp_path: Path) -> None:
    config = smoke(task="segment", data__scales="1,1.2", data__short_side=64, model__gate="entropy", model__share=0.4)
    run = train(config, tmp_path / "run", quiet=True)
    model, _ = read_run(run)
    with torch.no_grad():  # two steps predict one class everywhere
        for weight in (model.host.pos_embed, *model.decoder.parameters()):
            weight.normal_()
    msvit.save(model, run / "model")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels).resize((96, 64), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "0.png")
    (found,) = found_by(run, tmp_path / "0.png", "--top", 20, "--overlay", tmp_path / "drawn")
    labels = np.asarray(Image.open(tmp_path / "drawn/0.labels.png"))
    assert labels.shape == (64, 96), "as large as the image"
    assert len(np.unique(labels)) > 1
    assert {each["class"]: each["probability"] for each in found["top"]} == {
        model.classes[label]: pytest.approx((labels == label).mean()) for label in np.unique(labels)
    }
    high, wide = 5 * 64, 5 * 96  # five px for each of the photograph
    picture = np.asarray(Image.open(tmp_path / "drawn/0.segmentation.png"))
    mask, classes = picture[:high, :wide], picture[:high, wide + 8 :]
    assert np.array_equal(classes, PALETTE[enlarge(labels, 5)])
    plain = np.asarray(photo.resize((wide, high), Image.Resampling.BICUBIC))
    coarse = (mask != plain).any(-1)[:, : 5 * 64].reshape(4, 80, 4, 80).mean((1, 3)) > 0.5
    (view,) = predict(model.eval(), [PixelClassifier(model, config).normalised(photo)], [(64, 96)], slide(config))
    assert found["tokens"] == int(view.costs.tokens.sum())
    assert np.array_equal(coarse[:, :2], view.costs.masks[0].numpy()[:, :2] == 0), "the second window covers the rest"
    assert "give the run folder" in refused("predict", run / "model", tmp_path / "0.png")
