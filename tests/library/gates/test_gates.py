"""Gates decide; the learned one can learn."""

import pytest
import torch
from cases import each_once

import msvit
from msvit import losses
from msvit.gates.logits import decide
from msvit.gates.ranking import top_num


def test_the_learned_gate_starts_with_all_cells_fine_and_costs_what_the_paper_says() -> None:
    gate = msvit.LearnedGate(coarse=32).eval()
    out = gate(torch.randn(4, 3, 224, 224))
    assert out.mask.min() == 1
    assert 0.9 < out.fine_prob.mean() < 0.98
    assert round(gate.num_macs(49) / 1e9, 3) == 0.017


def test_evaluation_is_deterministic_and_training_is_not() -> None:
    gate, image = msvit.LearnedGate(coarse=8, grid=(4, 4)), torch.randn(8, 3, 32, 32)
    gate.head.bias.data.zero_()
    assert not torch.equal(gate(image).mask, gate(image).mask)
    assert torch.equal(gate.eval()(image).mask, gate(image).mask)
    gate.train().requires_grad_(False)
    assert torch.equal(gate(image).mask, gate(image).mask)


def test_the_mask_is_hard_and_its_gradient_is_that_of_the_sample() -> None:
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2))
    out = gate(torch.randn(4, 3, 16, 16))
    assert set(out.mask.detach().unique().tolist()) <= {0.0, 1.0}
    hard = torch.autograd.grad(out.mask.sum(), out.logits, retain_graph=True)[0]
    soft = torch.autograd.grad(out.sample.sum(), out.logits)[0]
    torch.testing.assert_close(hard, soft)


def test_noise_makes_a_decision_fine_as_often_as_its_probability_says() -> None:
    logits = torch.tensor([-2.0, 0.0, 1.5])[:, None, None].expand(3, 100, 100)
    share = decide(logits, noise=1.0).mask.mean((1, 2))
    torch.testing.assert_close(share, torch.sigmoid(logits[:, 0, 0]), atol=0.02, rtol=0)


def test_cells_above_the_threshold_are_fine_whatever_it_is_probabilities_stay() -> None:
    logits = torch.tensor([[[-1.0, 0.5, 2.0]]])
    out = decide(logits, threshold=0.5)
    assert out.mask.tolist() == [[[0, 0, 1]]]
    assert torch.equal(out.fine_prob, logits.sigmoid())


def test_of_cells_with_equal_scores_the_first_are_fine() -> None:
    assert top_num(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]), 2).tolist() == [[[1, 1], [0, 0]]]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", [msvit.DiscGate, msvit.RandomGate, msvit.EntropyGate, msvit.GradientGate])
def test_a_share_is_kept_to_the_cell(kind: type[msvit.Gate], share: float) -> None:
    mask = kind(coarse=8, share=share).eval()(torch.randn(3, 3, 40, 56)).mask
    assert mask.sum((1, 2)).tolist() == [round(share * 35)] * 3


def test_the_disc_is_centred() -> None:
    mask = msvit.DiscGate(coarse=8, share=0.3)(torch.randn(1, 3, 56, 56)).mask[0]
    far = [(r, c) for r in range(7) for c in range(7) if mask[r, c] and (r - 3) ** 2 + (c - 3) ** 2 > 5]
    assert mask[3, 3] == 1
    assert not far


@pytest.mark.parametrize("kind", [msvit.EntropyGate, msvit.GradientGate])
def test_saliency_finds_the_texture_whatever_its_brightness(kind: type[msvit.Gate]) -> None:
    image = torch.full((2, 3, 32, 32), 0.5)
    image[0, :, 8:16, 16:24] += 0.3 * torch.randn(3, 8, 8)
    image[1, :, 8:16, 16:24] -= 0.3 * torch.rand(3, 8, 8)
    mask = kind(coarse=8, share=1 / 16)(image).mask
    assert mask[:, 1, 2].tolist() == [1, 1]
    assert kind(coarse=8, threshold=1e-3)(torch.zeros(1, 3, 32, 32)).mask.sum() == 0
    image[0, :, 0, 0], image[0, :, 9, 9] = torch.nan, torch.inf  # pixels that are no numbers
    assert kind(coarse=8, share=0.5)(image).mask.sum((1, 2)).tolist() == [8, 8]


@each_once(name=losses.LOSSES, what=["fine_prob", "sample"])
def test_each_loss_moves_the_share_of_fine_cells_towards_the_target(name: str, what: str) -> None:
    """From all fine towards 0.25. The target is a pull, not a promise."""
    options = {"grid": (4, 4)} if name == "gbas" else {}
    loss = losses.LOSSES[name](target=0.25, **options)
    gate = msvit.LearnedGate(coarse=8, grid=(4, 4), widths=(16, 16, 16))
    optimizer = torch.optim.SGD([*gate.parameters(), *loss.parameters()], lr=1.0)
    held_out = torch.randn(64, 3, 32, 32)
    assert gate.eval()(held_out).mask.mean() == 1
    gate.train()
    for _ in range(150):
        optimizer.zero_grad()
        loss(getattr(gate(torch.randn(16, 3, 32, 32)), what)).backward()
        optimizer.step()
    assert 0.02 < gate.eval()(held_out).fine_prob.mean() < 0.5


@pytest.mark.parametrize("kind", [msvit.LearnedGate, msvit.ContextGate])
def test_a_gate_for_other_cells_sees_them_alike_keeps_its_precision_and_stays_frozen(kind: type[msvit.Gate]) -> None:
    """Up to how cells are resized: the paper's gate, which interpolates pixels, gets a constant image."""
    gate = kind(coarse=8, grid=(2, 2)).double().requires_grad_(False).eval()
    for weight in (gate.head.weight, gate.position):
        torch.nn.init.normal_(weight)
    other = gate.for_cells(4)
    assert (other.coarse, other.frozen, other.training) == (4, True, False)
    image = torch.randn(2, 3, 12, 20, dtype=torch.float64)
    image = image.new_ones(image.shape) if kind is msvit.LearnedGate else image
    twice = torch.nn.functional.interpolate(image, scale_factor=2, mode="nearest")
    logits = other(image).logits
    assert (logits.shape, logits.dtype) == ((2, 3, 5), torch.float64)
    torch.testing.assert_close(logits, gate(twice).logits)
    assert logits.std() > 0.1


@pytest.mark.parametrize("kind", [msvit.LearnedGate, msvit.ContextGate])
def test_logits_under_autocast_rank_images_as_in_float32(kind: type[msvit.LearnedGate]) -> None:
    """In bfloat16 a new gate's logits, all near 3, would have two or three values among 16 images."""
    gate, image = kind(8, grid=(2, 2)), torch.randn(16, 3, 16, 16).cumsum(2).cumsum(3) / 16
    with torch.no_grad():
        want = gate(image).logits.flatten(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = gate(image).logits.flatten(1)
    assert got.dtype is torch.float32
    for ours, exact in zip(got.T, want.T, strict=True):
        assert len(ours.unique()) == 16
        ranks = torch.stack([ours.argsort().argsort(), exact.argsort().argsort()]).float()
        assert torch.corrcoef(ranks)[0, 1] > 0.9
