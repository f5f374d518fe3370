"""Blocks with kernels of 16-bit training against the same blocks without them, and which of their biases are fused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_pairs import doubled, model_of
from plain_kernels import use_plain_kernels
from timm.layers import DropPath, RmsNorm
from tiny import KINDS, assert_same, batch_of, interprets
from torch import Tensor, nn

from msvit.execution.attention import force_backend
from msvit.fast import cuda, fast_layers, training_blocks
from msvit.fast.encoders import PlainTables
from msvit.fast.find_kernels import kernels
from msvit.fast.graphs import HalfWeights
from msvit.fast.training_plan import linear_weights, trained_weights

pytestmark = pytest.mark.skipif(not interprets(), reason="needs Triton's interpreter, and so no GPU")


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
def test_fused_biases_have_the_gradients_of_plain_ones(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, options, num_sums = CASES[case]
    model = model_of(**options)
    if change is not None:
        change(model.host)
    fast = cuda.CudaMSViT(model.train(), inductor=False)
    encoder = fast.compiled_encoder
    assert encoder.adds_norms
    use_plain_kernels(monkeypatch)
    summed = count_calls(monkeypatch, kernels.linears, "sum_rows")
    norms = count_calls(monkeypatch, kernels, "add_norm")
    found = []
    for kernel in (False, True):
        for module in (fast_layers, training_blocks):
            monkeypatch.setattr(module, "runs_kernels", lambda x, kernel=kernel: kernel)
        found.append(step(fast, encoder))
    assert_same(found[1], found[0], 0.02)
    assert [t.dtype for t in found[1] if t is not None] == [t.dtype for t in found[0] if t is not None]
    assert len(summed) == num_sums
    assert len(norms) == (3 if case in ("a hook of the norm", "another last norm") else 4)


def count_calls(patch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    calls, function = [], getattr(module, name)

    def call(*given: Any) -> Any:
        calls.append(given)
        return function(*given)

    patch.setattr(module, name, call)
    return calls


def step(fast: cuda.CudaMSViT, encoder: Any) -> list[Tensor | None]:
    """Outputs and gradients under autocast, with copies of weights in 16 bits and with slots to spare."""
    torch.manual_seed(0)  # of stochastic depth
    image, mask = batch_of(fast, 3)
    mask.requires_grad_()
    halves = HalfWeights(linear_weights(encoder), torch.float16)
    halves.refresh()
    leaves = {n: nn.Parameter(w.detach()) for n, w in {**trained_weights(encoder), **halves.copies}.items()}
    with torch.autocast("cpu", torch.float16, cache_enabled=False), force_backend("triton"):
        indices = encoder.pack_indices(mask.detach(), torch.rand_like(mask), fast.grid(image), 60, 0)
        given = (image, mask, indices, PlainTables(), False, True)
        logits, x, *_ = torch.func.functional_call(encoder, leaves, given)
    loss = logits.float().square().sum() + x[:30].square().sum()
    moved = [leaf for name, leaf in leaves.items() if not name.endswith("k_norm.bias")]  # softmax sees none of these
    return [logits, x, *torch.autograd.grad(loss, [mask, *moved], allow_unused=True)]
