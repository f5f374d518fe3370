"""A gate fitted to a model without labels: what it learns, what it leaves alone, and what cannot be fitted."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import pictures, share_of_dense
from tiny import tiny_host, tiny_model
from torch import Tensor

import msvit
from msvit import gate_fitting
from msvit.gate_fitting import attention, edges, fit_gate, random_crops, train_gate
from msvit.losses.targets import attention_loss, edge_cells
from msvit.reduction.attention_recorder import AttentionRecorder

STEPS = 80


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_fitting, "BATCH", 16)
    monkeypatch.setattr(gate_fitting, "LR", 1.5e-2)


def texture(image: Tensor) -> Tensor:
    """(b, hc, wc): the mean square of each cell of 8 px, padding not counted, as shares of the image's."""
    cells = F.avg_pool2d(image.float().square().mean(1), 8, ceil_mode=True)
    return cells / cells.sum((1, 2), keepdim=True)


def gated(gate: msvit.Gate | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> msvit.MSViT:
    torch.manual_seed(0)
    gate = gate or msvit.ContextGate(8, grid=(8, 8), widths=(16, 16, 16), depth=1)
    return tiny_model(options.pop("name", "vit_small_patch16_224"), dtype, gate, img_size=64, **options).eval()


def tiny_segmenter(num_classes: int = 3) -> msvit.Segmenter:
    torch.manual_seed(0)
    gate = msvit.ContextGate(8, grid=(8, 8), widths=(16, 16, 16), depth=1)
    host = tiny_host("vit_small_patch16_224", torch.float32, img_size=64)
    return msvit.convert_segmenter(host, num_classes=num_classes, gate=gate, decoder="linear").eval()


def ranks_alike(scores: Tensor, wanted: Tensor) -> float:
    """The correlation of ranks within images, mean over them."""
    ranked = [each.flatten(1).argsort(1).argsort(1).double() for each in (scores, wanted)]
    one, other = (each - each.mean(1, keepdim=True) for each in ranked)
    return F.cosine_similarity(one, other, dim=1).mean().item()


def snapshot(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_fitted_gate_ranks_the_cells_of_other_images_as_its_target_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny host with random weights attends to nothing in particular, so that the target is another here."""
    monkeypatch.setattr(gate_fitting, "attention", lambda model: texture)
    model, unseen = gated(), pictures(32, seed=2)
    before = snapshot(model)
    fitted = fit_gate(model, pictures(64, seed=1), budget=0.6, steps=STEPS)
    with torch.no_grad():
        assert ranks_alike(fitted.gate.scores(unseen), texture(unseen)) > 0.7
        assert ranks_alike(model.gate.scores(unseen), texture(unseen)) < 0.5
    assert share_of_dense(fitted, pictures(64, seed=1), "macs") == pytest.approx(0.6, rel=0.02)
    assert len(fitted.gate.curves) == 1
    assert fitted.host is model.host
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_the_target_is_what_the_dense_model_does() -> None:
    model, segmenter, image = gated(), tiny_segmenter(), pictures(3, seed=1)
    for each in (model, segmenter):  # a new gate makes all cells fine, as the dense model does
        each.gate.threshold = each.gate.scores(image).median().item()
    recorder = AttentionRecorder()
    dense = msvit.convert(model.host, 8, msvit.AllFine(coarse=8), reducer=recorder).eval()
    dense(image)
    assert torch.equal(attention(model)(image), recorder.seen())
    classes = segmenter(image, mask=torch.ones(3, 8, 8)).logits.argmax(1)
    assert torch.equal(edges(segmenter)(image), edge_cells(classes, 8))
    assert 0.05 < edges(segmenter)(image).mean() < 0.95


@torch.no_grad()
def test_a_segmenter_may_have_more_classes_than_labels_of_a_data_set() -> None:
    """Of which 255 is ignored: classes 254 to 256 differ as any others do."""
    model, image = tiny_segmenter(300), pictures(3, seed=1)
    few = tiny_segmenter(3)
    for own, other in zip(model.decoder.parameters(), few.decoder.parameters(), strict=True):
        own[254:257] = other
    bias = model.decoder.classify.bias
    bias[:254] = bias[257:] = -100
    assert torch.equal(edges(model)(image), edges(few)(image))
    assert 0.05 < edges(model)(image).mean() < 0.95


@torch.no_grad()
def test_padding_is_in_no_crop_and_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    monkeypatch.setattr(gate_fitting, "train_gate", lambda gate, *rest: given.extend(rest[:2]) or gate)
    model, image, fine = tiny_segmenter(2), pictures(8, seed=1)[:, :, :60], torch.ones(8, 8, 8)
    features = msvit.dense_map(model(image, mask=fine).tokens)  # (b, d, 16, 16): the last row is padding
    inside, outside = features[:, :, :15].mean((0, 2, 3)), features[:, :, 15].mean((0, 2))
    model.decoder.classify.weight.copy_(torch.stack([inside - outside, outside - inside]))  # padding has its own class
    model.decoder.classify.bias.copy_(model.decoder.classify.weight @ (inside + outside) / -2)
    fit_gate(model, image, 0.7, steps=1)
    views, wanted = given
    assert torch.equal(views[:8], model.pad(image).half())
    assert (views[8:] == 0).all((0, 1, 3)).tolist() == [False] * 60 + [True] * 4
    classes = model(image, mask=fine).logits.argmax(1)
    assert torch.equal(wanted[:8], edge_cells(classes, 8))
    padded = model(model.pad(image), mask=fine).logits.argmax(1)
    assert edge_cells(padded, 8)[:, -1].mean() > wanted[:8, -1].mean() + 0.1


def test_a_compiled_model_is_fitted_as_the_model_it_was_made_from() -> None:
    model = gated()
    one, other = (fit_gate(each, pictures(8, seed=1), 0.6, steps=2) for each in (model, msvit.compile(model)))
    assert type(other) is type(msvit.compile(model))
    assert torch.allclose(one.gate.head.weight, other.gate.head.weight, atol=1e-4)
    assert not torch.allclose(model.gate.head.weight, other.gate.head.weight, atol=1e-3)


@pytest.mark.parametrize("caller", ["inference mode", "autocast", "images with gradients"])
def test_the_modes_of_the_caller_change_nothing(caller: str) -> None:
    images = pictures(8, seed=1)
    wanted = fit_gate(gated(), images, 0.6, steps=2).gate.head.weight
    model = gated()
    images = images.clone().requires_grad_(caller == "images with gradients")
    with (
        torch.inference_mode(caller == "inference mode"),
        torch.autocast("cpu", torch.bfloat16, enabled=caller == "autocast"),
    ):
        fitted = fit_gate(model, images, 0.6, steps=2)
    assert torch.equal(fitted.gate.head.weight, wanted)
    assert fitted(images).logits.sum().backward() is None  # and it can be trained
    fitted.gate.threshold = 0.25
    assert fitted.gate.threshold == 0.25


def test_views_are_in_memory_once_and_have_targets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the gate is trained: not also the batches that they were made of."""
    num_bytes = []

    def train(gate: Any, views: Tensor, wanted: Tensor, *given: Any) -> Any:
        assert len(views) == 16
        assert torch.allclose(texture(views), wanted, atol=1e-4)
        assert not torch.allclose(wanted[:8], wanted[8:], atol=1e-3)
        halves = (each for each in gc.get_objects() if type(each) is Tensor and each.dtype is torch.float16)
        num_bytes.append((sum(each.nbytes for each in halves if each.shape[1:] == views.shape[1:]), views.nbytes))
        return gate

    monkeypatch.setattr(gate_fitting, "train_gate", train)
    monkeypatch.setattr(gate_fitting, "attention", lambda model: texture)
    fit_gate(gated(), pictures(8, seed=1), 0.6, steps=1)
    assert num_bytes[0][0] == num_bytes[0][1]


def test_pixels_may_be_larger_than_float16_holds() -> None:
    """A ContextGate's logits are the same for a multiple of an image."""
    model, images = gated(), pictures(8, seed=1)
    one, other = (fit_gate(model, scale * images, 0.6, steps=2).gate for scale in (1, 2.0**18))
    assert torch.allclose(one.head.weight, other.head.weight, atol=1e-3)


def test_the_same_seed_gives_the_same_gate_and_leaves_the_global_one_alone() -> None:
    models = [gated() for _ in range(3)]
    state = torch.get_rng_state()
    pairs = zip(models, (0, 0, 1), strict=True)
    found = [fit_gate(model, pictures(8, seed=1), 0.6, steps=2, seed=seed) for model, seed in pairs]
    assert torch.equal(state, torch.get_rng_state())
    one, same, other = (snapshot(each.gate) for each in found)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


@torch.no_grad()
def test_a_segmenter_is_fitted_as_a_binary_classifier_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    def strong(image: Tensor) -> Tensor:
        return (texture(image) > 1 / 64).float()

    monkeypatch.setattr(gate_fitting, "edges", lambda model: strong)
    model, unseen = tiny_segmenter(), pictures(32, seed=2)
    fitted = fit_gate(model, [(pictures(64, seed=1)[:, :, :60], None)], budget=0.7, steps=STEPS)  # padded to 64 px
    assert type(fitted) is msvit.Segmenter
    found = fitted.encoder.gate.scores(unseen) > 0
    assert (found == strong(unseen).bool()).double().mean() > 0.8


@pytest.mark.parametrize("name", ["vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3"])
def test_weights_in_16_bits_and_a_frozen_gate_stay_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the gate is trained in float32."""
    dtypes = set()

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        dtypes.add(logits.dtype)
        return attention_loss(logits, target)

    monkeypatch.setattr(gate_fitting, "attention_loss", loss)
    model = gated(name=name).bfloat16()
    model.gate.freeze()
    fitted = fit_gate(model, pictures(8, seed=1), 0.6, steps=2)
    assert {value.dtype for value in fitted.gate.parameters()} == {torch.bfloat16}
    assert dtypes == {torch.float32}
    assert fitted.gate.frozen
    assert fitted(pictures(2, seed=2).bfloat16()).logits.isfinite().all()


def test_targets_are_mirrored_with_their_images() -> None:
    class TextureGate(msvit.ContextGate):
        def compute_logits(self, image: Tensor) -> Tensor:
            return texture(image) + 0 * self.head.bias

    mirrored = []

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        assert torch.allclose(logits, target, atol=1e-6)
        mirrored.append(bool(not (target[:, None] == wanted).all((2, 3)).any()))
        return logits.sum()

    views = pictures(4, seed=1).half()
    wanted = texture(views)
    train_gate(TextureGate(8), views, wanted, loss, 12, torch.Generator().manual_seed(0))
    assert set(mirrored) == {False, True}


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


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"gate": msvit.DiscGate(8)}, {}, "has no weights to fit"),
    ({"name": "vit_base_patch16_siglip_224"}, {}, "has no class token; keep the gate"),
    ({}, {"images": pictures(0, seed=1)}, "there are no images"),
    ({}, {"images": torch.full((2, 3, 64, 64), torch.nan)}, "NaN or infinite pixels"),
    ({}, {"steps": 0}, "steps is 0"),
    ({}, {"seed": 0.5}, "seed is 0.5"),
    ({}, {"budget": 0.01}, "pass a number between them"),
]


@pytest.mark.parametrize(("model", "arguments", "words"), BAD)
def test_what_cannot_be_fitted_is_said_before_the_training(
    model: dict[str, Any], arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_fitting, "train_gate", lambda *given: pytest.fail("was trained first"))
    with pytest.raises(ValueError, match=words):
        fit_gate(gated(**model), **({"images": pictures(4, seed=1), "budget": 0.6, "steps": 1} | arguments))


@pytest.mark.parametrize("part", ["", "backbone.host.blocks.1"])
def test_a_model_with_parts_in_training_mode_is_not_fitted(part: str) -> None:
    model = gated()
    model.get_submodule(part).train()
    with pytest.raises(ValueError, match=r"model.eval\(\) first"):
        fit_gate(model, pictures(4, seed=1), 0.6, steps=1)
    assert model.get_submodule(part).training


def test_what_was_frozen_or_in_training_mode_of_the_gate_stays_so() -> None:
    model = gated()
    model.gate.train().freeze().head.requires_grad_(True)
    fitted = fit_gate(model, pictures(4, seed=1), 0.6, steps=1).gate
    assert [name for name, weight in fitted.named_parameters() if weight.requires_grad] == ["head.weight", "head.bias"]
    assert fitted.training
    assert not fit_gate(gated(), pictures(4, seed=1), 0.6, steps=1).gate.training
