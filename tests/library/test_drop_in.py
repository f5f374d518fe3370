"""A converted model where its host stood: the output acts as its logits, the model has the host's parts and its budget.

What the model says for itself in print, and what it says of the commonest mistakes, is here too.
"""

import pickle
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import images, tiny_host, tiny_model
from torch import Tensor
from torch.utils import _pytree as pytree

import msvit


def output(batch: int = 3) -> msvit.MSViTOutput:
    with torch.no_grad():
        return tiny_model(gate=msvit.DiscGate(8, share=0.5)).eval()(images(batch))


LABEL = torch.tensor([0, 3, 2])
CALLS = {
    "cross entropy": lambda out: F.cross_entropy(out, LABEL),
    "argmax": lambda out: out.argmax(1),
    "softmax": lambda out: out.softmax(-1),
    "topk": lambda out: out.topk(2),
    "float": lambda out: out.float(),
    "shape": lambda out: out.shape,
    "device": lambda out: out.device,
    "row": lambda out: out[0],
    "column": lambda out: out[:, 3],
    "mask": lambda out: out[out > 0],
    "rows": list,
    "length": len,
    "sum": lambda out: 2 * out + out / 2 - out**2 - 1,
    "matrix product": lambda out: out @ out.T,
    "with a tensor": lambda out: torch.ones(3, 5, dtype=torch.float64) - out,
    "negative": lambda out: -out,
    "max": lambda out: torch.max(out, 1),
    "stack": lambda out: torch.stack([out, out]),
    "cat": lambda out: torch.cat([out, out], dim=1),
    "keyword": lambda out: torch.softmax(input=out, dim=1),
    "equal labels": lambda out: (out.argmax(1) == LABEL).sum(),
    "numpy": lambda out: out.detach().cpu().numpy(),
    "asarray": np.asarray,
    "mse": lambda out: F.mse_loss(out, out.detach() + 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_output_acts_as_its_logits(name: str) -> None:
    out = output()
    got, want = CALLS[name](out), CALLS[name](out.logits)
    for mine, other in zip(*(pytree.tree_leaves(value) for value in (got, want)), strict=True):
        assert type(mine) is type(other)
        assert np.array_equal(mine, other) if isinstance(other, Tensor | np.ndarray) else mine == other


def test_the_loss_of_an_output_has_the_gradient_of_its_logits() -> None:
    model = tiny_model(gate=msvit.DiscGate(8, share=0.5))
    grads = [torch.autograd.grad(F.cross_entropy(pick(model(images())), LABEL), model.host.head.weight)[0]
             for pick in (lambda out: out, lambda out: out.logits)]  # fmt: skip
    assert grads[0].norm() > 0
    assert torch.equal(*grads)


def test_an_output_unpacks_by_image_and_its_own_fields_come_first() -> None:
    out = output(2)
    first, second = out
    assert torch.equal(first, out.logits[0])
    assert torch.equal(second, out.logits[1])
    assert isinstance(out.gate, msvit.GateOutput)
    assert isinstance(out.tokens, msvit.TokenBatch)


def test_an_output_stays_a_record() -> None:
    """A pytree, as FSDP2 and DDP need it; copied, pickled and replaced whole; and no tensor for accelerate."""
    out = output()
    leaves, spec = pytree.tree_flatten(out)
    assert len(leaves) == 7
    moved = pytree.tree_map_only(Tensor, lambda tensor: tensor + 1, out)
    assert isinstance(moved, msvit.MSViTOutput)
    assert torch.equal(moved.gate.mask, out.gate.mask + 1)
    pickled = pickle.loads(pickle.dumps(out))
    for other in (pytree.tree_unflatten(leaves, spec), deepcopy(out), pickled, replace(out, gate=out.gate)):
        assert isinstance(other, msvit.MSViTOutput)
        assert torch.equal(other.logits, out.logits)
        assert torch.equal(other.tokens.x, out.tokens.x)
    assert not isinstance(out, Tensor)
    assert not hasattr(out, "dtype")
    with pytest.raises(AttributeError, match=r"no attribute 'dtype'; use out\.logits\.dtype"):
        _ = out.dtype


def test_accelerate_leaves_an_output_in_16_bits_a_record() -> None:
    operations = pytest.importorskip("accelerate.utils.operations")
    out = output()
    half = replace(out, logits=out.logits.bfloat16())
    assert operations.convert_to_fp32(half) is half


def test_without_logits_the_error_says_what_to_use() -> None:
    out = replace(output(), logits=None)
    remedy = r"there are no logits.*msvit\.dense_map\(out\.tokens\)"
    for call in (lambda: F.softmax(out, 1), lambda: out + 1, lambda: out[0], lambda: list(out), lambda: len(out)):
        with pytest.raises(TypeError, match=remedy):
            call()
    with pytest.raises(AttributeError, match=remedy):
        out.argmax(1)
    assert repr(out).startswith("MSViTOutput(logits=None, tokens=[")


@pytest.mark.parametrize("read", [lambda out: out.logits * 2, lambda out: out * 2, lambda out: torch.softmax(out, 1)])
def test_code_with_an_output_can_be_compiled(read: Any) -> None:
    model = tiny_model(gate=msvit.DiscGate(8, share=0.5), mode="masked").eval()

    def run(image: Tensor) -> Any:
        return read(model(image))

    with torch.no_grad():
        found = torch.compile(run, backend="eager", fullgraph=True)(images())
        torch.testing.assert_close(found, run(images()))


def test_an_output_prints_in_a_line() -> None:
    out = output()
    assert repr(out) == f"MSViTOutput(logits=(3, 5), tokens=[{out.tokens.count[0]}, ...] of 16)"
    assert repr(output(1)) == f"MSViTOutput(logits=(1, 5), tokens=[{out.tokens.count[0]}] of 16)"
