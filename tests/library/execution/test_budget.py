"""A budget of tokens for the batch: shapes known beforehand, and the surest cells fine."""

import pytest
import torch
from tiny import KINDS, images, mixed_mask, relative_error, tiny_host

import msvit
from msvit.execution import limit_tokens, packed


@pytest.mark.parametrize("name", KINDS)
def test_a_budget_that_suffices_changes_nothing_but_the_number_of_slots(name: str) -> None:
    host, image, mask = tiny_host(name, dynamic_img_size=True), images(4), mixed_mask(4, 2, 2)
    model = msvit.convert(host, coarse=8)
    with torch.no_grad():
        want, got = model(image, mask=mask), model(image, mask=mask, max_tokens=100)
    assert relative_error(got.logits, want.logits) < 1e-12
    assert got.tokens.x.shape[0] == 100
    assert torch.equal(got.tokens.count, want.tokens.count)
    assert torch.equal(msvit.dense_map(got.tokens), msvit.dense_map(want.tokens))
    assert torch.equal(got.tokens.prefix, want.tokens.prefix)


@pytest.mark.parametrize("name", KINDS)
def test_spare_slots_leave_all_gradients_as_they_are(name: str) -> None:
    host, image, found = tiny_host(name, dynamic_img_size=True), images(4), []
    model = msvit.convert(host, coarse=8)
    for max_tokens in (None, 100):
        mask = mixed_mask(4, 2, 2).requires_grad_()
        host.zero_grad()
        model(image, mask=mask, max_tokens=max_tokens).logits.square().sum().backward()
        found.append([mask.grad, *[p.grad for p in host.parameters()]])
    assert all(relative_error(got, want) < 1e-9 for got, want in zip(*found, strict=True))


def test_too_small_a_budget_keeps_the_cells_the_gate_is_surest_of() -> None:
    sample = torch.tensor([[[0.9, 0.6], [0.8, 0.2]], [[0.7, 0.55], [0.1, 0.95]]])
    gate = msvit.GateOutput(logits=torch.logit(sample), fine_prob=sample, sample=sample, mask=(sample > 0.5).float())
    grid = msvit.ScaleGrid(8, 8, fine=2, coarse=4)
    least = 2 * (1 + 4)
    got = limit_tokens(gate, grid, least, per_cell=3, max_tokens=least + 3 * 3 + 2)  # room for three fine cells
    assert got.mask.tolist() == [[[1, 0], [1, 0]], [[0, 0], [0, 1]]]
    assert torch.equal(limit_tokens(gate, grid, least, 3, least).mask, torch.zeros(2, 2, 2))
    assert torch.equal(limit_tokens(gate, grid, least, 3, 1000).mask, gate.mask)


def test_cells_that_are_equally_sure_are_kept_evenly() -> None:
    gate, grid = msvit.GateOutput.from_mask(torch.ones(4, 2, 2)), msvit.ScaleGrid(8, 8, fine=2, coarse=4)
    got = limit_tokens(gate, grid, least=4 * 5, per_cell=3, max_tokens=4 * 5 + 8 * 3)
    assert got.mask.flatten(1).sum(1).tolist() == [2, 2, 2, 2]


def test_the_output_tells_what_was_decided_within_the_budget() -> None:
    model = msvit.convert(tiny_host(), coarse=8)
    with torch.no_grad():
        out = model(images(3), mask=torch.ones(3, 2, 2, dtype=torch.bool), max_tokens=3 * 5 + 7)
        again = model(images(3), mask=out.gate.mask)
    assert out.gate.mask.sum() == 2
    assert relative_error(out.logits, again.logits) < 1e-12


def test_a_layout_with_spare_slots_says_so() -> None:
    grid = msvit.ScaleGrid(8, 8, fine=2, coarse=4)
    layout = packed(msvit.GateOutput.from_mask(torch.zeros(2, 2, 2)), grid, num_prefix=1, slots=16)
    assert layout.has_padding
    assert layout.valid.tolist() == [True] * 10 + [False] * 6
    assert layout.cu_seqlens.tolist() == [0, 5, 10]
    assert layout.lengths == [5, 5]


@pytest.mark.parametrize(
    ("max_tokens", "mode", "words"), [(14, "packed", "pass at least"), (99, "masked", r"mode=.packed")]
)
def test_a_budget_that_cannot_be_is_refused(max_tokens: int, mode: str, words: str) -> None:
    model = msvit.convert(tiny_host(), coarse=8, mode=mode)
    with pytest.raises(ValueError, match=words):
        model(images(3), max_tokens=max_tokens)
