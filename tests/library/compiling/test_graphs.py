"""Captured calls and training steps, with graphs that need no GPU (the real ones: test_cuda.py)."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from fake_graphs import FakeGraph, use_fake_graphs
from plain_launches import use_plain_launches
from smoke_runs import lines
from timm.layers import LayerScale, RmsNorm
from tiny import KINDS, SWINS, assert_same, assert_same_output, batch_of, interpretable, relative_error, tiny_model
from torch import Tensor

import msvit
from msvit.compiling import cuda, graphs, plan, training_blocks, training_plan
from msvit.compiling.fast_layers import FastLinear
from msvit.compiling.fused_plan import FusedPlan
from msvit.compiling.fused_trunk import run_fused_block
from msvit.execution import MODES
from msvit.execution.attention import force_backend
from msvit.execution.fused import kernels
from msvit.lab.compiled import Choice
from msvit.lab.config import override
from msvit.lab.recipes import recipe
from msvit.lab.training import loop
from msvit.lab.training.loop import train
from msvit.tokens import dense_map
from msvit.types import MSViTOutput

pytestmark = pytest.mark.skipif(not interpretable(), reason="needs Triton with an interpreter that works")


@pytest.fixture(autouse=True, params=["one graph", "buckets"])
def _graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_fake_graphs(monkeypatch)
    use_plain_launches(monkeypatch)
    if request.param == "buckets":
        monkeypatch.setattr(plan, "SMALL", 8)
        monkeypatch.setattr(plan, "ALIGN", 4)
    with force_backend("triton"):  # SDPA's list of lengths would stay as it was captured
        yield


def model_of(name: str = KINDS[0], power: float = 0.0, **options: Any) -> msvit.MSViT:
    """With a 2 x 2 grid of cells, some fine, some coarse."""
    small = {"img_size": 32, "depths": (2, 1), "num_heads": (1, 2), "window_size": 8} if name in SWINS else {}
    gate = msvit.LearnedGate(coarse=16 if name in SWINS else 8, grid=(2, 2), threshold=3.0)
    model = tiny_model(name, torch.float32, **{"gate": gate, **small, **options}).eval()
    return model.with_options(proportional_attention=power)


def pair(name: str = KINDS[0], **options: Any) -> tuple[msvit.MSViT, cuda.CudaMSViT]:
    model = model_of(name, **options)
    return model, cuda.CudaMSViT(model, inductor=False)


def run(fast: cuda.CudaMSViT, image: Tensor, mask: Tensor | None = None, learns: bool = False) -> MSViTOutput:
    """What forward does with images on a GPU."""
    with torch.set_grad_enabled(learns):
        return fast._run_plan(image, mask, learns)


def plainly(model: msvit.MSViT) -> Callable[..., MSViTOutput]:
    def call(image: Tensor, mask: Tensor | None = None) -> MSViTOutput:
        with force_backend("sdpa"):
            return model(image, mask=mask)

    return call


REDUCERS = {
    "evit": lambda: msvit.EViT(0.6, at=(0, 1)),
    "dynamicvit": lambda: msvit.DynamicViT(0.6, at=(1,)),
    "tome": lambda: msvit.ToMe(r=3),
}


@pytest.mark.parametrize(
    ("name", "power"),
    [(name, 0.0) for name in (*KINDS, SWINS[0], *REDUCERS, *(f"plain {name}" for name in REDUCERS))]
    + [(name, 0.5) for name in (KINDS[0], KINDS[4], "evit", "tome", "plain tome")],
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
    if learns and not fast.trunk.trains:
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


GAP = "vit_base_patch16_gap_224"


@pytest.mark.parametrize(
    ("name", "mode", "power"),
    [
        *((name, "packed", 0.0) for name in KINDS),
        *product((KINDS[0], GAP), ("trimmed", "masked"), (0.0,)),
        *product((KINDS[0],), MODES, (0.5,)),
    ],
)
def test_steps_give_the_models_gradients_and_add_them_up(name: str, mode: str, power: float) -> None:
    """Those of Eq. 10 in plain torch; in mode trimmed and masked inactive tokens have a gradient too."""
    model, fast = pair(name, power=power, mode=mode)
    found = []
    for each in (plainly(model), lambda image, mask: run(fast, image, mask, learns=True)):
        model.zero_grad()
        for turn in range(3):
            image, mask = batch_of(model, 2)
            mask = (mask * (turn % 2)).requires_grad_()
            out = each(image * (turn + 1), mask=mask)
            loss = out.logits.square().sum()
            if turn > 1:  # at first nobody asks for the tokens' gradient
                loss = loss + out.tokens.x[:4].sum()
            assert torch.equal(out.tokens.count, out.gate.mask.detach().sum((1, 2)) * 3 + 4)
            loss.backward()
        found.append([mask.grad, *[p.grad for p in model.backbone.parameters()]])
    assert_same(found[1], found[0], 1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_the_gate_gets_its_gradient_through_a_step(mode: str) -> None:
    """In mode trimmed its soft decisions, with noise or without, say which inactive tokens run."""
    model, fast = pair(mode=mode, gate=msvit.LearnedGate(coarse=8, grid=(2, 2), noise=0.0))
    torch.nn.init.normal_(model.gate.head.weight)
    torch.nn.init.zeros_(model.gate.head.bias)
    image, found = batch_of(model, 3)[0], []
    for each in (plainly(model.train()), lambda image: run(fast.train(), image, learns=True)):
        model.zero_grad()
        out = each(image)
        out.logits.square().sum().backward()
        found.append([p.grad for p in model.gate.parameters()])
    assert 0 < out.gate.mask.mean() < 1
    assert_same(found[1], found[0], 1e-4)
    assert all(grad.abs().sum() > 0 for grad in found[0])


@pytest.mark.parametrize(
    ("kind", "state"),
    [*(("learned", state) for state in ("all train", "frozen", "in eval mode")), ("context", "one layer is frozen")],
)
def test_a_captured_gate_decides_and_learns_as_a_plain_one(kind: str, state: str) -> None:
    """With the same noise; its gradients are those of the task and of a loss on its logits, added up over steps."""
    model, fast = pair(gate=msvit.gates.GATES[kind](coarse=8, grid=(2, 2)))
    with torch.no_grad():
        for weight in (model.gate.head.weight, model.gate.head.bias):
            weight.normal_()
    model.gate.requires_grad_(state != "frozen")
    model.gate.stem.requires_grad_(state in ("all train", "in eval mode"))
    found = []
    for each, call in ((model, plainly(model)), (fast, lambda image: run(fast, image, learns=True))):
        model.zero_grad()
        each.train().gate.train(state != "in eval mode")
        outputs = []
        for turn in range(3):
            image = batch_of(model, 3)[0] * (turn + 1)
            torch.manual_seed(turn)
            out = call(image)
            (out.logits.square().sum() + out.gate.logits.square().sum()).backward()
            outputs += [out.gate.logits.detach(), out.gate.sample.detach(), out.gate.mask.detach()]
        found.append([*outputs, *[p.grad for p in model.gate.parameters() if p.requires_grad]])
    assert_same(found[1], found[0], 1e-4)
    assert (len(found[0]) == 9) == (state == "frozen")
    (made,) = fast._plans.values()
    assert isinstance(made.gate_step, graphs.Captured if state == "frozen" else graphs.CapturedStep)


@pytest.mark.parametrize("mode", ["trimmed", "masked"])
def test_a_segmenters_map_gives_the_gate_its_gradient_in_a_step(mode: str) -> None:
    """From the twin of the other scale too: padding after the last image is no token's twin."""
    model = msvit.convert_segmenter(model_of().host, 5, coarse=8, decoder="linear", mode=mode)
    fast, found = cuda.CudaMSViT(model.encoder, inductor=False), []
    image, _ = batch_of(model.encoder, 2)
    mask = torch.tensor([[[1.0, 1], [1, 0]], [[1, 0], [0, 0]]])  # padding has the id of the last image's first cell
    for encoder in (model.encoder, fast):
        mask = mask.detach().clone().requires_grad_()
        if encoder is fast:
            tokens = fast._run_plan(image, mask, True, head=False)[1]
        else:
            with force_backend("sdpa"):
                tokens = encoder.encode(image, mask)[1]
        model.decoder(dense_map(tokens)).square().sum().backward()
        found.append([mask.grad])
    assert_same(found[1], found[0], 1e-4)


@pytest.mark.parametrize("name", [KINDS[0], KINDS[2]])
def test_under_autocast_a_step_gives_the_models_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers read copies of their weights in 16 bits, which follow the weights; with the kernels of training."""
    monkeypatch.setattr(FastLinear, "runs_kernels", lambda self, input: True)
    monkeypatch.setattr(training_blocks, "runs_kernels", lambda x: True)
    half = partial(torch.autocast, "cpu", torch.float16, cache_enabled=False)
    monkeypatch.setattr(cuda, "autocast_dtype", lambda: torch.float16)
    monkeypatch.setattr(plan.Plan, "_autocast", lambda self: half())
    model, fast = pair(name)
    model.host.blocks[0].attn.proj.weight.requires_grad_(False)
    found = []
    for each in (plainly(model), lambda image, mask: run(fast, image, mask, learns=True)):
        model.zero_grad()
        for turn in range(2):
            image, mask = batch_of(model, 2)
            mask.requires_grad_()
            with half():
                logits = each(image, mask=mask).logits
            logits.float().square().sum().backward()
            with torch.no_grad():
                for weight in model.backbone.parameters():
                    weight.mul_(1.5 if turn == 0 else 1 / 1.5)
        found.append([logits, mask.grad, *[p.grad for p in model.backbone.parameters()]])
    assert_same(found[1], found[0], 0.01)
    (made,) = fast._plans.values()
    assert {copy.dtype for copy in made.halves.copies.values()} == {torch.float16}
    assert fast.trunk.adds_norms == (name == KINDS[0])
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in model.parameters())


def test_the_largest_graph_of_a_pool_is_captured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for fewer slots is of no use for more."""
    model, fast = pair()
    captured: dict[object, list[int]] = {}
    capture = training_plan.TrainingPlan._capture

    def record(self: Any, image: Tensor, slots: int, full: bool) -> Any:
        captured.setdefault(self.pool.handle, []).append(slots)
        return capture(self, image, slots, full)

    monkeypatch.setattr(training_plan.TrainingPlan, "_capture", record)
    image, _ = batch_of(model, 4)
    for num_fine in (1, 2, 0, 4, 3, 1):  # of the four cells of an image
        mask = (torch.arange(4).view(1, 2, 2) < num_fine).float().expand(4, 2, 2)
        out = run(fast, image, mask, learns=True)
        assert relative_error(out.logits, plainly(model)(image, mask=mask).logits) < 1e-5
        out.logits.sum().backward()
    assert all(slots[0] == max(slots) for slots in captured.values())
    (made,) = fast._plans.values()
    assert len(made.steps) <= len(captured[made.pool.handle]), "graphs of other memory are dropped"
    assert made.small or len(captured) > 1


@pytest.mark.parametrize("how", ["another forward", "backward twice"])
def test_activations_that_are_gone_are_not_used(how: str) -> None:
    model, fast = pair()
    image, mask = batch_of(model, 2)
    loss = run(fast, image, mask, learns=True).logits.sum()
    if how == "another forward":
        run(fast, image, mask, learns=True)
    else:
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call backward once after each forward"):
        loss.backward()


def test_a_backward_has_all_it_reads_when_its_plan_is_gone() -> None:
    """Plans go when there are many, and when the model does."""
    model, fast = pair()
    image, _ = batch_of(model, 2)
    loss = run(fast, image, learns=True).logits.sum()
    (made,) = fast._plans.values()
    kept = [weakref.ref(t) for t in (made.image, made.mask, made.sample)]
    fast._plans.clear()
    del made
    gc.collect()
    assert all(ref() is not None for ref in kept)
    loss.backward()
    assert model.host.patch_embed.proj.weight.grad is not None


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
        assert not fast.trunk.adds_norms
        assert relative_error(run(fast, image, mask, learns).logits, plainly(model)(image, mask=mask).logits) < 1e-4


class Doubled(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_parameters_that_take_over_the_memory_of_others_get_the_gradients() -> None:
    model, fast = pair()
    image, _ = batch_of(model, 2)
    run(fast, image, learns=True).logits.sum().backward()
    fast.load_state_dict(fast.state_dict(), assign=True)
    fast.zero_grad()
    run(fast, image, learns=True).logits.sum().backward()
    assert all(p.grad is not None for p in fast.parameters())


def test_hooks_of_a_gate_run_in_training() -> None:
    model, fast = pair()
    image, calls = batch_of(model, 2)[0], []
    fast.gate.register_forward_hook(lambda *given: calls.append(given))
    for _ in range(3):
        run(fast, image, learns=True)
    assert len(calls) == 3


def test_a_gates_backward_raises_when_its_image_is_gone() -> None:
    model, fast = pair(gate=msvit.LearnedGate(coarse=8, grid=(2, 2)))
    image, mask = batch_of(model, 2)
    logits = run(fast, image, learns=True).gate.logits
    run(fast, -image, mask, learns=True)
    with pytest.raises(RuntimeError, match="on the sum of all losses"):
        logits.sum().backward()


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


def test_a_run_by_replayed_steps_is_the_run_of_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what follows the steps, such as the gate's threshold, counts in the next replay."""
    own = {"optim.graphs": "true", "optim.lr": "1e-3", "gate.target": "0.5", "eval_every": "9", "data.num_val": "2"}
    own |= {"optim.epochs": "2", "optim.batch_size": "2", "data.num_train": "4"}
    plan = override(recipe("pets", smoke=True), own)
    replays = []

    class Replayed(cuda.CudaMSViT):
        def forward(self, image: Tensor, mask: Tensor | None = None, max_tokens: int | None = None) -> MSViTOutput:
            replays.append(len(image))
            return run(self, image, mask, learns=True)

    train(plan, tmp_path / "plain", quiet=True)
    chosen = Choice(compiled=True)
    monkeypatch.setattr(loop, "compile_where_supported", lambda model, *_, **__: (Replayed(model, False), chosen))
    train(plan, tmp_path / "replayed", quiet=True)
    assert replays == [2] * 4
    for name in ("loss", "fine", "accuracy"):
        plain, replayed = ([line[name] for line in lines(tmp_path / run, "train")] for run in ("plain", "replayed"))
        assert plain == pytest.approx(replayed, rel=1e-3, abs=1e-4)


FUSED = (KINDS[0], KINDS[1], KINDS[4], KINDS[5])


def halves(name: str, **options: Any) -> tuple[msvit.MSViT, cuda.CudaMSViT]:
    """A model in 32 bits, and the same in 16, compiled."""
    model = model_of(name, **options)
    with torch.no_grad():
        for parameter in model.parameters():  # biases, positions and layer scales are 0 or constant at first
            parameter.add_(0.2 * torch.randn_like(parameter))
            parameter.copy_(parameter.half())
    return model, cuda.CudaMSViT(deepcopy(model).half(), inductor=False)


@pytest.mark.parametrize(("name", "power"), [*((name, 0.0) for name in FUSED), (FUSED[0], 0.5)])
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


@pytest.mark.parametrize("gate", ["learned", "context"])
def test_a_gate_whose_kernels_read_the_image_decides_for_the_image_at_hand(
    gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are launched beside the graphs, so that the image need not be copied where they expect it."""
    model, fast = halves(KINDS[0], gate=msvit.gates.GATES[gate](coarse=8, grid=(2, 2), widths=(16, 16, 16)))
    monkeypatch.setattr(msvit.gates.logits.LogitGate, "runs_kernels", staticmethod(lambda image: True))
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
    assert (made.features is None) == made.small == (made.image is not None)


def test_a_gate_for_other_cells_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = halves(KINDS[0])
    monkeypatch.setattr(msvit.gates.logits.LogitGate, "runs_kernels", staticmethod(lambda image: True))
    monkeypatch.setattr(kernels, "fits_cell_mlp", lambda *given: True)
    fast.gate = msvit.LearnedGate(coarse=4, grid=(4, 4)).half().eval()
    with pytest.raises(RuntimeError, match="size"):
        run(fast, batch_of(model, 3)[0].half())


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


@pytest.mark.parametrize("name", REDUCERS)
def test_fused_blocks_reduce_as_the_model_does(name: str) -> None:
    model, fast = halves(KINDS[0], reducer=REDUCERS[name]())
    assert fast.trunk.block_function is run_fused_block
    for image, mask in (batch_of(model), batch_of(model, 3)):
        wanted = plainly(model)(image, mask=mask)
        assert_same_output(run(fast, image.half(), mask.half()), wanted, 1e-2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, about NaN
@pytest.mark.parametrize("name", [None, *REDUCERS])
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
