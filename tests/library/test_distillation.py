"""A model that learns without labels to answer as its dense self: how near it gets, and what it leaves alone."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import drawn_by_numpy, tiny_host
from torch import Tensor

import msvit
from msvit.budget import distillation
from msvit.budget.distillation import Distiller, Settings, Views, distill
from msvit.budget.divergence import dense_model, divergence, kl_divergence
from msvit.model import inner_msvit


@pytest.fixture(autouse=True)
def whole_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "SMALLEST_CROP", 1.0)


@cache
def photos(num: int = 12) -> Tensor:
    """Four images again and again, so that a few steps suffice; smooth: coarse tokens hold as much as fine ones do."""
    coarse = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3, 4, 4))).float()
    return F.interpolate(coarse, size=32, mode="bilinear").repeat(num // 4, 1, 1, 1)


def gate() -> msvit.Gate:
    return drawn_by_numpy(msvit.ContextGate(8, grid=(4, 4), widths=(16, 16, 16), depth=1))


def host(**options: Any) -> Any:
    """One whose logits depend on all its tokens."""
    made: Any = drawn_by_numpy(tiny_host(dtype=torch.float32, img_size=32, **options))
    for weight in (*made.blocks.parameters(), *made.head.parameters()):
        weight.data *= 2
    return made


def classifier(**options: Any) -> msvit.MSViT:
    return msvit.convert(host(), 8, **({"gate": gate()} | options)).eval()


def of_transformers() -> Any:
    tiny = pytest.importorskip("tiny_transformers")
    model = drawn_by_numpy(tiny.tiny_transformers("ViTForImageClassification", torch.float32, image_size=32))
    for weight in model.parameters():
        weight.data *= 2
    return msvit.convert(model, 8, gate()).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "classifier": classifier,
    "encoder": lambda: msvit.convert(host(num_classes=0), 8, gate()).eval(),
    "segmenter": lambda: msvit.convert_segmenter(host(), 3, gate=gate(), decoder="linear").eval(),
    "transformers": of_transformers,
    "ToMe": lambda: classifier(reducer=msvit.ToMe(r=4)),
}


@torch.no_grad()
def distance(model: Any, other: Any) -> float:
    """Of a model from the dense version of another one, on images of the training."""
    model, other = (inner_msvit(each) or each for each in (model, other))
    return divergence(other, dense_model(other)(photos()), model(photos())).mean().item()


@pytest.mark.parametrize("name", MODELS)
def test_one_model_gets_nearer_to_the_dense_one_at_several_budgets(name: str) -> None:
    model = MODELS[name]()
    before, budgets = {name: value.clone() for name, value in model.state_dict().items()}, (0.5, 0.7)
    result = distill(model, photos(), budget=budgets[0], steps=25, lr=2e-3, batch_size=8, budgets=budgets)
    assert type(result) is type(model)
    for budget in budgets:
        one, other = (msvit.calibrate(each, photos(), budget) for each in (model, result))
        assert distance(other, model) < 0.7 * distance(one, model)
    assert result.distillation.after < result.distillation.before
    assert (result.distillation.num_images, result.distillation.num_held_back) == (11, 1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(result.gate.head.weight, model.gate.head.weight)
    own, given = ({value.data_ptr() for value in (inner_msvit(each) or each).parameters()} for each in (result, model))
    assert own.isdisjoint(given)


def test_a_model_whose_only_reduction_is_a_reducer_is_distilled_as_it_is() -> None:
    model = classifier(gate=msvit.AllFine(8), reducer=msvit.EViT(rate=0.3, at=(0,)))
    drawn = [msvit.EViT(rate=rate, at=(0,)) for rate in (0.3, 0.5)]  # in training mode
    result = distill(model, photos(40), steps=25, lr=1e-3, batch_size=8, reducers=drawn)
    assert distance(result, model) < 0.7 * distance(model, model)


def test_the_same_seed_gives_the_same_weights_whatever_the_caller_does() -> None:
    settings: dict[str, Any] = {"budget": 0.6, "steps": 6, "ema": 0.5, "lr": 3e-4, "batch_size": 8}
    one, other = (distill(classifier(), photos(40), seed=seed, **settings).host.head.weight for seed in (0, 1))
    model, images = classifier(), photos(40).clone().requires_grad_()
    torch.rand(3)
    state = torch.get_rng_state()
    with torch.inference_mode():
        same = distill(model, [(images, None)], **settings)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one, same.host.head.weight)
    assert not torch.equal(one, other)
    assert same(photos()).logits.sum().backward() is None  # it can be trained further


def test_weights_that_got_no_nearer_are_given_up_with_a_warning() -> None:
    model = classifier()
    with pytest.warns(UserWarning, match="the weights stay as they were"):
        result = distill(model, photos(), 0.6, steps=2, lr=0.3)
    assert result.distillation.after > result.distillation.before
    assert torch.equal(result.host.head.weight, model.host.head.weight)
    assert result.host is not model.host


def test_a_loss_that_is_no_number_ends_it() -> None:
    with pytest.raises(FloatingPointError, match="try a smaller lr"):
        distill(classifier(), photos(), 0.6, steps=3, lr=1e30)


def test_precision_and_what_is_frozen_stay() -> None:
    model = classifier().double()
    model.host.patch_embed.requires_grad_(False)
    result = distill(model, photos(), 0.6, steps=1, lr=1e-5)
    found = {name: (value.dtype, value.requires_grad) for name, value in result.named_parameters()}
    assert found == {name: (value.dtype, value.requires_grad) for name, value in model.named_parameters()}
    assert not result.training
    assert all(weight.grad is None for weight in model.parameters())


@torch.no_grad()
def test_a_temperature_softens_both_answers_and_scales_the_loss_by_its_square() -> None:
    model = classifier()
    wanted, output = dense_model(model)(photos()), model(photos(), mask=torch.zeros(12, 4, 4))
    found = Distiller(model, model.grid(photos()), 10, Settings(temperature=3.0)).losses(output, wanted)[1]
    torch.testing.assert_close(found, 9 * kl_divergence(wanted.logits / 3, output.logits / 3).mean())


@pytest.mark.parametrize("chosen", [gate(), msvit.DiscGate(8)])
def test_masks_have_the_number_of_fine_cells_that_was_drawn(chosen: msvit.Gate) -> None:
    model = classifier(gate=chosen)
    distiller = Distiller(model, model.grid(photos()), 10, Settings(budgets=(0.5, 0.8)))
    with torch.no_grad():
        for num in (0.0, 3.0, 7.0, 16.0):
            plain, noisy = (distiller.draw_mask(photos(), num, jitter) for jitter in (False, True))
            assert plain.sum() == noisy.sum() == 12 * num
            assert torch.equal(plain, noisy) == (num in (0, 16))
    with_gate, dense = model.gate.num_macs(16), model.backbone.dense_macs(model.grid(photos()))
    costs = [model.macs(photos(), distiller.draw_mask(photos(), num, False)) for num in distiller.num_fine]
    shares = [(cost.double().mean().item() + with_gate) / dense for cost in costs]
    assert shares[0] == pytest.approx(0.5, abs=0.06)
    assert shares[-1] == pytest.approx(0.8, abs=0.06)


def test_an_epoch_has_views_of_all_images_but_those_held_back_and_half_of_them_are_mirrored() -> None:
    ramp = torch.linspace(0, 1, 32).expand(3, 32, 32)
    views = Views([torch.stack([number + ramp for number in range(50)])], torch.device("cpu"), batch_size=9, seed=0)
    epochs = [torch.cat([views.batch(step) for step in range(first, first + 5)]) for first in (0, 5)]
    held_back = {int(image.min()) for image in torch.cat(views.held_back())}
    assert len(held_back) == 5
    for epoch in epochs:
        assert {int(image.mean()) for image in epoch} == {*range(50)} - held_back
        assert 0.2 < (epoch[:, 0, 0, 0] > epoch[:, 0, 0, -1]).double().mean() < 0.8
    assert not torch.equal(*epochs)
    assert torch.equal(views.batch(3), epochs[0][27:36])  # a step's views follow from its number
