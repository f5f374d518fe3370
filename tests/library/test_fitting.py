"""What is fitted without labels to the dense model: a gate by fit_gate, all weights by distill, and what both leave."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from budgets import pictures, share_of_dense
from tiny import drawn_by_numpy, tiny_host, tiny_swin
from torch import Tensor

import msvit
from msvit.budget import distillation, gate_fitting, gate_targets
from msvit.budget.distillation import Distiller, Settings, Views, distill
from msvit.budget.divergence import dense_model, divergence, kl_divergence
from msvit.budget.gate_fitting import choose, fit_gate, random_crops, split, train_gate
from msvit.budget.gate_targets import Measures, pooling_attention
from msvit.gates import LogitGate
from msvit.heads.classify import attention_pool
from msvit.losses.targets import edge_cells
from msvit.model import inner_msvit
from msvit.reduction.attention_recorder import AttentionRecorder

VIT, SIGLIP, GAP = "vit_small_patch16_224", "vit_base_patch16_siglip_224", "vit_base_patch16_gap_224"


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_fitting, "BATCH", 64)
    monkeypatch.setattr(gate_targets, "NUM_MASKS", 4)
    monkeypatch.setattr(gate_targets, "NUM_GRADIENTS", 2)
    monkeypatch.setattr(distillation, "SMALLEST_CROP", 1.0)


def images(num: int = 24, seed: int = 1) -> Tensor:
    return pictures(num, seed, size=32)


def texture(image: Tensor) -> Tensor:
    """(b, hc, wc): the mean square of each cell of 8 px as shares of the image's."""
    cells = F.avg_pool2d(image.float().square().mean(1), 8)
    return cells / cells.sum((1, 2), keepdim=True)


class TextureGate(msvit.ContextGate):
    """Ranks cells by what they hold, or the other way round."""

    sign = 1

    def logits(self, image: Tensor) -> Tensor:
        return self.sign * texture(image) + 0 * self.head.bias


def new_gate(coarse: int = 8, kind: type[msvit.ContextGate] = msvit.ContextGate) -> msvit.ContextGate:
    torch.manual_seed(0)
    return kind(coarse, grid=(4, 4), widths=(16, 16, 16), depth=1)


def gated(name: str = VIT, gate: msvit.Gate | None = None, **options: Any) -> msvit.MSViT:
    host = tiny_host(name, torch.float32, img_size=32, **options)
    return msvit.convert(host, 8, gate or new_gate()).eval()


def segmenter() -> msvit.Segmenter:
    host = tiny_host(VIT, torch.float32, img_size=32)
    torch.manual_seed(0)
    return msvit.convert_segmenter(host, 3, gate=new_gate(), decoder="linear").eval()


def of_transformers(name: str) -> Any:
    tiny = pytest.importorskip("tiny_transformers")
    return msvit.convert(tiny.tiny_transformers(name, torch.float32, image_size=32), 8, new_gate()).eval()


KINDS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "class token": (gated, {"attention"}),
    "average pooling": (lambda: gated(GAP), {"distortion"}),
    "attention pooling": (lambda: gated(SIGLIP), {"pooling", "distortion"}),
    "bare encoder": (lambda: gated(num_classes=0), {"attention", "distortion"}),
    "Swin": (lambda: msvit.convert(tiny_swin(dtype=torch.float32), 16, new_gate(16)).eval(), {"distortion"}),
    "Segmenter": (segmenter, {"edges", "distortion"}),
    "transformers, attention pooling": (lambda: of_transformers("SiglipVisionModel"), {"pooling", "distortion"}),
    "transformers, not pooled": (lambda: of_transformers("Dinov2Model"), {"attention", "distortion"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_host_is_fitted_and_never_gets_worse(kind: str) -> None:
    make, own_targets = KINDS[kind]
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    side = 64 if kind == "Swin" else 32
    fitted = fit_gate(model, pictures(16, seed=1, size=side), budget=0.8, steps=2)
    record = fitted.gate.fit_record
    assert {*record.divergences} == {"given", "masks", "gradient"} | own_targets
    assert record.divergences[record.kept] <= record.divergences["given"]
    assert all(value > 0 for value in record.divergences.values())
    assert (record.num_fitted, record.num_held) == (12, 4)
    assert record.kept in str(record)
    assert type(fitted) is type(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("sign", [1, -1])
def test_the_gate_nearest_to_the_dense_model_is_kept_and_named(sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that rank cells upside down are not; nor are those of the same ranking as the given one."""
    model, every = gated(gate=new_gate(kind=TextureGate)), images(40)
    model.gate.sign = sign

    def train(gate: Any, views: Tensor, wanted: Tensor, loss: Any, steps: int, *rest: Any) -> Any:
        other = gate.with_settings(sign=-sign)
        return other if loss is F.mse_loss else gate.with_settings()

    monkeypatch.setattr(gate_fitting, "train_gate", train)
    monkeypatch.setattr(gate_fitting, "MARGIN", 1.0)  # ten images are few
    fitted = fit_gate(model, every, budget=0.6, steps=1, targets=["attention", "gradient"])
    record = fitted.gate.fit_record
    assert record.kept == ("given" if sign == 1 else "gradient")
    assert fitted.gate.sign == 1
    assert record.divergences["attention"] == record.divergences["given"]
    _, held_back = split(every, torch.Generator().manual_seed(0))
    with torch.no_grad():
        mixed = msvit.calibrate(model.with_options(gate=fitted.gate), held_back, 0.6)(held_back).logits
        dense = model.host(held_back)
    wanted = F.kl_div(mixed.log_softmax(1), dense.log_softmax(1), log_target=True, reduction="batchmean")
    assert record.divergences[record.kept] == pytest.approx(wanted.item(), rel=1e-4)
    assert share_of_dense(fitted, every, "macs") == pytest.approx(0.6, rel=0.02)
    assert len(fitted.gate.curves) == 1


def test_a_gate_must_win_by_two_and_a_half_standard_errors() -> None:
    given = torch.ones(16)
    noise = torch.tensor([-1.0, 1.0]).repeat(8)
    assert choose({"given": given, "a": given - 0.6 + noise}, 8).kept == "given"  # the standard error is 0.26
    assert choose({"given": given, "a": given - 0.7 + noise, "b": given - 0.1 + 0.1 * noise}, 8).kept == "a"
    assert choose({"given": given, "a": given * torch.nan}, 8).kept == "given"


@pytest.mark.parametrize("name", [VIT, GAP])
def test_measured_targets_rank_a_cell_with_detail_above_empty_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_targets, "NUM_MASKS", 64)
    monkeypatch.setattr(gate_targets, "NUM_GRADIENTS", 8)
    image, place, draw = torch.zeros(16, 3, 32, 32), torch.arange(16), np.random.default_rng(0)
    for index in range(16):
        row, column = index // 4 * 8, index % 4 * 8
        image[index, :, row : row + 8, column : column + 8] = torch.from_numpy(draw.choice([-3.0, 3.0], (3, 8, 8)))
    model = gated(name)
    drawn_by_numpy(model.gate)
    host: Any = drawn_by_numpy(model.host)
    host.pos_embed.data.zero_()  # empty cells are alike
    host.patch_embed.proj.weight.data *= 5
    measures = Measures(model, ("masks", "gradient"), 0.5, torch.Generator().manual_seed(0))
    for target, found in measures(image).items():
        rank = (found.flatten(1) > found.flatten(1).gather(1, place[:, None])).sum(1)
        assert (rank == 0).double().mean() > 0.4, (target, rank)  # by chance: 1 / 16


@torch.no_grad()
def test_attention_and_edges_are_those_of_the_dense_model() -> None:
    draw, image = torch.Generator().manual_seed(0), images(3)
    model, segments = gated(), segmenter()
    for each in (model, segments):  # a new gate makes all cells fine, as the dense model does
        each.gate.threshold = each.gate.scores(image).median().item()
    recorder = AttentionRecorder()
    msvit.convert(model.host, 8, msvit.AllFine(coarse=8), reducer=recorder).eval()(image)
    assert torch.equal(Measures(model, ["attention"], 0.5, draw)(image)["attention"], recorder.attention_map())
    found = Measures(segments, ["edges"], 0.5, draw)(image)["edges"]
    assert torch.equal(found, edge_cells(segments(image, mask=torch.ones(3, 4, 4)).logits.argmax(1), 8))
    assert 0 < found.mean() < 1
    many = torch.zeros(1, 300, 8, 16)  # classes 255 and 256 differ as any others do
    many[0, 255], many[0, 256, :, 8:] = 1, torch.arange(8) % 2 * 2.0
    assert edge_cells(many.argmax(1), 8, ignore=many.shape[1]).tolist() == [[[0, 1]]]


@torch.no_grad()
def test_pooling_attention_is_what_the_pooling_multiplies_values_with() -> None:
    model = gated(SIGLIP)
    pool, tokens = model.host.attn_pool, dense_model(model)(images(3)).tokens
    pool.num_heads, pool.mlp = 1, None
    values = torch.randn(3, 32, 4, 4, generator=torch.Generator().manual_seed(0))  # the same for all tokens of a cell
    each = F.interpolate(values, scale_factor=2).flatten(2).mT.flatten(0, 1)  # (tokens, d)
    pool.kv.register_forward_hook(lambda layer, given, kv: torch.cat([kv.chunk(2, -1)[0], each], -1))
    shares = 4 * pooling_attention(pool, tokens)[:, None]  # (b, 1, hc, wc)
    assert torch.allclose(attention_pool(pool, tokens), pool.proj((shares * values).sum((2, 3))), atol=1e-5)


def test_a_fitted_gate_learns_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_fitting, "LR", 1.5e-2)
    gate, views, draw = new_gate(), images(64).half(), torch.Generator().manual_seed(0)
    wanted = gate_targets.standardized(texture(views))
    fitted = train_gate(gate, views, wanted, F.mse_loss, 60, draw, lambda done: None)
    unseen = images(32, seed=2)
    with torch.no_grad():
        scores = [texture(unseen), gate.scores(unseen), fitted.scores(unseen)]
    correlation = torch.corrcoef(torch.stack(scores).flatten(1))[0]
    assert correlation[1] < 0.3 < 0.6 < correlation[2]


@torch.no_grad()
def test_padding_is_in_no_crop_and_no_target_and_a_cpu_takes_the_steps_that_the_docs_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    def train(gate: LogitGate, *rest: Any) -> LogitGate:
        given.extend(rest)
        return gate.with_settings()

    monkeypatch.setattr(gate_fitting, "train_gate", train)
    model, image = segmenter(), images(16)[:, :, :28]
    fit_gate(model, image, 0.8, targets=["edges"])
    views, wanted, _, steps, *_ = given
    assert steps == 100
    assert (views[12:] == 0).all((0, 1, 3)).tolist() == [False] * 28 + [True] * 4
    one = next(each for each in image if torch.equal(model.pad(each[None]).half(), views[:1]))[None]
    classes = model(one, mask=torch.ones(1, 4, 4)).logits.argmax(1)
    assert torch.equal(wanted[:1], edge_cells(classes, 8))


def always_fitted(found: dict[str, Tensor], num: int) -> gate_fitting.FitRecord:
    means = {name: values.mean().item() for name, values in found.items()}
    return gate_fitting.FitRecord([*found][-1], means, means, num, num)


@pytest.mark.filterwarnings("ignore:pixels are up to")
def test_precision_and_flags_of_the_gate_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """But it is trained in float32, and pixels may be larger than float16 holds."""
    monkeypatch.setattr(gate_fitting, "choose", always_fitted)
    dtypes: set[torch.dtype] = set()
    loss = lambda logits, wanted: dtypes.add(logits.dtype) or F.mse_loss(logits, wanted)  # noqa: E731
    monkeypatch.setitem(gate_fitting.LOSSES, "gradient", loss)
    model = gated().bfloat16()
    model.gate.train().requires_grad_(False).head.requires_grad_(True)
    fitted = fit_gate(model, 2.0**18 * images(16), 0.6, steps=1, targets=["gradient"]).gate
    assert {value.dtype for value in fitted.parameters()} == {torch.bfloat16}
    assert dtypes == {torch.float32}
    assert [name for name, weight in fitted.named_parameters() if weight.requires_grad] == ["head.weight", "head.bias"]
    assert fitted.training


def test_crops_are_parts_of_their_images() -> None:
    ramp = torch.linspace(0, 1, 64).expand(5, 1, 64, 64)
    image = torch.cat([ramp, ramp.mT], 1)
    crops = random_crops(image, torch.Generator().manual_seed(0))
    assert crops.shape == image.shape
    across, down = crops[:, 0], crops[:, 1]
    assert torch.allclose(across, across[:, :1].expand_as(across), atol=1e-5)
    width, height = across[:, 0, -1] - across[:, 0, 0], down[:, -1, 0] - down[:, 0, 0]
    assert torch.allclose(width, height, atol=1e-5)
    assert ((width > 0.5) & (width <= 1.01)).all()
    assert width.std() > 0.05


@pytest.mark.parametrize("terminal", [True, False])
def test_few_images_are_used_twice_with_a_warning_and_progress_is_shown(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar on a terminal, lines elsewhere, as in a notebook; nothing if it is switched off."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    for options in ({}, {"progress": False}):
        with pytest.warns(UserWarning, match="there are 4 images, too few to hold some back"):
            fitted = fit_gate(gated(), images(4), 0.6, steps=1, targets="masks", **options)
        found = capsys.readouterr().err
        assert bool(found) is (not options)
        if found:
            assert ("\r[####################] fit_gate, gate 1 of 1, masks: 100%" in found) is terminal
            assert "fit_gate, gate 1 of 1, masks: 100%, 0 s left" in found
    assert (fitted.gate.fit_record.num_fitted, fitted.gate.fit_record.num_held) == (4, 4)


# All weights distilled: how near a model gets to its dense self, and what is left alone.


@cache
def photos(num: int = 12) -> Tensor:
    """Four images again and again, so that a few steps suffice; smooth: coarse tokens hold as much as fine ones do."""
    coarse = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3, 4, 4))).float()
    return F.interpolate(coarse, size=32, mode="bilinear").repeat(num // 4, 1, 1, 1)


def drawn(model: Any) -> Any:
    """A model whose logits depend on all its tokens."""
    drawn_by_numpy(model.gate)
    for weight in drawn_by_numpy(model.host).parameters():
        weight.data *= 2
    return model


def classifier(**options: Any) -> msvit.MSViT:
    return drawn(gated()).with_options(**options).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "classifier": classifier,
    "encoder": lambda: drawn(gated(num_classes=0)),
    "segmenter": lambda: drawn(segmenter()),
    "transformers": lambda: drawn(of_transformers("ViTForImageClassification")),
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


@pytest.mark.parametrize("fit", [fit_gate, distill])
def test_neither_modes_of_the_caller_nor_the_global_generator_matter(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed gives the same weights, another one does not; what is returned can be trained, and set."""
    monkeypatch.setattr(gate_fitting, "choose", always_fitted)
    of_distill, of_gate = {"ema": 0.5, "lr": 3e-4, "batch_size": 8}, {"targets": ["gradient"]}
    options: dict[str, Any] = {"budget": 0.6, "steps": 6} | (of_distill if fit is distill else of_gate)
    model, every = classifier(), photos(40).clone().requires_grad_()

    def fitted(seed: int = 0) -> tuple[msvit.MSViT, Tensor]:
        found = fit(model, every, seed=seed, **options)
        return found, (found.host if fit is distill else found.gate).head.weight

    wanted, other = fitted()[1], fitted(seed=1)[1]
    torch.rand(3)
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        again, weight = fitted()
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(weight, wanted)
    assert not torch.equal(other, wanted)
    assert again(photos()).logits.sum().backward() is None
    again.gate.threshold = 0.25
    assert again.gate.threshold == 0.25
    if fit is fit_gate:
        compiled = fit_gate(msvit.compile(model), every, **options)
        assert isinstance(compiled, type(msvit.compile(model)))
        torch.testing.assert_close(compiled.gate.head.weight, wanted, rtol=0, atol=1e-4)


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


@pytest.mark.parametrize("chosen", [new_gate(), msvit.DiscGate(8)])
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
