"""Any budget without training: thresholds by images, by what was recorded of them, and a number of tokens per image."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import photo, pictures, share_of_dense
from cases import each_once
from PIL import Image
from tiny import KINDS, SWINS, assert_same_output, tiny_host, tiny_model
from torch import Tensor

import msvit
from msvit.budget.images import shuffled
from msvit.budget.thresholds import Cost

HOSTS = (KINDS[0], KINDS[1], KINDS[4], SWINS[0])  # one prefix token, five, pooling by attention, cells of a Swin


@torch.no_grad()
def spread_model(name: str = KINDS[0]) -> msvit.MSViT:
    """A tiny model whose gate has logits of variance 1, as a trained one has, in place of nearly equal ones."""
    torch.manual_seed(0)
    gate = msvit.LearnedGate(16 if name in SWINS else 8, grid=(4, 4), widths=(48, 48, 48))
    model = tiny_model(name, torch.float32, gate, img_size=64).eval()
    logits = model.gate(pictures(64, seed=9)).logits
    model.gate.head.weight.div_(logits.std())
    return model


@each_once(name=HOSTS, unit=["macs", "tokens"])
def test_a_budget_is_met_on_other_images(name: str, unit: str) -> None:
    model, size = spread_model(name), 128 if name in SWINS else 64
    seen, unseen = pictures(200, seed=1, size=size), pictures(200, seed=2, size=size)
    low, high = Cost(model, model.grid(seen), unit).by_count()[[0, -1]]
    budget, other = (float(min(low + place * (high - low), 1)) for place in (0.5, 0.75))
    threshold = model.gate.threshold
    found = msvit.calibrate(model, seen, budget, unit)
    assert (model.gate.threshold, model.gate.curves) == (threshold, ())
    assert share_of_dense(found, unseen, unit) == pytest.approx(budget, rel=0.02)
    moved = msvit.set_budget(found, other, unit)
    assert share_of_dense(moved, unseen, unit) == pytest.approx(other, rel=0.02)


def test_images_may_be_what_people_have(tmp_path: Path) -> None:
    model = spread_model()
    model.preprocessing = msvit.Preprocessing(64, mean=(0.5,) * 3, std=(0.5,) * 3)
    (tmp_path / "inside").mkdir()
    pils = [photo(seed) for seed in range(70)]  # more than a batch
    for index, pil in enumerate(pils):
        pil.save(tmp_path / "inside" / f"{index:02}.png")
    (tmp_path / "notes.txt").write_text("no image")
    pils[0].save(tmp_path / "00.tokens.png")  # a picture of msvit viz
    prepared = torch.stack([model.preprocessing(pil) for pil in pils])
    want = msvit.calibrate(model, prepared, 0.7).gate
    cases = {
        "a folder": str(tmp_path), "paths": sorted((tmp_path / "inside").iterdir()), "PIL images": pils,
        "lists of PIL images": [pils[:9], pils[9:]], "a dataset of PIL images": [(pil, 3) for pil in pils],
        "a dataset of tensors": [(image, 3) for image in prepared],
        "rows of a dataset": [{"image": pil, "label": 3} for pil in pils],
        "dicts": [{"pixel_values": part, "labels": 3} for part in prepared.split(9)],
        "what a processor returns": {"pixel_values": prepared}, "batches": iter(prepared.split(7)),
        "a loader": torch.utils.data.DataLoader([(image, 3) for image in prepared], batch_size=30),
    }  # fmt: skip
    for name, images in cases.items():
        got = msvit.calibrate(model, images, 0.7).gate
        assert (got.threshold, got.curves) == (pytest.approx(want.threshold), want.curves), name
    with pytest.warns(UserWarning, match=r"pixels are up to 2\d\d, but models take normalised ones"):
        msvit.calibrate(model, prepared * 127.5 + 127.5, 0.7)
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with pytest.warns(UserWarning, match=r"1 of 71 images were left out; the first: .*broken\.jpg"):
        assert msvit.calibrate(model, tmp_path, 0.7).gate.curves == want.curves
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"none of the 71 images of .* can be read; the first: .* cannot be read"):
        msvit.calibrate(model, tmp_path, 0.7)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images in it"):
        msvit.calibrate(model, tmp_path / "empty", 0.7)


@pytest.mark.filterwarnings("ignore:the divergence from the dense model")  # after one step of distill
@pytest.mark.parametrize(
    ("fit", "options"),
    [
        (msvit.fit_gate, {"steps": 1, "targets": "masks"}), (msvit.fit_reducer, {"trials": 0}),
        (msvit.distill, {"steps": 1, "batch_size": 4}),
    ],
)  # fmt: skip
def test_all_that_fits_takes_files_and_dicts(fit: Any, options: dict[str, Any], tmp_path: Path) -> None:
    model = spread_model()
    model.preprocessing = msvit.Preprocessing(64, mean=(0.5,) * 3, std=(0.5,) * 3)
    for seed in range(16):
        photo(seed).save(tmp_path / f"{seed}.png")
    of_files = fit(model, tmp_path, 0.8, **options).state_dict()
    prepared = torch.stack([model.preprocessing(Image.open(path)) for path in shuffled(sorted(tmp_path.iterdir()))])
    of_dicts = fit(model, [{"pixel_values": prepared}], 0.8, **options).state_dict()
    assert all(torch.equal(value, of_dicts[name]) for name, value in of_files.items())


def test_the_curve_is_saved_and_moves_the_budget_without_images(tmp_path: Path) -> None:
    model = msvit.calibrate(spread_model(), pictures(100, seed=1), 0.7)
    msvit.save(model, tmp_path / "model")
    msvit.save_gate(model.gate, tmp_path / "gate")
    want = msvit.set_budget(model, 0.55).gate.threshold
    assert want > model.gate.threshold
    assert msvit.set_budget(msvit.load(tmp_path / "model"), 0.55).gate.threshold == want
    gate = msvit.load_gate(tmp_path / "gate")
    assert gate.curves == model.gate.curves
    assert gate.for_cells(16).curves == gate.curves
    assert msvit.set_budget(model.with_options(gate=gate), 0.55).gate.threshold == want


def test_another_size_than_the_calibrated_one_is_warned_of() -> None:
    model = msvit.calibrate(spread_model(), pictures(50, seed=1), 0.7)
    with pytest.warns(UserWarning, match=r"those of images of 8x8 cells, and these have 4x4.* of 32x32px"):
        msvit.set_budget(model, 0.8, size=32)


@pytest.mark.parametrize("name", ["disc", "entropy", "gradient", "random", "default"])
def test_a_gate_by_name_meets_a_budget_from_the_start(name: str) -> None:
    host = tiny_host(dtype=torch.float32, img_size=64, embed_dim=128, depth=8)  # beside which the gate is small
    assert msvit.convert(host, gate=name).gate.coarse == 8
    low, high = (msvit.convert(host, gate=name, budget=budget, unit="tokens") for budget in (0.5, 0.7))
    images = pictures(20, seed=1)
    if name == "default":  # of photographs
        assert low.gate.threshold > high.gate.threshold
        assert low.gate.threshold == pytest.approx(0.0, abs=0.2), "a third of the cells of a photograph"
    else:
        assert share_of_dense(low, images, "tokens") == pytest.approx(0.5, abs=0.01)
        assert share_of_dense(msvit.calibrate(low, images, 0.7), images, "macs") == pytest.approx(0.7, abs=0.01)


def test_a_time_is_met_by_a_clock_that_counts_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that are no line: the cube of the number of tokens."""
    model, images, now, power = spread_model(), pictures(8, seed=1), [0.0], 3
    forward = msvit.MSViT.forward

    def timed_forward(self: msvit.MSViT, image: Tensor) -> msvit.MSViTOutput:
        out = forward(self, image)
        now[0] += 8 * 120 * (float(out.tokens.count.sum()) / (8 * 120)) ** power
        return out

    monkeypatch.setattr(msvit.MSViT, "forward", timed_forward)
    monkeypatch.setattr("msvit.budget.thresholds.ROUNDS", 2)
    monkeypatch.setattr("msvit.budget.thresholds.perf_counter", lambda: now[0])
    found = msvit.calibrate(model, images, 120e3, unit="ms")
    assert forward(found, images).tokens.count.double().mean().item() == pytest.approx(120, rel=0.01)
    coarse, fine = (120e3 * (num / 120) ** power for num in (64, 256))
    words = rf"{re.escape(f'{coarse:.4g}')} ms with all cells coarse and {re.escape(f'{fine:.4g}')} ms with all fine"
    with pytest.raises(ValueError, match=words):
        msvit.calibrate(model.with_options(gate=model.gate.with_settings().train()), images, 1.0, unit="ms")


@pytest.mark.parametrize("name", HOSTS)
def test_every_image_gets_the_same_number_of_tokens(name: str) -> None:
    model, images = spread_model(name), pictures(6, seed=1)
    least, more = model.backbone.num_tokens(torch.tensor([0, 1]), model.grid(images)).tolist()
    step = more - least
    for num in (5, 0):
        out = model(images, per_image=least + num * step + step - 1)  # rounded down
        assert out.tokens.count.tolist() == [least + num * step] * 6
        fine, logits = out.gate.mask > 0.5, out.gate.logits
        if num:
            assert all(logits[i][fine[i]].min() > logits[i][~fine[i]].max() for i in range(6))
    assert_same_output(out, model(images, mask=out.gate.mask), bound=1e-5)


@pytest.mark.parametrize("gate", ["disc", "entropy", "random", "all-coarse"])
def test_gates_without_weights_rank_cells_too(gate: str) -> None:
    model = msvit.convert(tiny_host(dtype=torch.float32, img_size=64), gate=gate).eval()
    images = pictures(3, seed=1)
    out = model(images, per_image=94)
    assert out.tokens.count.tolist() == [94] * 3
    if gate != "all-coarse":  # the share does not matter, but the ranks do
        wanted = model.with_options(gate=model.gate.with_settings(share=10 / 64))
        assert torch.equal(out.gate.mask, wanted.gate(images).mask)


def test_a_number_per_image_is_the_same_in_all_modes_compiled_and_in_a_segmenter() -> None:
    model, images = spread_model(), pictures(4, seed=1)
    with torch.no_grad():
        want = model(images, per_image=100)
        for other in (model.with_options(mode="masked"), model.with_options(mode="trimmed"), msvit.compile(model)):
            assert_same_output(other(images, per_image=100), want, bound=1e-5)
        host = tiny_host(dtype=torch.float32, img_size=64)
        segmenter = msvit.convert_segmenter(host, 3, gate="default", budget=0.8, unit="tokens")
        odd = pictures(4, seed=1)[:, :, :60, :50]
        assert segmenter.eval()(odd, per_image=80).tokens.count.tolist() == [80 - (80 - 56) % 3] * 4
        assert segmenter(odd, max_tokens=4 * 100).tokens.count.sum() <= 4 * 100


def test_a_segmenter_meets_a_budget_with_its_decoder() -> None:
    model = msvit.convert_segmenter(tiny_host(dtype=torch.float32, img_size=64), 3, gate="disc", budget=0.8).eval()
    images = pictures(3, seed=1)
    dense = msvit.convert_segmenter(model.host, 3, gate="all-fine")
    assert (model.macs(images) / dense.macs(images)).mean().item() == pytest.approx(0.8, abs=0.01)
