"""A budget of tokens for the batch: shapes known beforehand, and the surest cells fine."""

import pytest
import torch
from tiny import KINDS, SWINS, assert_same, assert_same_output, batch_of, gradients, tiny_model

import msvit
from msvit.execution import limit_tokens


@pytest.mark.parametrize("name", [*KINDS, SWINS[0]])
def test_a_budget_that_suffices_changes_nothing_but_the_number_of_slots(name: str) -> None:
    """Values, and the gradients of the mask and of all weights."""
    model, found = tiny_model(name), []
    for max_tokens in (None, 100 if name in KINDS else 4096):
        image, mask = batch_of(model)
        mask.requires_grad_()
        out = model(image, mask=mask, max_tokens=max_tokens)
        found.append((out, gradients(out.logits, mask, model.backbone)))
    (want, grads), (got, spare_grads) = found
    assert_same(spare_grads, grads)
    assert_same_output(got, want, 1e-12)
    if name in KINDS:
        assert got.tokens.x.shape[0] == 100
        assert torch.equal(got.tokens.prefix, want.tokens.prefix)
        assert torch.equal(msvit.dense_map(got.tokens), msvit.dense_map(want.tokens))


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
    got = limit_tokens(gate, grid, min_tokens=4 * 5, per_cell=3, max_tokens=4 * 5 + 8 * 3)
    assert got.mask.flatten(1).sum(1).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(("name", "least", "per_cell"), [(KINDS[0], 5, 3), (SWINS[0], 16, 15)])
def test_the_output_tells_what_was_decided_within_the_budget(name: str, least: int, per_cell: int) -> None:
    """With all cells coarse an image has `least` tokens, with one fine `per_cell` more."""
    model = tiny_model(name)
    image, mask = batch_of(model)
    max_tokens = 4 * least + 3 * per_cell - 1
    with torch.no_grad():
        out = model(image, mask=torch.ones_like(mask), max_tokens=max_tokens)
        again = model(image, mask=out.gate.mask)
        none = model(image, mask=torch.zeros_like(mask), max_tokens=max_tokens)  # with room that nobody wants
        assert_same_output(none, model(image, mask=torch.zeros_like(mask)), 1e-12)
    assert out.gate.mask.sum() == 2
    assert_same_output(out, again, 1e-12)
    with pytest.raises(ValueError, match=f"{4 * least} tokens with all cells coarse; pass at least that"):
        model(image, max_tokens=4 * least - 1)
