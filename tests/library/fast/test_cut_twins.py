"""Captured steps without the gradient of cells whose fine tokens were trimmed, with graphs that need no GPU."""

import pytest
import torch
from compiled_pairs import pair, plainly, run
from tiny import assert_same, batch_of

from msvit.execution.layout import stop_cut_gradients


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("fake_graphs", ["buckets", "one graph"], indirect=True)
def test_captured_steps_stop_the_gradients_that_plain_ones_stop() -> None:
    model, fast = pair(mode="trimmed")
    image, mask = batch_of(model, 4)
    found = []
    for each in (plainly(model), lambda image, mask: run(fast, image, mask, learns=True)):
        own = mask.clone().requires_grad_()
        for _ in range(2):  # captured, then replayed
            own.grad = None
            out = each(image, mask=own)
            stop_cut_gradients(out.gate.mask, out.tokens.layout)
            out.logits.square().sum().backward()
        found.append(own.grad)
    assert_same([found[1]], [found[0]], 1e-4)
    assert torch.equal(found[0] == 0, found[1] == 0)
    assert (found[0] == 0).sum() > 0, "the second image is all coarse: not all fine tokens fit beside its coarse ones"
