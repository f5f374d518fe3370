"""What cells are worth to a dense model, and masks of equal cost."""

import json
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path

import pytest
import torch
from scripts import load_script
from smoke_runs import smoke, write_images
from tiny import tiny_host

import msvit
from msvit import gate_fitting
from msvit_lab.training.loop import train

targets, photos, training = map(load_script, ("gate_targets", "gate_photos", "gate_training"))
made, release = map(load_script, ("gate_tables", "gate_release"))


def test_a_cell_is_worth_the_distance_it_adds_where_a_quarter_of_the_others_is_coarse():
    effect = torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = 0.0
    for others in product((0.0, 1.0), repeat=4):
        rest = (torch.tensor(others, dtype=torch.float64)[:, None] * effect[0, 1:]).sum(0)
        chance = 0.25 ** sum(others) * 0.75 ** (4 - sum(others))
        expected += chance * ((effect[0, 0] + rest).square().sum() - rest.square().sum()) / 2
    torch.testing.assert_close(targets.additive_worth(effect)[0, 0], expected)


class Additive(targets.Teacher):
    """A model whose output is the sum of an effect of each coarse cell."""

    def __init__(self, effect):
        self.effect, self.num_masks = effect, 400

    def cells(self, image):
        return 2, 3

    def outputs(self, image, mask, kinds, model=None):
        return {"token": 1 + ((1 - mask).flatten(1)[:, :, None] * self.effect).sum(1)}


def test_random_masks_recover_what_every_cell_adds():
    effect = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    found = targets.delta(Additive(effect), torch.zeros(4, 3, 8, 12), ("token",))["token"]
    torch.testing.assert_close(found.flatten(1), targets.additive_worth(effect), rtol=0.05, atol=0.2)


def test_targets_are_finite_and_depend_on_the_image():
    host = tiny_host(dtype=torch.float32).eval()
    teacher = targets.Teacher(msvit.convert(host, gate="all-fine"), num_masks=8, num_probes=2)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    scores = targets.target_scores(list(targets.TARGETS), teacher, images)
    assert list(scores) == list(targets.TARGETS)
    for name, score in scores.items():
        assert score.shape == (2, 2, 2), name
        assert score.isfinite().all(), name
        assert not torch.equal(score[0], score[1]), name


def test_rows_with_an_area_are_those_of_proportional_attention():
    model = msvit.convert(tiny_host(dtype=torch.float32).eval(), gate="all-fine").eval()
    draw = torch.Generator().manual_seed(0)
    image, label = torch.randn(4, 3, 16, 16, generator=draw), torch.zeros(4, dtype=torch.long)
    with torch.no_grad():
        pictures = photos.Photos("set", "run", model, None, image, label, model(image).logits, batch=2)
    scores = torch.rand(4, 2, 2, generator=draw)
    once, twice = (pictures.measure("gate", scores, (0.6,), None, area) for area in (0.0, 0.5))
    num_fine = round(4 * (twice[0].tokens - 4) / 3)
    fine = scores > scores.flatten().sort().values[-num_fine - 1]
    with torch.no_grad():
        logits = model.with_options(proportional_attention=0.5)(image, mask=fine).logits
    kl = torch.nn.functional.kl_div(logits.log_softmax(1), pictures.logits.softmax(1), reduction="batchmean")
    assert abs(twice[0].kl - kl.item()) < 1e-6
    assert (once[0].macs, once[0].kl != twice[0].kl) == (twice[0].macs, True)


def test_an_equal_gate_in_a_segmenter_is_what_per_image_does():
    gate = msvit.gates.EntropyGate(coarse=8, threshold=3.0)
    model = msvit.convert_segmenter(tiny_host(dtype=torch.float32).eval(), num_classes=3, gate=gate, coarse=8).eval()
    images = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = images ** torch.arange(1.0, 7)[:, None, None, None]  # entropies differ between images
    with torch.no_grad():
        free = msvit.calibrate(model, images, 10 / 16, unit="tokens")(images)
        equal = msvit.calibrate(model.with_options(gate=release.EqualGate(gate)), images, 10 / 16, unit="tokens")
        found, wanted = equal(images), model(images, per_image=10)
    assert found.gate.mask.sum((1, 2)).tolist() == [2] * 6 != free.gate.mask.sum((1, 2)).tolist()
    torch.testing.assert_close(found.logits, wanted.logits)
    assert release.EqualGate(gate).num_macs(4) == gate.num_macs(4)


def test_variants_of_the_shipped_gate_come_last_and_have_rows_of_their_own():
    gates = {"disc": msvit.gates.DiscGate(coarse=32), "shipped": msvit.gates.DiscGate(coarse=32)}
    args = Namespace(sizes=(304,), budgets=(0.6, 0.72), per_image=True, area=(0.5,))
    found = [tuple(method.described().values()) for method in release.methods(352, gates, args)]
    assert found == [
        ("dense, 352 px", "dense", None), ("dense, 304 px", "dense", None),
        ("disc", "free", 0.6), ("shipped", "free", 0.6), ("disc", "free", 0.72), ("shipped", "free", 0.72),
        ("shipped", "per_image", 0.6), ("shipped, area 0.5", "free", 0.6),
        ("shipped", "per_image", 0.72), ("shipped, area 0.5", "free", 0.72),
    ]  # fmt: skip
    keys = ("method", "budget", "wanted")
    rows = [dict(zip(keys, each, strict=True)) | {"miou": i / 10, "gmacs": 12.0, "tokens": 9.0, "tokens_std": 0.0}
            for i, each in enumerate(found[:1] + found[6:8])]  # fmt: skip
    lines = release.table({"rows": rows, "command": "c", "machine": "m", "commit": "1"}).splitlines()[2:5]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == [
        "dense, 352 px", "shipped gate, `per_image`", "shipped gate, proportional attention 0.5",
    ]  # fmt: skip


def test_joined_rows_replace_those_of_their_set_and_seed_and_leave_others():
    def file(commit, *models, **rest):
        found = [dict(zip(("set", "model"), model.split("/"), strict=True)) for model in models]
        return {"commit": commit, "command": f"c{commit}", "machine": "m", "rows": found} | rest

    before = made.joined([file("1", "pets/a-s0", "cub/a-s1", "cub/a-s0", "voc/a")], "old")
    found = made.joined([file("2", "cub/b-s2"), file("2", "cub/b-s1")], "new", before)
    models = ["/".join(row.values()) for row in found["rows"]]
    assert models == ["pets/a-s0", "cub/a-s0", "cub/b-s1", "cub/b-s2", "voc/a"]
    assert (found["commit"], found["command"], found["commands"]) == ("1, 2", "new", ["c1", "c2"])
    segmenters = [file(commit, rows=[{"run": "voc/dense-s0"}]) for commit in "12"]
    assert made.joined(segmenters[1:], "new", segmenters[0])["commit"] == "2"


def test_ranks_give_every_image_as_many_cells_or_one_more():
    scores = torch.randn(50, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 51)[:, None, None]
    ranks = photos.ranks(scores)
    for share in (0.2, 0.5, 0.87):
        count = (ranks > ranks.flatten().quantile(1 - share)).flatten(1).sum(1)
        assert count.max() - count.min() <= 1
        assert abs(count.double().mean() / 9 - share) < 0.02
    assert torch.equal(ranks.flatten(1).argmax(1), scores.flatten(1).argmax(1))


def test_a_level_of_one_compares_images_and_a_level_of_zero_makes_them_alike():
    scores = torch.randn(20, 3, 3, generator=torch.Generator().manual_seed(0))
    harder = scores + torch.arange(20.0)[:, None, None]
    torch.testing.assert_close(training.with_level(harder, 0.0), training.with_level(scores, 0.0))
    torch.testing.assert_close(training.with_level(harder, 1.0), harder)
    spread = [training.goal(harder, level).mean((1, 2)).std() for level in (0.0, 0.1, 1.0)]
    assert spread[0] < spread[1] < spread[2]


def test_tables_have_means_over_models_and_a_line_for_all_dense_inputs():
    shown = {"agree": 1.0, "tokens": 120.0, "tokens_std": 14.0}
    dense = [("dense, 224 px", "dense", None, 1.0, 0.9), ("dense, 176 px", "dense", None, 0.6009, 0.8)]
    gates = [("shipped, area 0.5", "free", 0.6, 0.5999, 0.85), ("shipped", "per_image", 0.6, 0.6, 0.84)]
    rows = [
        dict(zip(("method", "budget", "wanted", "macs", "top1"), found, strict=True))
        | {"set": name, "model": f"run{model}", "kl": 0.02 * model, "top1": found[-1] + 0.01 * model} | shown
        for name in ("pets", "cub") for model in (0, 1) for found in dense + gates
    ]  # fmt: skip
    results = {"rows": rows, "command": "c", "machine": "m", "commit": "1"}
    text = made.tables(results).split("\n\n")
    assert text[0].splitlines() == [
        "| Pets | 100 % | 60 % | each model, 60 % | KL, 60 % | tokens, 60 % |",
        "| --- | --- | --- | --- | --- | --- |",
        "| dense, smaller inputs | 90.50 | 80.50 | 80.00, 81.00 | 10.0 | 120 +- 14 |",
        "| shipped gate, proportional attention 0.5 |  | 85.50 | 85.00, 86.00 | 10.0 | 120 +- 14 |",
        "| shipped gate, `per_image` |  | 84.50 | 84.00, 85.00 | 10.0 | 120 +- 14 |",
    ]
    assert [part.split(" |")[0] for part in text[1:2]] == ["| CUB"]
    beside = made.target_table(results).splitlines()[2:4]
    assert beside[0] == "| dense, smaller inputs " + "| 90.50 | 80.50 | 10.0 | 120 +- 14 " * 2 + "|"
    assert beside[1] == "| shipped gate, proportional attention 0.5 " + "|  | 85.50 | 10.0 | 120 +- 14 " * 2 + "|"


@pytest.mark.filterwarnings("ignore:there are 6 images, too few to hold some back")
def test_a_fitted_gate_is_measured_beside_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_fitting, "MARGIN", -100)  # a fitted one is kept, better or not
    for split in ("train", "val"):
        write_images(tmp_path / "data" / split)
    token = {"model__options__class_token": "true", "model__options__global_pool": "token"}
    config = smoke(model__gate="none", data__source=tmp_path / "data", data__workers=0, optim__batch_size=4, **token)
    train(config, tmp_path / "run", recipe="scenes", quiet=True)
    given = [tmp_path / "run", "--nums", 6, "--steps", 1, "--budgets", 2.5, "--out", tmp_path / "out.json"]
    monkeypatch.setattr(sys, "argv", ["fit_check.py", *map(str, given)])
    load_script("fit_check").main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert 0 <= found["dense"] <= 1
    kinds = [(row["method"], row["budget"]) for row in found["rows"]]
    assert kinds == [(name, kind) for name in ("shipped", "fitted, 6 images") for kind in ("free", "per_image")]
    assert all(abs(row["macs"] - 2.5) < 0.1 for row in found["rows"])  # the gate costs more than such a tiny host
    shipped, fitted = found["rows"][0], found["rows"][2]
    assert shipped["kl"] != fitted["kl"]
