"""Compiled models give what the model gives, with graphs that need no GPU (the real ones: test_cuda.py).

Last what dtype="fp8" takes, and what it raises for.
"""

import cProfile
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_pairs import REDUCERS, doubled, model_of, pair, plainly, run
from fake_graphs import FakeGraph
from timm.layers import LayerScale, RmsNorm
from tiny import KINDS, SWINS, assert_same_output, batch_of, relative_error, tiny_model

import msvit
from msvit.fast import cuda, fp8_encoder
from msvit.fast import gates as fast_gates
from msvit.fast.find_kernels import kernels
from msvit.fast.fp8_encoder import Fp8Encoder

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
    ("fake_graphs", "dtype", "name"),
    [("buckets", "float32", name) for name in (KINDS[0], KINDS[2], KINDS[4], SWINS[0], *REDUCERS, "plain tome")]
    + [("one graph", "float32", name) for name in (KINDS[1], SWINS[0], "plain evit")]
    + [("buckets", "float16", name) for name in HALF]
    + [("one graph", "float16", KINDS[0]), ("buckets", "float16", SWINS[0]), ("buckets", "fp8", KINDS[1])]
    + [("buckets", "fp8, not rounded", name) for name in (KINDS[0], KINDS[1], KINDS[4])]
    + [("one graph", "fp8, not rounded", KINDS[1])],
    indirect=["fake_graphs", "dtype"],
)
def test_replays_give_what_the_model_gives(dtype: str, name: str) -> None:
    """More tokens than in the call before, and fewer. With a reducer and every cell fine ("plain") no slot is spare."""
    plain, name = name.startswith("plain "), name.removeprefix("plain ")
    model, fast = pair(name, dtype, **({"gate": msvit.AllFine(coarse=8)} if plain else {}))
    results = []
    for turn, share in enumerate((0.0, 1.0, 0.5)):
        image, _ = batch_of(model, 3)  # whose slots with all cells fine are no whole number of buckets
        image, mask = image.roll(turn, 3), (torch.rand(3, 2, 2) < share).float()
        for given in (mask, None) if "fp8" not in dtype else (mask,):  # None: by the gate
            with torch.no_grad():
                want = plainly(model)(image, mask=given)
            got = run(fast, image, given)
            assert_same_output(got, want, BOUNDS[dtype])
            assert got.tokens.layout.size is not None or want.tokens.layout.size is None, "heads attend by it"
            results += [(t, t.clone()) for t in (got.logits, got.tokens.x)]
        assert not plain or got.tokens.x.shape == want.tokens.x.shape, "no slot is spare"
    assert all(torch.equal(*result) for result in results), "a result survives the next calls"
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
    fast.gate.requires_grad_(False)
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


COUNTED, UNCOUNTED = ("in place", "other memory", "one in other memory", "loaded"), ("average", "in inference mode")
LAYERS: dict[str, Callable[[Any], torch.nn.Module]] = {  # with weights of their own, without any, of another class
    "ls1": lambda block: LayerScale(32, init_values=0.3), "norm2": lambda block: RmsNorm(32),
    "mlp.act": lambda block: torch.nn.ReLU(), "mlp.fc2": lambda block: doubled(block.mlp.fc2),
}  # fmt: skip


@torch.no_grad()
def write(how: str, model: msvit.MSViT) -> None:
    """A moving average in the usual loop is a write that PyTorch does not count."""
    if how in LAYERS:
        block = model.host.blocks[0]
        block.set_submodule(how, LAYERS[how](block).to(model.host.pos_embed.dtype).eval())
        return
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
    ("dtype", "name", "how", "learns"),
    [("float32", name, how, False) for name in (KINDS[0], SWINS[0]) for how in (*COUNTED, *UNCOUNTED)]
    + [("float16", name, "in place", False) for name in (KINDS[0], KINDS[1], "tome")]
    + [(dtype, KINDS[1], how, False) for dtype in ("fp8", "fp8, not rounded") for how in ("in place", "average")]
    + [("float32", KINDS[0], how, learns) for how in LAYERS for learns in (False, True)]
    + [("float16", name, how, False) for how in LAYERS for name in (KINDS[0], "tome")],
    indirect=["dtype"],
)
def test_changed_weights_and_layers_change_the_result(dtype: str, name: str, how: str, learns: bool) -> None:
    """For all batch sizes. New layers need `refresh`; what is made from weights does after writes that do not count."""
    model, fast = pair(name, dtype)
    batches = [batch_of(model, num) for num in (3, 2)]
    before = [run(fast, *batch, learns).logits for batch in batches][-1]
    with torch.no_grad():
        for each in (fast, model):
            write(how, each) if each is fast or dtype != "float32" or how in ("loaded", *LAYERS) else None
        if how in LAYERS or (how in UNCOUNTED and (name in SWINS or "fp8" in dtype)):
            fast.refresh()
        for image, mask in batches:
            want = plainly(model)(image, mask=mask).logits
            assert relative_error(run(fast, image, mask, learns).logits.float(), want) < BOUNDS[dtype]
    assert relative_error(before, want) > 1e-3


@pytest.mark.parametrize("gate", ["learned", "context"])
def test_a_warm_call_does_not_walk_the_modules(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One image takes half a millisecond on a GPU: Python has time for a hundred calls, whatever the depth."""
    counts, ours = [], tuple(str(Path(module.__file__ or "").parent) for module in (msvit, torch))
    for depth in (2, 12):
        model, fast = pair(depth=depth, gate=msvit.gates.GATES[gate](coarse=8))
        image, _ = batch_of(model, 1)
        run(fast, image)
        profile = cProfile.Profile()
        with monkeypatch.context() as patch:
            patch.setattr(FakeGraph, "replay", lambda graph: None)
            profile.runcall(run, fast, image)
        # Python functions of msvit and torch: those of jaxtyping's checks are called in tests only.
        called = [each for each in profile.getstats() if getattr(each.code, "co_filename", "").startswith(ours)]
        counts.append(sum(each.callcount for each in called))
    assert counts[0] == counts[1], "the number of Python calls depends on the number of blocks"
    assert counts[0] < 100


@pytest.mark.parametrize("learns", [False, True], ids=["inference", "training"])
def test_a_batch_of_noise_is_named_once(learns: bool) -> None:
    model = model_of(gate=msvit.LearnedGate(coarse=8, grid=(2, 2)))  # untrained: all cells fine
    fast = cuda.CudaMSViT(model.with_budget(0.7, "macs"), inductor=False)
    image, _ = batch_of(model, 2)
    run(fast, image, torch.ones(2, 2, 2), learns=learns)  # warnings are errors here: a mask, and a second batch
    with pytest.warns(UserWarning, match=r"all cells .* fine, although .* 0\.7 of the dense macs.*torch\.randn"):
        run(fast, image, learns=learns)
    run(fast, image, learns=learns)


# In FP8

WAYS: dict[str, Callable[[cuda.CudaMSViT], cuda.CudaMSViT]] = {
    "with_options": lambda fast: fast.with_options(gate=msvit.AllFine(coarse=8)),
    "pickle": lambda fast: pickle.loads(pickle.dumps(fast)),
    "compile": lambda fast: cuda.CudaMSViT(fast, **fast.settings),
}


@pytest.mark.parametrize("way", WAYS)
def test_another_model_of_it_runs_in_fp8_too(way: str) -> None:
    model, fast = pair(dtype="fp8")
    image, mask = batch_of(model, 2)
    other = WAYS[way](fast)
    assert type(other.fused) is Fp8Encoder
    assert isinstance(other.gate, msvit.AllFine) == (way == "with_options")
    assert torch.equal(run(other.eval(), image, mask).logits, run(fast, image, mask).logits)


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "needs graphs, mode packed, .* mode masked": {"mode": "masked"},
    "needs graphs, mode packed, .* graphs=False": {"graphs": False},
    "needs reducer=None, and here is ToMe": {"reducer": msvit.ToMe(r=2)},
    r"model.bfloat16\(\)\), and here is torch.float16": {"dtype": torch.float16},
    "widths that 16 divides, .* with heads of {40}": {"embed_dim": 40, "num_heads": 1},
    "timm's usual ViT blocks, .* here is a Eva": {"name": KINDS[2]},
    "timm's usual ViT blocks, .* here is a SwinTransformer": {"name": SWINS[0]},
    "Triton with heads of 16, 32, 64 or 128 .* heads of {16}": {"backend": "varlen"},
    r"a CUDA device of capability \(8, 9\), and here is cpu": {"capability": (8, 9)},
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_models_that_cannot_run_in_fp8_raise(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"dtype": torch.bfloat16, **UNSUPPORTED[message]}
    graphs, backend = options.pop("graphs", True), options.pop("backend", "triton")
    monkeypatch.setattr(fp8_encoder, "choose_backend", lambda *given, cuda: backend)
    monkeypatch.setattr(fp8_encoder, "MIN_CAPABILITY", options.pop("capability", (0, 0)))
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        cuda.CudaMSViT(tiny_model(**options).eval(), graphs=graphs, dtype="fp8")


CALLS = {
    "training": "gradients on, autocast to None; .* or a model compiled without dtype",
    "train mode": "call eval",
    "autocast": "autocast to torch.float16",
    "images in float32": "here are images in torch.float32, gradients off, .* use images.bfloat16",
    "images' gradients": "gradients on",
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_cannot_run_in_fp8_raise(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = pair(dtype="fp8")
    image, mask = batch_of(model, 2)
    image = image if call == "images in float32" else image.bfloat16()
    image.requires_grad_(call == "images' gradients")
    fast.train(call == "train mode")
    monkeypatch.setattr(cuda, "autocast_dtype", lambda: torch.float16 if call == "autocast" else None)
    for each in (fast, fast.encode):
        with torch.set_grad_enabled(call == "training"), pytest.raises(ValueError, match=CALLS[call]):
            run(fast, image, mask) if call == "train mode" else each(image, mask)
