"""The fused encoder in 16 bits: images by their address, parts that it does not know (its numbers: test_replays.py)."""

from dataclasses import replace

import pytest
import torch
from compiled_pairs import doubled, pair, plainly, run
from timm.layers import LayerScale
from tiny import assert_same_output, batch_of, relative_error

import msvit
from msvit.fast import gates as fast_gates
from msvit.fast.find_kernels import kernels

pytestmark = pytest.mark.usefixtures("fake_graphs")


@pytest.fixture(autouse=True)
def _gates_run_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_gates, "runs_kernels", lambda image: True)
    if kernels is not None:
        monkeypatch.setattr(kernels.gates, "MIN_CELLS", 1)


def test_decisions_and_logits_are_those_of_the_image_at_hand_wherever_it_lies() -> None:
    """Aligned ones are read by their address, unaligned ones and those of another memory format copied."""
    model, fast = pair(dtype="float16", gate=msvit.LearnedGate(coarse=8, grid=(2, 2), widths=(16, 16, 16)))
    image, _ = batch_of(model, 3)
    fast.gate.threshold = model.gate.scores(image).median().item()
    unaligned = torch.empty(1 + image.numel()).half()[1:].view(image.shape)
    channels_last = torch.empty_like(image, memory_format=torch.channels_last).half()
    for turn, memory in enumerate((image.half(), torch.empty_like(image).half(), unaligned, channels_last)):
        found = run(fast, memory.copy_(image))
        assert relative_error(found.gate.logits, model.gate.scores(image)) < 1e-2
        assert turn or 0 < found.gate.mask.mean() < 1
        assert_same_output(found, plainly(model)(image, mask=found.gate.mask), 1e-2)
        image = image.flip(0, 2) * 1.5


def test_layers_of_another_class_and_hooks_of_the_gate_have_their_say() -> None:
    model, fast = pair(dtype="float16")
    image, mask = batch_of(model)
    run(fast, image, mask)
    for each in (model, fast):
        each.host.blocks[0].mlp.fc2 = doubled(each.host.blocks[0].mlp.fc2)
    fast.refresh()
    assert_same_output(run(fast, image, mask), plainly(model)(image, mask=mask), 1e-2)
    fast.gate.register_forward_hook(lambda gate, args, out: replace(out, mask=torch.zeros_like(out.mask)))
    assert run(fast, image).gate.mask.sum() == 0


@pytest.mark.parametrize("coarse", [4, 16])
def test_a_gate_for_other_cells_raises(coarse: int) -> None:
    model, fast = pair(dtype="float16")
    fast.gate = msvit.LearnedGate(coarse=coarse, grid=(16 // coarse, 16 // coarse)).half().eval()
    with pytest.raises(ValueError, match=f"cells of {coarse}px, but coarse is 8px"):
        run(fast, batch_of(model, 3)[0])


def test_a_layer_scale_that_is_added_later_is_used_with_a_reducer_too() -> None:
    model, fast = pair("tome", "float16")
    for each in (model, fast):
        each.host.blocks[0].ls1 = LayerScale(32, init_values=0.5).to(each.host.pos_embed.dtype).eval()
    fast.refresh()
    image, mask = batch_of(model, 3)
    assert_same_output(run(fast, image, mask), plainly(model)(image, mask=mask), 1e-2)
