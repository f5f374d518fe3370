"""Schedules of merging: they meet the budget, and none that is kept is further from the dense model than ToMe's own."""

from typing import Any

import pytest
import torch
from tiny import images, tiny_host
from torch import Tensor, nn

import msvit
from msvit.budget import merge_schedules
from msvit.budget.divergence import total_variation
from msvit.budget.merge_schedules import stretched

DEPTH = 4


def host_of(name: str = "vit_small_patch16_224", **options: object) -> nn.Module:
    return tiny_host(name, torch.float32, depth=DEPTH, dynamic_img_size=True, **{"img_size": 32, **options})


def picture(num: int) -> Tensor:
    return images(num, 32, 32, dtype=torch.float32)


@pytest.mark.parametrize(("budget", "given"), [(0.85, None), (0.6, 6), (0.45, None)])
def test_the_budget_is_met_from_below(budget: float, given: int | None) -> None:
    host = host_of()
    model = msvit.convert(host, method="auto", budget=budget, images=None if given is None else picture(given))
    dense = msvit.macs(msvit.convert(host, gate="all-fine"), picture(2))
    assert budget - 0.05 < (msvit.macs(model, picture(2)) / dense).mean().item() <= budget


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_224", "vit_base_patch16_siglip_224", "vit_base_patch16_gap_224", "bare", "gate"]
)
def test_a_fitted_schedule_is_no_further_from_the_dense_model_than_a_constant_one(name: str) -> None:
    host = host_of(num_classes=0) if name == "bare" else host_of(name if "vit" in name else "vit_small_patch16_224")
    gate = msvit.LearnedGate(8, grid=(4, 4), threshold=3.0) if name == "gate" else "all-fine"
    model = msvit.convert(host, gate=gate).eval()
    fitted = msvit.fit_reducer(model, picture(6), budget=0.9 if name == "gate" else 0.6, trials=8)
    search = fitted.reducer.search
    assert 0 < search.distance <= search.constant
    assert search.num_images == 6
    assert model.reducer is None
    assert fitted.gate is model.gate
    torch.testing.assert_close(fitted.with_options(reducer=None)(picture(2)).logits, model(picture(2)).logits)


def test_the_search_finds_what_a_model_can_spare() -> None:
    """Where the last attention has no effect, tokens can be merged after the one before, and nowhere else."""
    host = host_of()
    with torch.no_grad():
        host.blocks[-1].attn.proj.weight.zero_()
    model = msvit.fit_reducer(msvit.convert(host, gate="all-fine").eval(), picture(6), budget=0.8, trials=60)
    assert model.reducer.r[:2] == (0, 0)
    assert model.reducer.search.distance < 1e-9 < model.reducer.search.constant


def test_a_schedule_that_is_clearly_worse_is_not_tried_on_all_images(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(*args: Any) -> Tensor:
        seen.append(len(args[2].logits))
        return total_variation(*args)

    monkeypatch.setattr(merge_schedules, "total_variation", counted)
    model, batch = msvit.convert(host_of(), gate="all-fine").eval(), picture(24)
    monkeypatch.setitem(merge_schedules.BATCH, "cpu", 24)
    whole = msvit.fit_reducer(model, batch, budget=0.6, trials=30)
    assert (num_whole := sum(seen)) == 24 * whole.reducer.search.trials  # in a single batch there is no rest
    seen.clear()
    monkeypatch.setitem(merge_schedules.BATCH, "cpu", 4)
    parted = msvit.fit_reducer(model, batch, budget=0.6, trials=30)
    assert sum(seen) < num_whole
    search = parted.reducer.search
    assert search.num_images == 24
    assert search.distance < search.constant


def test_a_compiled_model_is_fitted_as_the_model_it_was_made_from() -> None:
    model = msvit.convert(host_of(), gate="all-fine").eval()
    one, other = (msvit.fit_reducer(each, picture(4), budget=0.7, trials=4) for each in (model, msvit.compile(model)))
    assert type(other) is type(msvit.compile(model))
    assert one.reducer.r == other.reducer.r


def test_merging_after_the_last_attention_changes_no_class_token() -> None:
    host = host_of()
    model = msvit.convert(host, gate="all-fine", reducer=msvit.ToMe(r=(0, 0, 0, 32)))
    torch.testing.assert_close(model(picture(3)).logits, host(picture(3)))


def test_weights_of_twelve_blocks_serve_other_depths() -> None:
    shape = (0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert stretched(shape, 12) == shape
    assert stretched(shape, 4) == (0, 1, 4, 7)
    assert stretched(shape, 24) == tuple(weight for weight in shape for _ in range(2))
