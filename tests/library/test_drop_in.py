"""A converted model where its host stood: the output acts as its logits, the model has the host's parts and its budget.

What the model says for itself in print is here too.
"""

import pickle
import warnings
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import images, tiny_host, tiny_model, tiny_swin
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import msvit

MODEL = tiny_model(gate=msvit.DiscGate(8, share=0.5)).eval()
HOST: Any = MODEL.host


def output(batch: int = 3) -> msvit.MSViTOutput:
    with torch.no_grad():
        return MODEL(images(batch))


LABEL = torch.tensor([0, 3, 2])
CALLS = {
    "cross entropy": lambda out: F.cross_entropy(out, LABEL),
    "gradient": lambda out: torch.autograd.grad(F.cross_entropy(out, LABEL), HOST.head.weight, retain_graph=True)[0],
    "softmax": lambda out: out.softmax(-1),
    "shape": lambda out: out.shape,
    "mask": lambda out: out[out > 0],
    "rows": list,
    "length": len,
    "sum": lambda out: 2 * out + out / 2 - out**2 - 1,
    "matrix product": lambda out: out @ out.T,
    "with a tensor": lambda out: torch.ones(3, 5, dtype=torch.float64) - out,
    "equal": lambda out: (out == out.T[0, 0], out != out),
    "negative": lambda out: -out,
    "stack": lambda out: torch.stack([out, out]),
    "keyword": lambda out: torch.softmax(input=out, dim=1),
    "numpy": lambda out: out.detach().cpu().numpy(),
    "asarray": np.asarray,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_output_acts_as_its_logits(name: str) -> None:
    out = MODEL(images()) if name == "gradient" else output()
    got, want = CALLS[name](out), CALLS[name](out.logits)
    for mine, other in zip(*(pytree.tree_leaves(value) for value in (got, want)), strict=True):
        assert type(mine) is type(other)
        assert np.array_equal(mine, other) if isinstance(other, Tensor | np.ndarray) else mine == other


def test_an_output_stays_a_record() -> None:
    """A pytree, as FSDP2 and DDP need it; copied, pickled, replaced whole; of no dtype, or accelerate converts it."""
    out = output()
    leaves, spec = pytree.tree_flatten(out)
    gate = (out.gate.logits, out.gate.fine_prob, out.gate.sample, out.gate.mask)
    assert {id(tensor) for tensor in (out.logits, out.tokens.x, *gate)} <= {id(leaf) for leaf in leaves}
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


def test_without_logits_the_error_says_what_to_use() -> None:
    out = replace(output(), logits=None)
    remedy = r"there are no logits.*msvit\.dense_map\(out\.tokens\)"
    for call in (lambda: F.softmax(out, 1), lambda: out + 1, lambda: out[0], lambda: list(out), lambda: len(out)):
        with pytest.raises(TypeError, match=remedy):
            call()
    with pytest.raises(AttributeError, match=remedy):
        out.argmax(1)
    assert repr(out).startswith("MSViTOutput(logits=None, tokens=[")


def test_an_output_prints_in_a_line() -> None:
    out = output()
    assert repr(out) == f"MSViTOutput(logits=(3, 5), tokens=[{out.tokens.count[0]}, ...] of 16)"
    assert repr(output(1)) == f"MSViTOutput(logits=(1, 5), tokens=[{out.tokens.count[0]}] of 16)"


def gradients_model() -> Any:
    """A gate that ranks cells of 8 px by their gradient, four by four in images of 32 px."""
    return msvit.convert(tiny_host(img_size=32), 8, msvit.GradientGate(coarse=8, threshold=0.1)).eval()


def photos(num: int = 6) -> Tensor:
    """Half of each image is flat, the other half is not."""
    image = images(num, 32, 32)
    image[..., 16:] *= 0.01 * torch.rand(num, 1, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return image


def test_a_model_has_the_blocks_and_the_head_of_its_host() -> None:
    model = gradients_model()
    assert model.blocks is model.host.blocks
    assert model.head is model.host.head
    with pytest.raises(AttributeError, match=r"head is the host's.*set model\.host\.head"):
        model.head = torch.nn.Linear(32, 7)
    assert "head" not in dict(model.named_children())
    assert not hasattr(msvit.convert(tiny_swin(), gate="all-fine"), "blocks")


def test_a_model_knows_the_budget_that_was_set_last() -> None:
    model = gradients_model()
    assert model.budget is None
    half = msvit.calibrate(model, photos(), 0.5, unit="tokens")
    assert model.budget is None
    assert half.budget == (0.5, "tokens")
    assert msvit.set_budget(half, 0.7).budget == (0.7, "macs")
    assert half.with_options(gate=msvit.AllFine(8)).budget is None
    assert half.with_options(reducer=msvit.ToMe(r=1)).budget is None
    assert msvit.convert(tiny_host(depth=4), method="auto", budget=0.8).budget == (0.8, "macs")


def test_a_model_prints_gate_mode_budget_and_host_before_its_modules() -> None:
    model = gradients_model()
    lines = repr(model).splitlines()
    host = "host=vit_small_patch16_224"
    assert lines[:2] == ["MSViT(", f"  gate=GradientGate, mode=packed, threshold=0.1, {host}"]
    model = msvit.convert(tiny_host(depth=4), method="auto", budget=0.8, mode="masked")
    wanted = f"  gate=AllFine, mode=masked, budget=0.8 of the dense macs, reducer=ToMe, {host}"
    assert repr(model).splitlines()[1] == wanted


def test_a_batch_of_noise_is_named_once_in_a_model_with_a_budget() -> None:
    noise, message = images(2, 32, 32), r"all cells .* fine, although .* 0\.7 of the dense macs.*torch\.randn"
    model = msvit.calibrate(gradients_model(), photos(), 0.7)
    with torch.no_grad(), pytest.warns(UserWarning, match=message) as warned:
        model(noise)
    assert warned[0].filename == __file__, "neither a line of msvit nor of torch"
    quiet = [gradients_model(), msvit.calibrate(gradients_model(), photos(), 0.7), model.with_options(mode="masked")]
    with torch.no_grad():  # warnings are errors here: a second batch, no budget, photographs, a mask
        model(noise)
        quiet[0](noise)
        quiet[1](photos())
        quiet[1](noise)
        quiet[2](noise, mask=torch.ones(2, 4, 4))


def test_pixels_that_are_not_normalised_are_named_once_in_a_model_with_a_budget() -> None:
    grey = (127.5 * photos() + 127.5).clip(0, 255)
    merging = msvit.convert(tiny_host(depth=4), budget=0.8, method="auto")
    for model in (msvit.calibrate(gradients_model(), photos(), 0.7), merging):
        with torch.no_grad(), pytest.warns(UserWarning, match="pixels are up to 2.., but models take normalised ones"):
            model(grey)
        model(grey)
        quiet = model.with_options(mode="masked")
        quiet.preprocessing = msvit.Preprocessing(size=32, mean=(0.0,) * 3, std=(1 / 255,) * 3)
        quiet(grey)  # as it is prepared here
        model.with_options(mode="masked")(photos() * torch.nan)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_where_values_cannot_be_read_no_batch_is_checked() -> None:
    model = msvit.set_budget(tiny_model(gate=msvit.DiscGate(8, share=0.5), mode="masked"), 0.7)
    image = 100 * images(2, 32, 32)
    with torch.no_grad(), warnings.catch_warnings():
        found = torch.func.vmap(lambda each: model(each[None]).logits[0])(image)
        make_fx(lambda image: model(image).logits)(image)
        assert not model._checked_batch
        warnings.simplefilter("ignore")
        torch.testing.assert_close(found, model(image).logits)


@pytest.mark.parametrize("mode", ["masked", pytest.param("packed", marks=pytest.mark.slow)])
def test_code_with_an_output_can_be_compiled_without_that_warning(mode: str) -> None:
    """In mode masked without graph breaks. A call of the model itself in between lets nothing be compiled again."""
    model, noise = msvit.calibrate(gradients_model(), photos(), 0.7).with_options(mode=mode), images(2, 32, 32)

    def run(image: Tensor) -> Any:
        out = model(image)
        return out * out.logits, torch.softmax(out, 1)

    with torch.no_grad():
        compiled = torch.compile(run, backend="eager", fullgraph=mode == "masked")
        found = compiled(noise)
        with pytest.warns(UserWarning, match="torch.randn"):
            torch.testing.assert_close(found, run(noise))
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(compiled(noise), found)


def test_convert_without_a_gate_takes_the_one_that_comes_with_msvit() -> None:
    model = msvit.convert(tiny_host())
    given, own = (dict(gate.named_parameters()) for gate in (model.gate, msvit.load_gate("default")))
    assert all(torch.equal(given[name], own[name]) for name in own)
    assert isinstance(msvit.convert(tiny_host(), gate="learned").gate, msvit.LearnedGate)
