"""msvit.speed_up: from a dense model to a faster one, with what was measured; and the schedules of merging it fits."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import photo
from cases import each_once
from timm.data import resolve_model_data_config
from tiny import images, tiny_host, tiny_swin
from torch import Tensor, nn

import msvit
from msvit import speed
from msvit.budget import merge_schedules
from msvit.budget.divergence import total_variation
from msvit.budget.images import some_images
from msvit.budget.merge_schedules import stretched
from msvit.output import MSViTOutput
from msvit.speed import SpeedReport, speed_up

SIZE = 32
NUM = 12
IMAGE = images(NUM, SIZE, SIZE, torch.float32)


def host(name: str = "vit_small_patch16_224", **options: Any) -> nn.Module:
    return tiny_host(name, dtype=torch.float32, img_size=SIZE, depth=4, **options)


def transformers_host(name: str, **options: Any) -> Any:
    tiny = pytest.importorskip("tiny_transformers")
    return tiny.tiny_transformers(name, dtype=torch.float32, image_size=SIZE, num_hidden_layers=4, **options)


HOSTS: dict[str, Callable[[], nn.Module]] = {
    "classifier": host,
    "bare encoder": lambda: host(num_classes=0),
    "swin": lambda: tiny_swin(dtype=torch.float32),
    "ViT": lambda: transformers_host("ViTForImageClassification"),
    "ViT without classes": lambda: transformers_host("ViTModel"),
    "Dinov2": lambda: transformers_host("Dinov2Model"),
    "Siglip": lambda: transformers_host("SiglipVisionModel"),
    "Siglip without its head": lambda: transformers_host("SiglipVisionModel", vision_use_head=False),
}


@pytest.fixture(scope="module", autouse=True)
def few_trials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(merge_schedules.TRIALS, "cpu", 1)
        patch.setitem(merge_schedules.BATCH, "cpu", 4)  # what is clearly worse in one batch is not tried in the others
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(NUM):
        (tmp_path / f"class{index % 2}").mkdir(exist_ok=True)
        photo(index).save(tmp_path / f"class{index % 2}/{index:02}.png")
    return tmp_path


@each_once(name=HOSTS, source=["folder", "tensor"])
def test_every_host_from_a_folder_and_a_tensor(
    name: str, source: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = HOSTS[name]()
    before = {key: value.clone() for key, value in given.state_dict().items()}
    side = 64 if name == "swin" else SIZE
    image = images(NUM, side, side, torch.float32)
    budget = 0.8
    model = speed_up(given, folder if source == "folder" else image, budget=budget)
    report = model.speed_report
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines == str(report).splitlines()
    assert ("a Swin merges no tokens" in printed.err) == (name == "swin")
    assert len(lines) == 3
    classes = name in ("classifier", "swin", "ViT")
    assert lines[0].startswith("same class as" if classes else "cosine similarity")
    assert (report.num_images, report.compiled) == (3, True)
    assert 0 <= report.agreement <= 1.0001
    assert report.macs_share == pytest.approx(budget, abs=0.2 if name == "swin" else 0.05)
    assert report.ms > 0
    assert report.dense_ms > 0
    assert model.budget == (budget, "macs")
    assert not given.training
    assert all(torch.equal(before[key], value) for key, value in given.state_dict().items())
    noise = name == "swin" and source == "folder"  # to a gate that was calibrated by photographs
    with torch.no_grad(), pytest.warns(UserWarning, match="all cells of these") if noise else nullcontext():
        model(image)


@pytest.mark.parametrize("num_classes", [5, 0])
def test_the_model_is_that_of_convert_with_the_images_that_were_not_held_back(num_classes: int) -> None:
    """It is compared with the host on the others: by their classes, or by the cosine of their features."""
    given = host(num_classes=num_classes)
    model = speed_up(given, IMAGE, budget=0.7, verbose=False)
    order = torch.randperm(NUM, generator=torch.Generator().manual_seed(0))
    held, fitted = IMAGE[order[:3]], IMAGE[order[3:]]
    other = msvit.convert(given, method="auto", budget=0.7, images=fitted)
    assert model.reducer.config == other.reducer.config
    assert model.reducer.search.num_images == len(fitted)
    with torch.inference_mode():
        found, want = model(held).logits, given(held)
        torch.testing.assert_close(found, other(held).logits)
    same = (found.argmax(1) == want.argmax(1)).double() if num_classes else F.cosine_similarity(found, want)
    assert model.speed_report.agreement == pytest.approx(same.mean().item(), abs=1e-5)
    assert num_classes or same.mean() < 0.9999
    dense = msvit.macs(msvit.convert(given, gate="all-fine"), held)
    assert model.speed_report.macs_share == pytest.approx((msvit.macs(other, held) / dense).mean().item())


def test_no_more_images_are_used_than_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not needed to choose by are compared, up to a number; no others are read."""
    monkeypatch.setitem(speed.HELD_BACK, "cpu", 5)
    monkeypatch.setitem(speed.MAX_IMAGES, "cpu", 6)
    model = speed_up(host(), (batch for _ in range(2) for batch in (IMAGE, IMAGE)), budget=0.7, verbose=False)
    assert (model.reducer.search.num_images, model.speed_report.num_images) == (6, 5)


def test_a_host_in_training_mode_is_copied_and_the_model_is_saved_and_loaded(tmp_path: Path) -> None:
    given = host().train()
    model = speed_up(given, IMAGE, budget=0.8, verbose=False)
    assert given.training
    assert not model.training
    assert model.host is not given
    loaded = msvit.load(msvit.save(model, tmp_path)).eval()
    assert msvit.compile(loaded).speed_report == loaded.speed_report == model.speed_report
    assert loaded.with_options(mode="masked").speed_report is None
    with torch.inference_mode():
        torch.testing.assert_close(loaded(IMAGE).logits, model(IMAGE).logits)


def test_times_are_medians_of_both_in_turn_and_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock goes on by 1, 2, 3, ... ms, and is read before and after each run."""
    now = accumulate(count(1))
    monkeypatch.setattr("msvit.budget.thresholds.perf_counter", lambda: next(now) / 1e3)
    report = speed_up(host(), IMAGE, 0.8, verbose=False).speed_report
    assert capsys.readouterr() == ("", "")
    assert report.batch_size == 3
    assert (report.dense_ms, report.ms) == (pytest.approx(14 / 3), pytest.approx(16 / 3))


def test_the_report_says_what_was_compared_and_where() -> None:
    report = SpeedReport(0.977, True, 0.6, 1.214, 2.341, 256, 64, "cuda", True)
    assert str(report).splitlines() == [
        "same class as the dense model: 97.7%, 95% interval 95.0% to 98.9% (256 images held back)",
        "multiply-adds: 60.0% of the dense model's",
        "ms per image: 1.21 compiled, dense uncompiled 2.34 (cuda, batches of 64)",
    ]
    assert "(cuda, batches of 64); not faster: too small" in str(replace(report, dense_ms=1.2))


def test_what_is_not_compiled_stays_eager_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    given = host().double()
    model = speed_up(given, images(NUM, SIZE, SIZE), 0.8)
    assert type(model) is msvit.MSViT
    assert "it runs uncompiled: " in capsys.readouterr().err
    assert not model.speed_report.compiled
    speed_up(given, images(NUM, SIZE, SIZE), 0.8, verbose=False)
    assert capsys.readouterr() == ("", "")


def test_cores_that_others_use_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of a product on two threads and on one."""
    threads: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for together, busy in ((1.0, False), (2.0, True)):
        clock = {2: together, 1: 2.0}
        monkeypatch.setattr(speed, "time_values", lambda run, values, rounds, clock=clock: [
            run(value) or clock[value] for value in values
        ])  # fmt: skip
        assert ("OMP_NUM_THREADS" in (speed.busy_cores() or "")) == busy
    assert threads == [2, 1, 2, 2, 1, 2], "as before at the end"


def test_the_first_batch_of_its_user_is_the_first_that_is_checked() -> None:
    with torch.no_grad(), pytest.warns(UserWarning, match="pixels are up to"):
        speed_up(host(), IMAGE, 0.8, verbose=False)(100 * IMAGE)


def test_images_are_taken_in_random_order_and_no_more_than_needed(folder: Path) -> None:
    """Of what kind they may be: test_budget_api.py."""
    model = msvit.convert(host(), gate="all-fine")
    prepare: Any = model.preprocessing
    wanted, paths = torch.stack([prepare(photo(index)) for index in range(NUM)]), sorted(folder.rglob("*.png"))
    for given in (folder, paths, wanted):
        same = (some_images(model, given, 100)[:, None] == wanted[None]).flatten(2).all(2)
        assert same.sum(0).eq(1).all()
        assert same.sum(1).eq(1).all()
        assert not same.diagonal().all()
    assert len(some_images(model, (wanted for _ in count()), 10)) == 10


def test_files_are_prepared_as_the_published_models_were() -> None:
    colours = {"ViTModel": 0.5, "SiglipVisionModel": 0.5, "Dinov2Model": 0.485, "CLIPVisionModel": 0.48145466}
    for name, mean in colours.items():
        model = msvit.convert(transformers_host(name), gate="all-fine")
        assert (model.preprocessing.size, model.preprocessing.mean[0]) == (SIZE, mean)
        found = resolve_model_data_config(model.msvit)
        assert (found["input_size"], found["mean"][0], found["crop_pct"]) == ((3, SIZE, SIZE), mean, 1.0)
        assert len(some_images(model.msvit, [photo()] * NUM, 100)) == NUM


def test_a_host_of_unknown_preprocessing_needs_one_for_files(folder: Path) -> None:
    given = host()
    given.pretrained_cfg = None
    with pytest.raises(ValueError, match=r"not known, .* pass preprocessing=msvit\.Preprocessing"):
        speed_up(given, folder)
    own = msvit.Preprocessing(size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
    model = speed_up(given, folder, 0.8, preprocessing=own, verbose=False)
    assert (model.speed_report.num_images, model.preprocessing) == (3, own)


# Schedules of merging: they meet the budget, and none that is kept is further from the dense model than ToMe's own.


@pytest.mark.parametrize(("budget", "num"), [(0.85, None), (0.6, 6), (0.45, None)])
def test_the_budget_is_met_from_below(budget: float, num: int | None) -> None:
    given = host()
    model = msvit.convert(given, method="auto", budget=budget, images=num and IMAGE[:num])
    dense = msvit.macs(msvit.convert(given, gate="all-fine"), IMAGE[:2])
    assert budget - 0.05 < (msvit.macs(model, IMAGE[:2]) / dense).mean().item() <= budget


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_224", "vit_base_patch16_siglip_224", "vit_base_patch16_gap_224", "bare", "gate"]
)
def test_a_fitted_schedule_is_no_further_from_the_dense_model_than_a_constant_one(name: str) -> None:
    given = host(num_classes=0) if name == "bare" else host(name if "vit" in name else "vit_small_patch16_224")
    gate = msvit.LearnedGate(8, grid=(4, 4), threshold=3.0) if name == "gate" else "all-fine"
    model = msvit.convert(given, gate=gate).eval()
    fitted = msvit.fit_reducer(model, IMAGE[:6], budget=0.9 if name == "gate" else 0.6, trials=8)
    search = fitted.reducer.search
    assert 0 < search.distance <= search.constant
    assert search.num_images == 6
    assert model.reducer is None
    assert fitted.gate is model.gate
    torch.testing.assert_close(fitted.with_options(reducer=None)(IMAGE[:2]).logits, model(IMAGE[:2]).logits)


def test_the_search_finds_what_a_model_can_spare() -> None:
    """Where the last attention has no effect, tokens can be merged after the one before, and nowhere else."""
    given = host()
    with torch.no_grad():
        given.blocks[-1].attn.proj.weight.zero_()
    model = msvit.fit_reducer(msvit.convert(given, gate="all-fine").eval(), IMAGE[:6], budget=0.8, trials=60)
    assert model.reducer.r[:2] == (0, 0)
    assert model.reducer.search.distance < 1e-9 < model.reducer.search.constant


def test_a_schedule_that_is_clearly_worse_is_not_tried_on_all_images(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(model: msvit.MSViT, wanted: MSViTOutput, output: MSViTOutput) -> Tensor:
        seen.append(len(output.logits))
        return total_variation(model, wanted, output)

    monkeypatch.setattr(merge_schedules, "total_variation", counted)
    model = msvit.fit_reducer(msvit.convert(host(), gate="all-fine").eval(), IMAGE, budget=0.6, trials=20)
    assert len(IMAGE) < sum(seen) < 0.9 * len(IMAGE) * model.reducer.search.trials


def test_a_schedule_that_is_better_by_chance_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are equally far from the dense model but for noise: that by rule is kept."""
    draw = torch.Generator().manual_seed(0)
    monkeypatch.setattr(merge_schedules, "total_variation", lambda *_: torch.rand(len(IMAGE), generator=draw))
    monkeypatch.setattr(merge_schedules, "WORSE", torch.inf)
    plain = msvit.convert(host(), gate="all-fine").eval()

    def found(trials: int, seed: int) -> object:
        return msvit.fit_reducer(plain, IMAGE, 0.6, trials, seed).reducer.r

    simple = merge_schedules.merge_by_rule(plain, 0.6).reducer.r, found(0, 0)
    assert sum(found(24, seed) in simple for seed in range(8)) >= 6


def test_images_that_come_sorted_do_not_hide_a_better_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half is a little worse with any other schedule, the second half much better."""
    model = msvit.convert(host(), gate="all-fine").eval()
    first = model(IMAGE[: NUM // 2]).logits

    def scripted(model: msvit.MSViT, wanted: MSViTOutput, output: MSViTOutput) -> Tensor:
        if max(model.reducer.r[:-1]) - min(model.reducer.r[:-1]) <= 1:
            return torch.full((len(wanted.logits),), 0.5)
        return torch.where(torch.cdist(wanted.logits, first).min(1).values < 1e-4, 0.52, 0.1)

    monkeypatch.setattr(merge_schedules, "total_variation", scripted)
    search = msvit.fit_reducer(model, IMAGE, budget=0.6, trials=20).reducer.search
    assert (search.constant, search.distance) == pytest.approx((0.5, 0.31))


def test_a_compiled_model_is_fitted_as_the_model_it_was_made_from() -> None:
    model = msvit.convert(host(), gate="all-fine").eval()
    one, other = (msvit.fit_reducer(each, IMAGE[:4], budget=0.7, trials=4) for each in (model, msvit.compile(model)))
    assert type(other) is type(msvit.compile(model))
    assert one.reducer.r == other.reducer.r


def test_merging_after_the_last_attention_changes_no_class_token() -> None:
    given = host()
    model = msvit.convert(given, gate="all-fine", reducer=msvit.ToMe(r=(0, 0, 0, 32)))
    torch.testing.assert_close(model(IMAGE[:3]).logits, given(IMAGE[:3]))


def test_weights_of_twelve_blocks_serve_other_depths() -> None:
    shape = (0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert stretched(shape, 12) == shape
    assert stretched(shape, 4) == (0, 1, 4, 7)
    assert stretched(shape, 24) == tuple(weight for weight in shape for _ in range(2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", HOSTS)
def test_on_a_gpu(name: str, folder: Path) -> None:
    given = HOSTS[name]().cuda()
    model = speed_up(given, folder, 0.8, verbose=False)
    assert model.speed_report.device == "cuda"
    assert model.speed_report.compiled
    side = 64 if name == "swin" else SIZE
    with torch.inference_mode():
        model(images(NUM, side, side, torch.float32).cuda())
