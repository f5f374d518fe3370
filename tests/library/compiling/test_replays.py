"""Captured calls, with graphs that need no GPU (the real ones: test_cuda.py)."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from compiled_pairs import REDUCERS, pair, plainly, run
from fake_graphs import FakeGraph
from timm.layers import LayerScale, RmsNorm
from tiny import KINDS, SWINS, assert_same, assert_same_output, batch_of, relative_error
from torch import Tensor

import msvit
from msvit.execution.attention import force_backend

pytestmark = pytest.mark.usefixtures("fake_graphs")


@pytest.mark.parametrize(
    ("fake_graphs", "name", "power"),
    [("buckets", name, 0.0) for name in (KINDS[0], KINDS[2], SWINS[0], *REDUCERS, "plain dynamicvit", "plain tome")]
    + [("buckets", name, 0.5) for name in (KINDS[4], "evit", "tome")]
    + [("one graph", name, 0.0) for name in (KINDS[1], SWINS[0], "plain evit")],
    indirect=["fake_graphs"],
)
def test_replays_give_what_the_model_gives(name: str, power: float) -> None:
    """With a reducer, and with every cell fine, when no slot is spare; origins and counts too."""
    plain, name = name.startswith("plain "), name.removeprefix("plain ")
    gate = {"gate": msvit.AllFine(coarse=8)} if plain else {}
    model, fast = pair(**gate, power=power, reducer=REDUCERS[name]()) if name in REDUCERS else pair(name, power=power)
    with torch.no_grad():
        for turn in range(3):
            image, _ = batch_of(model, 2)
            image, mask = image * (turn + 1), (torch.rand(2, 2, 2) < turn / 2).float()
            for given in (mask, None):  # None: by the gate
                with force_backend("sdpa"):
                    want = model(image, mask=given)
                got = run(fast, image, given)
                assert_same_output(got, want, 1e-5)
                assert got.tokens.layout.size is not None or want.tokens.layout.size is None, "heads attend by it"
            if plain:
                assert got.tokens.x.shape == want.tokens.x.shape, "no slot is spare"
    (plan,) = fast._plans.values()
    assert len(plan.captured) > 1 or plain
    fast(image).logits.sum().backward()  # nothing is captured where gradients are wanted
    assert model.host.patch_embed.proj.weight.grad is not None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, about NaN
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", [KINDS[0], "vit_base_patch16_gap_224", SWINS[0]])
def test_nan_of_one_image_shows_in_replays_and_leaves_the_others_alone(name: str, learns: bool) -> None:
    model, fast = pair(name)
    if learns and not fast.compiled_encoder.trains:
        pytest.skip("runs plainly in training")
    image, _ = batch_of(model, 3)
    wrong = image.clone()
    wrong[1, :, 0, 0] = torch.nan
    with torch.no_grad():
        want = model(image).logits
    for turn in range(3):  # captured, replayed
        got = run(fast, wrong if turn else image, learns=learns)
        assert got.logits.isnan().all(1).tolist() == [False, turn > 0, False]
        assert relative_error(got.logits[::2], want[::2]) < 1e-5
    torch.nn.init.constant_(model.gate.head.bias, torch.nan)
    assert run(fast, image, learns=learns).logits.isnan().all()


def test_a_reducer_that_takes_anothers_place_is_noticed() -> None:
    model, fast = pair(reducer=msvit.EViT(0.9, at=(0, 1)))
    image, _ = batch_of(model, 2)
    with torch.no_grad():
        run(fast, image)
        for reducer in (msvit.EViT(0.3, at=(0, 1)), None):
            fast, model = fast.with_options(reducer=reducer), model.with_options(reducer=reducer)
            assert_same_output(run(fast.eval(), image), model.eval()(image), 1e-5)


def test_a_gate_that_is_frozen_between_calls_draws_no_more() -> None:
    model, fast = pair(gate=msvit.LearnedGate(coarse=8, grid=(2, 2)))
    image, _ = batch_of(model, 3)
    fast.gate.train()
    first, second = (run(fast, image).gate.logits for _ in range(2))
    assert torch.equal(first, second)
    drawn = [run(fast, image).gate.sample for _ in range(2)]
    assert not torch.equal(*drawn)
    fast.gate.freeze()
    assert torch.equal(*(run(fast, image).gate.sample for _ in range(2)))


@pytest.mark.parametrize("learns", [False, True])
def test_a_layer_that_is_replaced_is_used_after_refresh(learns: bool) -> None:
    """With weights of its own or without."""
    model, fast = pair()
    image, mask = batch_of(model, 2)
    run(fast, image, mask, learns)
    for name, layer in (("ls1", LayerScale(32, init_values=0.3)), ("norm2", RmsNorm(32)), ("drop_path1", Doubled())):
        for each in (model, fast):
            setattr(each.host.blocks[0], name, layer)
        fast.refresh()
        assert not fast.compiled_encoder.adds_norms
        assert relative_error(run(fast, image, mask, learns).logits, plainly(model)(image, mask=mask).logits) < 1e-4


class Doubled(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def in_place(model: msvit.MSViT, fast: msvit.MSViT) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def moving_average(model: msvit.MSViT, fast: msvit.MSViT) -> None:
    """The usual loop of an exponential moving average, which PyTorch does not count as a write."""
    for parameter in model.parameters():
        parameter.data.mul_(0.9).add_(torch.ones_like(parameter), alpha=0.1)


def in_inference_mode(model: msvit.MSViT, fast: msvit.MSViT) -> None:
    with torch.inference_mode():
        in_place(model, fast)


def other_memory(model: msvit.MSViT, fast: msvit.MSViT) -> None:
    for parameter in model.parameters():
        parameter.data = 0.9 * parameter.data


def loaded(model: msvit.MSViT, fast: msvit.MSViT) -> None:
    others = {name: 0.9 * tensor for name, tensor in model.state_dict().items()}
    fast.load_state_dict(others, assign=True)
    model.load_state_dict(others)


@pytest.mark.parametrize("write", [in_place, moving_average, in_inference_mode, other_memory, loaded])
@pytest.mark.parametrize("name", [KINDS[0], SWINS[0]])
def test_changed_weights_change_the_result(name: str, write: Callable[[msvit.MSViT, msvit.MSViT], None]) -> None:
    """With a Swin, whose position biases are made beforehand, `refresh` after writes that are not counted."""
    model, fast = pair(name)
    image, mask = batch_of(model, 2)
    before = run(fast, image, mask).logits
    with torch.no_grad():
        write(model, fast)
        if name in SWINS and write in (moving_average, in_inference_mode):
            fast.refresh()
        want = model(image, mask=mask).logits
        assert relative_error(run(fast, image, mask).logits, want) < 1e-5
    assert relative_error(before, want) > 1e-3


@pytest.mark.parametrize("gate", ["learned", "context"])
def test_a_warm_call_does_not_walk_the_modules(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One image takes half a millisecond on a GPU: Python has time for a hundred calls, whatever the depth."""
    counts = []
    for depth in (2, 12):
        model, fast = pair(depth=depth, gate=msvit.gates.GATES[gate](coarse=8))
        image, _ = batch_of(model, 1)
        run(fast, image)
        with monkeypatch.context() as patch:
            patch.setattr(FakeGraph, "replay", lambda graph: None)
            counts.append(python_calls(lambda fast=fast, image=image: run(fast, image)))
    assert counts[0] == counts[1], "the number of Python calls depends on the number of blocks"
    assert counts[0] < 100


def python_calls(call: Callable[[], object]) -> int:
    """Calls of Python functions of msvit and torch. (Those of jaxtyping's checks are made in tests only.)"""
    ours, count = tuple(str(Path(module.__file__ or "").parent) for module in (msvit, torch)), 0

    def notice(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(ours)

    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_a_result_survives_the_next_call() -> None:
    model, fast = pair()
    image, mask = batch_of(model, 2)
    first = run(fast, image, mask)
    kept = first.logits.clone(), first.tokens.x.clone()
    run(fast, -image, 1 - mask)
    assert_same((first.logits, first.tokens.x), kept, 0)
