"""Captured training steps in 16 bits: blocks with the kernels of training, and which of their biases are fused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compiled_pairs import doubled, model_of, plainly, run
from timm.layers import DropPath, RmsNorm
from tiny import KINDS, assert_same, batch_of
from torch import Tensor, nn

from msvit.fast import cuda, fast_layers, plan, training_blocks
from msvit.fast.find_kernels import kernels

pytestmark = pytest.mark.usefixtures("fake_graphs")


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
    "proportional attention": (None, {"power": 0.5}, 0),
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
    summed, norms = (count_calls(monkeypatch, *at) for at in ((kernels.linears, "sum_rows"), (kernels, "add_norm")))
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
    assert_same(found[1], found[0], 0.02)
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in model.parameters())
    num_norms = {"a hook of the norm": 3, "another last norm": 3, "rotary positions": 0}.get(case, 4)
    num_runs = 3 * sum(len(plan.steps) for plan in fast._plans.values())  # two warm-ups and a capture
    assert (len(summed), len(norms)) == (num_runs * num_sums, num_runs * num_norms)


def count_calls(patch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    calls, function = [], getattr(module, name)

    def call(*given: Any) -> Any:
        calls.append(given)
        return function(*given)

    patch.setattr(module, name, call)
    return calls
