"""The fused trunk of the usual ViT in 16 bits, with graphs that need no GPU (the real ones: test_cuda.py)."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_pairs import REDUCERS, model_of, plainly, run
from tiny import KINDS, assert_same_output, batch_of, relative_error
from torch import Tensor

import msvit
from msvit.compiling import cuda
from msvit.compiling.fused_plan import FusedPlan
from msvit.compiling.fused_trunk import run_fused_block
from msvit.execution.attention import force_backend
from msvit.execution.fused import kernels
from msvit.gates import fast as fast_gates

pytestmark = pytest.mark.usefixtures("fake_graphs")

FUSED = (KINDS[0], KINDS[1], KINDS[4], KINDS[5])


def halves(name: str, **options: Any) -> tuple[msvit.MSViT, cuda.CudaMSViT]:
    """A model in 32 bits, and the same in 16, compiled."""
    model = model_of(name, **options)
    with torch.no_grad():
        for parameter in model.parameters():  # biases, positions and layer scales are 0 or constant at first
            parameter.add_(0.2 * torch.randn_like(parameter))
            parameter.copy_(parameter.half())
    return model, cuda.CudaMSViT(deepcopy(model).half(), inductor=False)


@pytest.mark.parametrize(
    ("fake_graphs", "name", "power"),
    [("one graph", FUSED[0], 0.5), *(("buckets", name, 0.0) for name in FUSED[:3])],
    indirect=["fake_graphs"],
)
def test_the_fused_trunk_gives_what_the_model_gives_whatever_was_predicted(name: str, power: float) -> None:
    model, fast = halves(name, power=power)
    assert fast.fused is not None
    image, mask = batch_of(model, 3)  # whose slots with all cells fine are no whole number of buckets
    given = [torch.zeros_like(mask), torch.ones_like(mask), None, mask, None]  # predicted too small, then too large
    for each in given:
        wanted = plainly(model)(image, mask=each)
        found = run(fast, image.half(), None if each is None else each.half())
        assert_same_output(found, wanted, 1e-2)
    (made,) = fast._plans.values()
    assert isinstance(made, FusedPlan)


def test_a_gate_whose_kernels_read_the_image_decides_for_the_image_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """These read it by its address, so that it need not be copied where a graph expects it."""
    model, fast = halves(KINDS[0], gate=msvit.LearnedGate(coarse=8, grid=(2, 2), widths=(16, 16, 16)))
    monkeypatch.setattr(fast_gates, "runs_kernels", lambda image: True)
    monkeypatch.setattr(kernels.gates, "LEAST_CELLS", 1)
    image, _ = batch_of(model, 3)
    fast.gate.threshold = model.gate.scores(image).median().item()
    for turn in range(3):
        found = run(fast, image.half())
        assert relative_error(found.gate.logits, model.gate.scores(image)) < 1e-2
        assert turn or 0 < found.gate.mask.mean() < 1
        assert_same_output(found, plainly(model)(image, mask=found.gate.mask), 1e-2)
        image = image.flip(0, 2) * (turn + 2)
    (made,) = fast._plans.values()
    assert isinstance(made, FusedPlan)
    assert made.image is None


def test_images_of_another_memory_format_and_unaligned_ones_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their strides and alignment are not those that kernels were captured for."""
    model, fast = halves(KINDS[0], gate=msvit.LearnedGate(coarse=8, grid=(2, 2), widths=(16, 16, 16)))
    monkeypatch.setattr(fast_gates, "runs_kernels", lambda image: True)
    monkeypatch.setattr(kernels.gates, "LEAST_CELLS", 1)
    image, _ = batch_of(model, 3)
    unaligned = torch.empty(1 + image.numel()).half()[1:].view(image.shape)
    others = (unaligned, torch.empty_like(image, memory_format=torch.channels_last).half())
    run(fast, image.half())
    for other in others:
        image = image.flip(0, 2)
        found = run(fast, other.copy_(image))
        assert_same_output(found, plainly(model)(image, mask=found.gate.mask), 1e-2)
    (made,) = fast._plans.values()
    assert made.address is not None


def test_a_hook_on_the_gate_has_its_say(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = halves(KINDS[0], gate=msvit.LearnedGate(coarse=8, grid=(2, 2), widths=(16, 16, 16)))
    monkeypatch.setattr(fast_gates, "runs_kernels", lambda image: True)
    fast.gate.register_forward_hook(lambda gate, args, out: replace(out, mask=torch.zeros_like(out.mask)))
    image, _ = batch_of(model, 3)
    assert run(fast, image.half()).gate.mask.sum() == 0


@pytest.mark.parametrize("coarse", [4, 16])
def test_a_gate_for_other_cells_raises(coarse: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = halves(KINDS[0])
    monkeypatch.setattr(fast_gates, "runs_kernels", lambda image: True)
    fast.gate = msvit.LearnedGate(coarse=coarse, grid=(16 // coarse, 16 // coarse)).half().eval()
    with pytest.raises(ValueError, match=f"cells of {coarse}px, but coarse is 8px"):
        run(fast, batch_of(model, 3)[0].half())


@pytest.mark.parametrize("name", REDUCERS)
def test_fused_blocks_reduce_as_the_model_does(name: str) -> None:
    model, fast = halves(KINDS[0], reducer=REDUCERS[name]())
    assert fast.trunk.block_function is run_fused_block
    for image, mask in (batch_of(model), batch_of(model, 3)):
        wanted = plainly(model)(image, mask=mask)
        assert_same_output(run(fast, image.half(), mask.half()), wanted, 1e-2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, about NaN
@pytest.mark.parametrize("name", [None, "tome"])
def test_nan_stays_in_its_image_and_its_batch_in_the_fused_trunk(name: str | None) -> None:
    model, fast = halves(KINDS[0], reducer=REDUCERS[name]() if name else None)
    image, mask = batch_of(model)
    wanted = plainly(model)(image, mask=mask).logits
    wrong = image.clone()
    wrong[0, :, 0, 0] = torch.nan
    for each, is_nan in ((image, False), (wrong, True), (image, False)):
        found = run(fast, each.half(), mask.half()).logits
        assert found.isnan().all(1).tolist() == [is_nan, False, False, False]
        assert relative_error(found[1:], wanted[1:]) < 1e-2
    torch.nn.init.constant_(fast.gate.head.bias, torch.nan)
    assert run(fast, image.half()).logits.isnan().all(), "no decision"


@pytest.mark.parametrize("name", [*FUSED[:2], "tome"])
def test_the_fused_trunk_notices_weights_that_change(name: str) -> None:
    model, fast = halves(KINDS[0], reducer=REDUCERS[name]()) if name in REDUCERS else halves(name)
    image, mask = batch_of(model)
    run(fast, image.half(), mask.half())
    with torch.no_grad():
        for old, new in zip(model.parameters(), fast.parameters(), strict=True):
            old.copy_(0.9 * old)
            new.copy_(old)
    assert_same_output(run(fast, image.half(), mask.half()), plainly(model)(image, mask=mask), 1e-2)


@pytest.mark.parametrize("change", ["another layer", "a part that trains", "another backend"])
def test_what_the_fused_trunk_would_not_see_is_run_without_it(change: str) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model, fast = halves(KINDS[0])
    image, mask = (t.half() for t in batch_of(model))
    run(fast, image, mask)
    layers = fast.host.blocks[0].mlp
    if change == "another layer":
        other = Doubled(layers.fc2.in_features, layers.fc2.out_features, dtype=torch.float16)
        other.load_state_dict(layers.fc2.state_dict())
        layers.fc2 = other.eval()
    elif change == "a part that trains":
        layers.drop1.train()
    fast.refresh()
    fast._plans.clear()
    with force_backend("varlen" if change == "another backend" else "triton"):
        plan = fast._plan(image, learns=False)
    assert not isinstance(plan, FusedPlan)


def test_a_plan_keeps_its_gate_so_that_no_other_gets_its_id() -> None:
    model, fast = halves(KINDS[0])
    image = batch_of(model)[0].half()
    run(fast, image)
    (plan,) = fast._plans.values()
    assert plan.gate is fast.gate


@pytest.mark.parametrize("name", [KINDS[2], KINDS[3]])
def test_other_blocks_are_not_fused(name: str) -> None:
    assert halves(name)[1].fused is None
