"""Two segmentation runs side by side: mask, and what each predicts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from smoke_runs import smoke
from typer.testing import CliRunner

import msvit
from msvit_lab.cli import app
from msvit_lab.evaluation.sliding import predict
from msvit_lab.hosts import read_run
from msvit_lab.runs import write_config
from msvit_lab.tasks import slide
from msvit_lab.training.loop import train
from msvit_lab.viz.pictures import PALETTE
from msvit_lab.viz.segmentation import read_segmenter


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Segmenters with an entropy gate and without, whose decoders differ, and the beginning of a classifier."""
    folder = tmp_path_factory.mktemp("runs")
    segment = {"task": "segment", "data__scales": "1,1.2", "data__short_side": 64, "model__decoder": "linear"}
    for name, changes in {
        "gated": {**segment, "model__gate": "entropy", "model__share": 0.4},
        "dense": {**segment, "model__gate": "none", "seed": 1},
    }.items():
        train(smoke(**changes), folder / name, quiet=True)
        model, _ = read_run(folder / name)
        with torch.no_grad():  # two steps predict one class everywhere
            for weight in (model.host.pos_embed, *model.decoder.parameters()):
                weight.normal_()
        msvit.save(model, folder / name / "model")
    (folder / "labels").mkdir()
    write_config(folder / "labels", smoke(), "scenes", [])
    return folder


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (8, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((96, 64), Image.Resampling.BICUBIC).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def viz(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["viz", *map(str, arguments)], terminal_width=300)


def test_panels_are_image_mask_and_the_predictions_of_both_runs(runs: Path, photo: Path, tmp_path: Path) -> None:
    result = viz(photo, "--run", runs / "gated", "--against", runs / "dense", "--out", tmp_path / "x.png")
    assert result.exit_code == 0, result.output
    picture = np.asarray(Image.open(tmp_path / "x.png"))
    high, wide = 5 * 64, 5 * 96  # five px for each of the photograph
    assert picture.shape[1] == 4 * wide + 3 * 8
    panels = [picture[:high, start : start + wide] for start in range(0, picture.shape[1], wide + 8)]
    original = Image.open(photo).resize((wide, high), Image.Resampling.BICUBIC)
    assert np.array_equal(panels[0], original)
    labels = []
    for name, panel in (("gated", panels[2]), ("dense", panels[3])):
        run = read_segmenter(runs / name)
        (found,) = predict(run.model, [run.prepare(Image.open(photo))], [(high, wide)], slide(run.config))
        labels.append(found.prob.argmax(0).numpy())
        assert np.array_equal(panel, PALETTE[labels[-1]]), name
        if name == "gated":
            fine = found.costs.masks
            assert f"{int(found.costs.tokens.sum())} of {2 * 64} tokens" in result.output
            coarse = (panels[1] != panels[0]).any(-1)[:, : 5 * 64].reshape(4, 80, 4, 80).mean((1, 3)) > 0.5
            assert np.array_equal(coarse[:, :2], fine[0].numpy()[:, :2] == 0), "what the second window leaves visible"
    assert len(np.unique(labels[0])) > 1
    assert (labels[0] != labels[1]).any()


def test_mistakes_are_errors_with_a_remedy(runs: Path, photo: Path, tmp_path: Path) -> None:
    gated, dense, labels = (runs / name for name in ("gated", "dense", "labels"))
    for arguments, words in [
        (["--run", gated, "--against", labels], "labels is no segmentation run (its task is classify)"),
        (["--run", labels, "--against", dense], "such as voc or ade20k, or leave out --against"),
        (["--against", dense], "there is no run to compare with it; give one by --run"),
        (["--run", gated, "--against", dense, "--zoom", 3], "--zoom is not for --against"),
        (["--run", gated, "--against", tmp_path], "has no config.json, so it is no run"),
    ]:
        result = viz(photo, *arguments, "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
