"""The dense baseline (--gate none) runs at every size that its host takes, in every command."""

import json
import re
from pathlib import Path

import pytest
import torch
from smoke_runs import smoke
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from msvit_lab.bench.trained import measure_runs
from msvit_lab.build import make_model
from msvit_lab.config import override
from msvit_lab.evaluate import evaluate_run
from msvit_lab.hosts import read_run
from msvit_lab.recipes import RECIPES, recipe
from msvit_lab.report import image_values
from msvit_lab.runs import Run
from msvit_lab.training.loop import train

CPU = torch.device("cpu")
PATCH = {"model__options__patch_size": 32, "model__gate": "none", "model__mode": "packed"}


def test_the_demo_trains_the_dense_model_at_the_size_of_its_recipe() -> None:
    """A smaller one has lost what the scenes differ in: patterns of single pixels."""
    (text,) = re.findall(r"sweep scenes .*--dense-sizes (\S+)", (Path(__file__).parents[2] / "Makefile").read_text())
    assert text == str(recipe("scenes").data.img_size)
    assert f"--dense-sizes {text} " in (RECIPES["scenes"].__doc__ or "")


def test_an_odd_number_of_patches_trains_evaluates_and_is_timed(tmp_path: Path) -> None:
    """Three by three patches of 32 px, as seven by seven of a ViT-S/32 at 224 px: no multiple of a cell of 64 px."""
    run = train(smoke(**PATCH, data__img_size=96), tmp_path / "runs/dense", quiet=True)
    found = evaluate_run(run, rounds=2)
    model, _ = read_run(run)
    assert json.loads(json.dumps(found)) == Run(run).evaluations["val"]
    assert (found["tokens"]["mean"], found["tokens"]["dense"], found["fine_share"], found["dense"]) == (9, 9, 1, True)
    assert {row["what"] for row in found["latency"]} == {"dense host"}
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.host.requires_grad_(False)(torch.zeros(1, 3, 96, 96))
    assert found["gmacs"]["mean"] == found["gmacs"]["dense"] == counter.get_total_flops() / 2 / 1e9
    for size, num in ((160, 25), (64, 4)):
        assert evaluate_run(run, size=size, rounds=0)["tokens"]["mean"] == num, "other sizes too"
    with pytest.raises(ValueError, match=r"images are 100px, .* patches of 32px needs a multiple of 32; .* 96 or 128"):
        evaluate_run(run, size=100, rounds=0)
    timed = measure_runs([run], device=CPU, dtype=torch.float32, batch=2, rounds=2, compile=False)
    assert timed["rows"][0]["tokens"] == 9
    assert image_values(Run(run).evaluations.samples("val"))["shown"][0]["num_tokens"] == 9, "in the report"


def test_a_size_that_the_host_cannot_take_and_cells_that_do_not_fit_give_a_sentence() -> None:
    with pytest.raises(ValueError, match="images are 100px, but a dense VisionTransformer with patches of 32px needs"):
        make_model(smoke(**PATCH, data__img_size=100), 8)
    with pytest.raises(ValueError, match="image is 96x96px, but cells of 64px"):
        make_model(smoke(**PATCH | {"model__gate": "disc"}, data__img_size=96), 8)
    assert make_model(smoke(**PATCH, data__img_size=128), 8).coarse == 64, "as ever, where cells fit"


def test_a_swin_needs_two_patches_in_a_row() -> None:
    config = override(recipe("pets_swin", smoke=True), {"model.gate": "none", "data.img_size": "72"})
    model = make_model(config, 8).eval()
    image = torch.rand(2, 3, 72, 72)
    with torch.no_grad():
        torch.testing.assert_close(model(image).logits, model.host(image))
    assert (model.coarse, model.backbone.merge_at) == (8, 2)
    with pytest.raises(ValueError, match="patches of 4px needs a multiple of 8; give for example 72 or 80"):
        make_model(override(config, {"data.img_size": "76"}), 8)
