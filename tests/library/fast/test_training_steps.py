"""Captured training steps, with graphs that need no GPU (the real ones: test_cuda.py)."""

import gc
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from compiled_pairs import doubled, model_of, pair, plainly, run
from smoke_runs import lines
from timm.layers import DropPath, RmsNorm
from tiny import KINDS, assert_same, batch_of, relative_error
from torch import Tensor, nn

import msvit
from msvit.execution import MODES
from msvit.execution.layout import stop_cut_gradients
from msvit.fast import cuda, fast_layers, plan, training_blocks
from msvit.fast import gates as fast_gates
from msvit.fast.encoders import PlainEncoder
from msvit.fast.find_kernels import kernels
from msvit.output import MSViTOutput
from msvit.tokens import dense_map
from msvit_lab.compiled import Choice
from msvit_lab.config import override
from msvit_lab.recipes import recipe
from msvit_lab.training import loop
from msvit_lab.training.loop import train

pytestmark = pytest.mark.usefixtures("fake_graphs")


@pytest.mark.parametrize(
    ("fake_graphs", "name", "mode"),
    [
        *(("buckets", name, "packed") for name in (*KINDS[:3], KINDS[4])),
        *product(("buckets",), (KINDS[0], KINDS[5]), ("trimmed", "masked")),
        *product(("one graph",), (KINDS[0],), ("packed", "trimmed")),
    ],
    indirect=["fake_graphs"],
)
def test_steps_give_the_models_gradients_and_add_them_up(name: str, mode: str) -> None:
    """Those of Eq. 10 in plain torch; in mode trimmed and masked inactive tokens have a gradient too.

    That of a map of features too, from the token of the other scale; and what is stopped is stopped there and here.
    """
    model, fast = pair(name, mode=mode)
    image, mask = batch_of(model, 2)
    some = torch.tensor([[[1.0, 1], [1, 0]], [[1, 0], [0, 0]]])  # padding has the id of the last image's first cell
    found = []
    for each in (plainly(model), lambda image, mask: run(fast, image, mask, learns=True)):
        model.zero_grad()
        masks = [given.clone().requires_grad_() for given in (0 * mask, mask, 0 * mask, some)]
        for turn, given in enumerate(masks):
            out = each(image * (turn + 1), mask=given)
            loss = out.logits.square().sum()
            if turn > 1:  # at first nobody asks for the tokens' gradient
                loss = loss + dense_map(out.tokens).square().sum() + out.tokens.x[:4].sum()
            assert torch.equal(out.tokens.count, out.gate.mask.detach().sum((1, 2)) * 3 + 4)
            if turn == 3:
                stop_cut_gradients(out.gate.mask, out.tokens.layout)
            loss.backward()
        found.append([*(given.grad for given in masks), *(p.grad for p in model.backbone.parameters())])
    assert_same(found[1], found[0], 1e-4)
    stopped = [grads[3] == 0 for grads in found]
    assert torch.equal(*stopped)
    assert stopped[0].any() == (mode != "masked"), "there not all tokens of the other scale have run"


@pytest.mark.parametrize(
    ("fake_graphs", "kind", "mode", "state"),
    [
        *(("buckets", "learned", mode, "all train") for mode in MODES),
        *(("buckets", "learned", "packed", state) for state in ("frozen", "in eval mode")),
        ("one graph", "learned", "trimmed", "all train"),
        ("buckets", "context", "packed", "one layer is frozen"),
        ("buckets", "context", "packed", "images are read by their address"),
    ],
    indirect=["fake_graphs"],
)
def test_a_captured_gate_decides_and_learns_as_a_plain_one(
    kind: str, mode: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same noise; its gradients are those of the task and of a loss on its logits, added up over steps.

    In mode trimmed soft decisions say which inactive tokens run.
    """
    small = {"widths": (16, 16, 16), "depth": 1} if kind == "context" else {}
    model, fast = pair(gate=msvit.gates.GATES[kind](coarse=8, grid=(2, 2), **small), mode=mode)
    with torch.no_grad():
        for weight in (model.gate.head.weight, model.gate.head.bias):
            weight.normal_()
    model.gate.requires_grad_(state != "frozen")
    model.gate.stem.requires_grad_(state in ("all train", "in eval mode"))
    by_address, found = state == "images are read by their address", []
    if by_address:
        monkeypatch.setattr(fast_gates, "runs_kernels", lambda image: True)
        monkeypatch.setattr(PlainEncoder, "takes_address", lambda encoder, image: True)
    for each, call in ((model, plainly(model)), (fast, lambda image: run(fast, image, learns=True))):
        model.zero_grad()
        each.train().gate.train(state != "in eval mode")
        outputs = []
        for turn in range(2):
            image = batch_of(model, 1 if by_address else 3)[0] * (turn + 1)  # by address a kernel is interpreted
            torch.manual_seed(turn)
            out = call(image)
            (out.logits.square().sum() + out.gate.logits.square().sum()).backward()
            outputs += [out.gate.logits.detach(), out.gate.sample.detach(), out.gate.mask.detach()]
        found.append([*outputs, *[p.grad for p in model.gate.parameters() if p.requires_grad]])
    assert_same(found[1], found[0], 1e-4)
    assert (len(found[0]) == 6) == (state == "frozen")


def test_the_largest_graph_of_a_pool_is_captured_first() -> None:
    """Memory for fewer slots is of no use for more."""
    model, fast = pair()
    image, _ = batch_of(model, 4)
    pools = set()
    for num_fine in (1, 2, 0, 4, 3, 1):  # of the four cells of an image
        mask = (torch.arange(4).view(1, 2, 2) < num_fine).float().expand(4, 2, 2)
        out = run(fast, image, mask, learns=True)
        assert relative_error(out.logits, plainly(model)(image, mask=mask).logits) < 1e-5
        out.logits.sum().backward()
        (plan,) = fast._plans.values()
        (largest, _), *others = plan.steps
        assert all(largest > slots for slots, _ in others)
        pools.add((largest, plan.pool.handle))
    assert len({handle for _, handle in pools}) == len(pools) > 1


def test_activations_are_there_when_a_plan_is_gone_and_gone_after_another_forward_or_the_backward() -> None:
    """Plans go when there are many, and when the model does."""
    model, fast = pair(gate=msvit.LearnedGate(coarse=8, grid=(2, 2)))
    image, mask = batch_of(model, 2)
    out = run(fast, image, learns=True)
    run(fast, -image, mask, learns=True)
    for gone in (out.logits, out.gate.logits):
        with pytest.raises(RuntimeError, match="call backward once after each forward, on the sum of all losses"):
            gone.sum().backward()
    loss = run(fast, image, learns=True).logits.sum()
    del fast
    gc.collect()
    loss.backward(retain_graph=True)
    assert model.host.patch_embed.proj.weight.grad.norm() > 0
    with pytest.raises(RuntimeError, match="call backward once after each forward"):
        loss.backward()


def test_what_is_frozen_or_replaced_between_steps_is_seen() -> None:
    model, fast = pair()
    image, mask = batch_of(model, 2)
    for learns in (False, True, False):
        model.zero_grad()
        fast.host.pos_embed.requires_grad_(learns)
        run(fast, image, mask, learns=True).logits.sum().backward()
        assert (model.host.pos_embed.grad is not None) == learns
    head, gate = torch.nn.Linear(32, 5), msvit.LearnedGate(coarse=8, grid=(2, 2), threshold=9.0).eval()
    for each in (model, fast):
        each.host.head, each.gate = head, gate
    fast.refresh()
    out, want = run(fast, image, learns=True), plainly(model)(image)
    assert relative_error(out.logits, want.logits) < 1e-5
    assert torch.equal(out.gate.mask, want.gate.mask)
    for gate.threshold, learns in product((100.0, -100.0), (True, False)):  # as ThresholdController moves it
        assert (run(fast, image, learns=learns).gate.mask == (gate.threshold < 0)).all()
    fast.load_state_dict(fast.state_dict(), assign=True)  # other parameters with the memory of these
    run(fast, image, learns=True).logits.sum().backward()
    assert all(p.grad is not None for p in fast.parameters() if p.requires_grad)
    fast.requires_grad_(False)
    masks = [mask.clone().requires_grad_() for _ in range(2)]
    run(fast, image, masks[0], learns=True).logits.sum().backward()
    plainly(model)(image, mask=masks[1]).logits.sum().backward()
    assert relative_error(masks[0].grad, masks[1].grad) < 1e-4, "a frozen model passes the mask's gradient on"


# In 16 bits: with the kernels of training


def as_doubled(part: str) -> Callable[[Any], None]:
    """Of the last block."""
    return lambda host: host.blocks[1].set_submodule(part, doubled(host.blocks[1].get_submodule(part)))


def tripled(layer: nn.Module, given: Any, out: Tensor) -> Tensor:
    return 3 * out


def drop_paths(host: Any) -> None:
    for block in host.blocks:
        block.drop_path2 = DropPath(0.3)


def freeze(host: Any) -> None:
    host.blocks[0].attn.qkv.bias.requires_grad_(False)
    host.blocks[1].mlp.fc1.requires_grad_(False)
    host.blocks[1].norm2.requires_grad_(False)


# What is changed, options of the model, and the biases whose gradient needs a sum of its own.
CASES: dict[str, tuple[Callable[[Any], None] | None, dict[str, Any], int]] = {
    "plain": (None, {}, 0),
    "width 48": (None, {"embed_dim": 48, "num_heads": 3}, 0),
    "rotary positions": (None, {"name": KINDS[2]}, 6),  # blocks of another kind
    "average pooling": (None, {"name": KINDS[5]}, 0),
    "trimmed": (None, {"mode": "trimmed"}, 0),
    "stochastic depth": (drop_paths, {}, 2),  # fc2 of both blocks
    "dropout": (lambda host: setattr(host.blocks[1].attn.proj_drop, "p", 0.3), {}, 1),  # proj
    "another class of fc1": (as_doubled("mlp.fc1"), {}, 0),  # that has no kernels
    "another class of fc2": (as_doubled("mlp.fc2"), {}, 0),
    "another class of qkv": (as_doubled("attn.qkv"), {}, 1),  # proj of that block
    "another activation": (lambda host: setattr(host.blocks[1].mlp, "act", nn.GELU("tanh")), {}, 1),  # fc1
    "a hook": (lambda host: host.blocks[0].mlp.fc2.register_forward_hook(tripled), {}, 1),
    "a hook of the norm": (lambda host: host.norm.register_forward_hook(tripled), {}, 0),
    "no biases in attention": (None, {"qkv_bias": False, "proj_bias": False}, 0),
    "norms of queries and keys": (None, {"qk_norm": True}, 4),  # qkv and proj of both blocks
    "frozen weights": (freeze, {}, 1),  # proj, as a bias that is frozen has no copy in 16 bits
    "another last norm": (lambda host: host.set_submodule("norm", RmsNorm(32)), {}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_under_autocast_a_step_gives_the_models_gradients(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers read copies of their weights in 16 bits, which follow the weights."""
    for module in (fast_layers, training_blocks):
        monkeypatch.setattr(module, "runs_kernels", lambda x: True)
    half = partial(torch.autocast, "cpu", torch.float16, cache_enabled=False)
    monkeypatch.setattr(cuda, "autocast_dtype", lambda: torch.float16)
    monkeypatch.setattr(plan.Plan, "_autocast", lambda self: half())
    summed, norms = Mock(wraps=kernels.linears.sum_rows), Mock(wraps=kernels.add_norm)
    monkeypatch.setattr(kernels.linears, "sum_rows", summed)
    monkeypatch.setattr(kernels, "add_norm", norms)
    change, options, num_sums = CASES[case]
    model = model_of(**options).train()
    if change is not None:
        change(model.host)
    fast, found = cuda.CudaMSViT(model, inductor=False), []
    for each in (plainly(model), lambda image, mask: run(fast, image, mask, learns=True)):
        for turn in range(2):  # captured; replayed with other weights
            image, mask = batch_of(model, 3)
            mask.requires_grad_()
            model.zero_grad()
            torch.manual_seed(0)  # of stochastic depth
            with half():
                logits = each(image, mask=mask).logits
            logits.float().square().sum().backward()
            with torch.no_grad():
                for weight in model.backbone.parameters():
                    weight.mul_(1.5 if turn == 0 else 1 / 1.5)
        moved = [p for name, p in model.backbone.named_parameters() if not name.endswith("k_norm.bias")]
        found.append([logits, mask.grad, *(p.grad for p in moved)])  # softmax sees none of those biases
    assert_same(found[1], found[0], 0.02 if case == "another class of qkv" else 0.01)  # whose scores are larger
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in model.parameters())
    num_norms = {"a hook of the norm": 3, "another last norm": 3, "rotary positions": 0}.get(case, 4)
    num_runs = 3 * sum(len(plan.steps) for plan in fast._plans.values())  # two warm-ups and a capture
    assert (summed.call_count, norms.call_count) == (num_runs * num_sums, num_runs * num_norms)


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
