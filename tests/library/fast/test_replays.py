"""Compiled models give what the model gives, with graphs that need no GPU (the real ones: test_cuda.py)."""

import cProfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_pairs import REDUCERS, doubled, model_of, pair, plainly, run
from fake_graphs import FakeGraph
from timm.layers import LayerScale, RmsNorm
from tiny import KINDS, SWINS, assert_same, assert_same_output, batch_of, relative_error

import msvit
from msvit.fast import cuda, fp8_encoder
from msvit.fast import gates as fast_gates
from msvit.fast.find_kernels import kernels

pytestmark = pytest.mark.usefixtures("fake_graphs")


HALF = (KINDS[0], KINDS[1], KINDS[2], KINDS[4], *REDUCERS)  # in float16; all but the third have a fused encoder
BOUNDS = {"float32": 1e-5, "float16": 1e-2, "fp8": 0.2, "fp8, not rounded": 0.03}


@pytest.fixture
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rounding to three bits hides errors of scales, biases and residuals: these show where it is left out."""
    if request.param == "fp8, not rounded":
        monkeypatch.setattr(fp8_encoder, "FP8", torch.float32)
    return request.param


@pytest.mark.parametrize(
    ("fake_graphs", "dtype", "name", "power"),
    [("buckets", "float32", name, 0.0) for name in (KINDS[0], KINDS[2], SWINS[0], *REDUCERS, "plain tome")]
    + [("buckets", "float32", name, 0.5) for name in (KINDS[4], "evit", "tome")]
    + [("one graph", "float32", name, 0.0) for name in (KINDS[1], SWINS[0], "plain evit")]
    + [("buckets", "float16", name, 0.0) for name in HALF]
    + [("one graph", "float16", KINDS[0], 0.5), ("buckets", "fp8", KINDS[1], 0.0)]
    + [("buckets", "fp8, not rounded", name, 0.0) for name in (KINDS[0], KINDS[1], KINDS[4])]
    + [("one graph", "fp8, not rounded", KINDS[1], 0.0)],
    indirect=["fake_graphs", "dtype"],
)
def test_replays_give_what_the_model_gives(dtype: str, name: str, power: float) -> None:
    """More tokens than in the call before, and fewer. With a reducer and every cell fine ("plain") no slot is spare."""
    plain, name = name.startswith("plain "), name.removeprefix("plain ")
    model, fast = pair(name, dtype, power=power, **({"gate": msvit.AllFine(coarse=8)} if plain else {}))
    for turn, share in enumerate((0.0, 1.0, 0.5)):
        image, _ = batch_of(model, 3)  # whose slots with all cells fine are no whole number of buckets
        image, mask = image.roll(turn, 3), (torch.rand(3, 2, 2) < share).float()
        for given in (mask, None) if "fp8" not in dtype else (mask,):  # None: by the gate
            with torch.no_grad():
                want = plainly(model)(image, mask=given)
            got = run(fast, image, given)
            assert_same_output(got, want, BOUNDS[dtype])
            assert got.tokens.layout.size is not None or want.tokens.layout.size is None, "heads attend by it"
        assert not plain or got.tokens.x.shape == want.tokens.x.shape, "no slot is spare"
    if dtype == "float32":
        fast(image).logits.sum().backward()  # nothing is captured where gradients are wanted
        assert model.host.patch_embed.proj.weight.grad is not None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, about NaN
@pytest.mark.parametrize(
    ("dtype", "name", "learns"),
    [("float32", name, False) for name in (KINDS[0], KINDS[5], SWINS[0])]
    + [("float32", name, True) for name in (KINDS[0], KINDS[5])]
    + [("float16", KINDS[0], False), ("float16", "tome", False), ("fp8", KINDS[0], False)],
    indirect=["dtype"],
)
def test_nan_of_one_image_shows_in_replays_and_leaves_the_others_alone(dtype: str, name: str, learns: bool) -> None:
    model, fast = pair(name, dtype)
    image, mask = batch_of(model, 3)
    wrong = image.clone()
    wrong[1, :, 0, 0] = torch.nan
    with torch.no_grad():
        want = plainly(model)(image, mask=mask).logits
    for is_nan in (False, True, True, False):  # captured, replayed
        got = run(fast, wrong if is_nan else image, mask, learns).logits.float()
        assert got.isnan().all(1).tolist() == [False, is_nan, False]
        assert relative_error(got[::2], want[::2]) < BOUNDS[dtype]
    torch.nn.init.constant_(fast.gate.head.bias, torch.nan)
    assert run(fast, image, learns=learns).logits.isnan().all(), "no decision"


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


@pytest.fixture
def _gates_run_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_gates, "runs_kernels", lambda image: True)
    if kernels is not None:
        monkeypatch.setattr(kernels.gates, "MIN_CELLS", 1)


@pytest.mark.usefixtures("_gates_run_by_kernels")
@pytest.mark.parametrize(("dtype", "learns"), [("float16", False), ("float32", True)], indirect=["dtype"])
def test_hooks_of_the_gate_have_their_say(dtype: str, learns: bool) -> None:
    model, fast = pair(dtype=dtype)
    image, _ = batch_of(model)
    assert plainly(model)(image).gate.mask.sum() > 0
    fast.gate.register_forward_hook(lambda gate, args, out: replace(out, mask=torch.zeros_like(out.mask)))
    for _ in range(2):
        assert run(fast, image, learns=learns).gate.mask.sum() == 0


@pytest.mark.parametrize("coarse", [4, 16])
def test_a_gate_for_other_cells_raises(coarse: int) -> None:
    model, fast = pair(dtype="float16")
    fast.gate = msvit.LearnedGate(coarse=coarse, grid=(16 // coarse, 16 // coarse)).half().eval()
    with pytest.raises(ValueError, match=f"cells of {coarse}px, but coarse is 8px"):
        run(fast, batch_of(model, 3)[0])


@pytest.mark.usefixtures("_gates_run_by_kernels")
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


@pytest.mark.parametrize(
    ("dtype", "name", "learns"),
    [("float32", KINDS[0], learns) for learns in (False, True)]
    + [("float16", name, False) for name in (KINDS[0], "tome")],
    indirect=["dtype"],
)
def test_a_layer_that_is_replaced_is_used_after_refresh(dtype: str, name: str, learns: bool) -> None:
    """With weights of its own, without any, and of another class."""
    model, fast = pair(name, dtype)
    image, mask = batch_of(model, 3)
    run(fast, image, mask, learns)
    for part, layer in (
        ("ls1", LayerScale(32, init_values=0.3)), ("mlp.fc2", doubled(model.host.blocks[0].mlp.fc2)),
        ("norm2", RmsNorm(32)), ("mlp.act", torch.nn.ReLU()),
    ):  # fmt: skip
        for each in (model, fast):
            each.host.blocks[0].set_submodule(part, deepcopy(layer).to(each.host.pos_embed.dtype).eval())
        fast.refresh()
        want = plainly(model)(image, mask=mask).logits
        assert relative_error(run(fast, image, mask, learns).logits.float(), want) < BOUNDS[dtype]


COUNTED, UNCOUNTED = ("in place", "other memory", "one in other memory", "loaded"), ("average", "in inference mode")


@torch.no_grad()
def write(how: str, model: msvit.MSViT) -> None:
    """A moving average in the usual loop is a write that PyTorch does not count."""
    last = model.host.blocks[1].mlp.fc2 if hasattr(model.host, "blocks") else model.host.head.fc
    for parameter in (last.weight,) if how.startswith("one") else tuple(model.parameters()):
        if how.endswith("memory"):
            parameter.data = -0.9 * parameter.data
        elif how == "average":
            parameter.data.mul_(0.9).add_(torch.ones_like(parameter), alpha=0.1)
        elif how != "loaded":
            with torch.no_grad() if how == "in place" else torch.inference_mode():
                parameter.mul_(0.9)
    if how == "loaded":
        state = {name: torch.linspace(-0.1, 0.1, t.numel()).view_as(t) for name, t in model.state_dict().items()}
        model.load_state_dict(state, assign=True)


@pytest.mark.parametrize(
    ("dtype", "name", "how"),
    [("float32", name, how) for name in (KINDS[0], SWINS[0]) for how in (*COUNTED, *UNCOUNTED)]
    + [("float16", name, "in place") for name in (KINDS[0], KINDS[1], "tome")]
    + [("fp8, not rounded", KINDS[1], how) for how in ("in place", "average")],
    indirect=["dtype"],
)
def test_changed_weights_change_the_result(dtype: str, name: str, how: str) -> None:
    """For all batch sizes. What is made from weights beforehand needs `refresh` after writes that are not counted."""
    model, fast = pair(name, dtype)
    batches = [batch_of(model, num) for num in (3, 2)]
    before = [run(fast, *batch).logits for batch in batches][-1]
    with torch.no_grad():
        for each in (fast, model):
            write(how, each) if each is fast or dtype != "float32" or how == "loaded" else None
        if how in UNCOUNTED and (name in SWINS or "fp8" in dtype):
            fast.refresh()
        for image, mask in batches:
            want = plainly(model)(image, mask=mask).logits
            assert relative_error(run(fast, image, mask).logits.float(), want) < BOUNDS[dtype]
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
    profile, ours = cProfile.Profile(), tuple(str(Path(module.__file__ or "").parent) for module in (msvit, torch))
    profile.runcall(call)
    return sum(each.callcount for each in profile.getstats()
               if not isinstance(each.code, str) and each.code.co_filename.startswith(ours))  # fmt: skip


def test_a_result_survives_the_next_call() -> None:
    model, fast = pair()
    image, mask = batch_of(model, 2)
    first = run(fast, image, mask)
    kept = first.logits.clone(), first.tokens.x.clone()
    run(fast, -image, 1 - mask)
    assert_same((first.logits, first.tokens.x), kept, 0)


@pytest.mark.parametrize("learns", [False, True], ids=["inference", "training"])
def test_a_batch_of_noise_is_named_once(learns: bool) -> None:
    model = model_of(gate=msvit.LearnedGate(coarse=8, grid=(2, 2)))  # untrained: all cells fine
    fast = cuda.CudaMSViT(model.with_budget(0.7, "macs"), inductor=False)
    image, _ = batch_of(model, 2)
    run(fast, image, torch.ones(2, 2, 2), learns=learns)  # warnings are errors here: a mask, and a second batch
    with pytest.warns(UserWarning, match=r"all cells .* fine, although .* 0\.7 of the dense macs.*torch\.randn"):
        run(fast, image, learns=learns)
    run(fast, image, learns=learns)
