"""A compiled model is the same model: the same numbers, the same weights, the original as it was."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_pairs import Doubled, doubled
from tiny import KINDS, SWINS, assert_same, assert_same_output, gradients, images, relative_error, tiny_model
from torch import nn
from torch.nn.utils import parametrizations

import msvit
from msvit.fast import packed_linear
from msvit.fast.cpu import CpuMSViT
from msvit.fast.cuda import CudaMSViT
from msvit.fast.packed_linear import PackedLinear, has_mkl

FORMS = {"MKL": "pack_for_mkl", "oneDNN": "pack_for_onednn", "neither": "make_column_major"}


def converted(name: str = KINDS[0], dtype: torch.dtype = torch.float32, **options: Any) -> msvit.MSViT:
    return tiny_model(name, dtype, msvit.LearnedGate(coarse=8, grid=(2, 2)).to(dtype), **options).eval()


def packed_layers(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.fixture(params=FORMS)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a machine with MKL, on ARM64 with oneDNN, and with neither, as far as this build of torch has them."""
    name = request.param
    available = {"MKL": has_mkl(), "oneDNN": torch.backends.mkldnn.is_available(), "neither": True}
    if not available[name]:
        pytest.skip(f"this build of torch has no {name}")
    monkeypatch.setattr(packed_linear, "has_mkl", lambda: name == "MKL")
    monkeypatch.setattr(packed_linear, "has_acl", lambda: name == "oneDNN")
    monkeypatch.setattr(packed_linear, "MAX_SMALL_ACL", 0)  # so that layers of tiny models are packed
    return name


def for_a_gpu(model: nn.Module) -> CudaMSViT:
    return CudaMSViT(model, inductor=False, graphs=False)


@pytest.mark.parametrize("name", [*KINDS, SWINS[0]])
def test_the_compiled_model_gives_the_same_output_and_macs(name: str, library: str) -> None:
    model = tiny_model(name, torch.float32).eval()
    fast, coarse = CpuMSViT(model), model.coarse
    assert packed_layers(fast.backbone)
    assert bool(packed_layers(fast.gate)) == (library != "MKL")
    assert {layer._packed.__qualname__.partition(".")[0] for layer in packed_layers(fast)} == {FORMS[library]}
    for batch, cells in ((1, 2), (2, 2), (5, 2), (3, 4)):
        image = images(batch, cells * coarse, cells * coarse, torch.float32)
        share = 1 - torch.arange(batch)[:, None, None] / 2  # of fine cells: all, half, none
        mask = (torch.rand(batch, cells, cells) < share).float()
        for given in (mask, None):  # None: by the gate
            with torch.no_grad():
                assert_same_output(fast(image, mask=given), model(image, mask=given), 1e-5)
            assert torch.equal(msvit.macs(fast, image, given), msvit.macs(model, image, given))
    with torch.no_grad():
        maps = [each.forward_intermediates(image, mask=mask, intermediates_only=True) for each in (fast, model)]
        assert_same(*maps, 1e-5)
    assert_same(*(gradients(each(image).logits, model.host) for each in (fast, model)), 0)


@pytest.mark.parametrize(("num_in", "num_out", "bias"), [(32, 96, True), (33, 1, False), (96, 32, True)])
@pytest.mark.usefixtures("library")
def test_a_packed_layer_takes_any_number_of_rows(num_in: int, num_out: int, bias: bool) -> None:
    linear = nn.Linear(num_in, num_out, bias=bias)
    packed = PackedLinear.of(linear)
    with torch.no_grad():
        for rows in (1, 2, 17, 255, 256, 257, 700):
            x = torch.randn(rows, 2, num_in)
            for given in (x, x.transpose(0, 1), x[:, 0], x[0, 0], x[:0]):
                torch.testing.assert_close(packed(given), linear(given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [CpuMSViT, for_a_gpu])
def test_the_original_stays_as_it_was_and_shares_its_weights(make: Callable[..., msvit.MSViT], library: str) -> None:
    model = converted("eva02_tiny_patch14_224", mode="masked").train()
    model.gate.eval()
    parts, modes = dict(model.named_modules()), [part.training for part in model.modules()]
    state = {name: t.clone() for name, t in model.state_dict().items()}
    fast = make(model)
    assert fast.mode == "masked"
    assert [part.training for part in fast.modules()] == ([False] * len(modes) if make is CpuMSViT else modes)
    fast.eval()(images(dtype=torch.float32))
    assert dict(model.named_modules()) == parts
    assert [part.training for part in model.modules()] == modes
    assert not packed_layers(model)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert fast.state_dict().keys() == state.keys()
    assert {name: id(p) for name, p in fast.named_parameters()} == {n: id(p) for n, p in model.named_parameters()}


CHANGES = {
    "written": lambda fast, layer, new: layer.weight.copy_(new),
    "other data": lambda fast, layer, new: setattr(layer.weight, "data", new),
    "loaded": lambda fast, layer, new: layer.load_state_dict({"weight": new, "bias": layer.bias.clone()}),
    "uncounted": lambda fast, layer, new: (layer.weight.data.copy_(new), fast.eval()),  # as a fused optimizer's step
    "a moving average": lambda fast, layer, new: (layer.weight.data.mul_(0.9).add_(new, alpha=0.1), fast.refresh()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("library")
def test_changed_weights_are_noticed(change: str) -> None:
    """By a plain model at once, by one with packed weights after `eval` or `refresh` if the write is not counted."""
    model, image = converted(), images(dtype=torch.float32)
    fast, layer = CpuMSViT(model), model.host.blocks[0].mlp.fc1
    with torch.no_grad():
        before = fast(image).logits
        CHANGES[change](fast, layer, torch.randn_like(layer.weight))
        want = msvit.convert(copy.deepcopy(model.host), coarse=8, gate=model.gate).eval()(image).logits
        assert relative_error(before, want) > 1e-3
        assert relative_error(model(image).logits, want) < 1e-6
        assert relative_error(fast(image).logits, want) < 1e-5
        fast.host.blocks[0].mlp.fc1.weight = nn.Parameter(torch.randn(128, 32))  # in the place of another
        assert relative_error(fast(image).logits, copy.deepcopy(fast)(image).logits) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_other_dtypes_and_autocast_go_the_plain_way(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "has_bf16", lambda: False)
    model, image = converted(dtype=dtype), images(dtype=dtype)
    fast, float32 = CpuMSViT(model), dtype is torch.float32
    assert float32 or not packed_layers(fast)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=float32):
        assert torch.equal(fast(image).logits, model(image).logits)


@pytest.mark.skipif(not packed_linear.has_bf16(), reason="this CPU does not multiply bfloat16, or is no x86_64")
def test_bfloat16_is_packed_where_the_cpu_multiplies_it() -> None:
    model, image = converted(dtype=torch.bfloat16), images(dtype=torch.bfloat16)
    fast = msvit.compile(model)
    assert fast.unsupported_reason() is None
    assert {layer._packed.__qualname__.partition(".")[0] for layer in packed_layers(fast.backbone)} == {FORMS["oneDNN"]}
    with torch.no_grad():
        assert relative_error(fast(image).logits, model(image).logits) < 0.02
    assert "in torch.bfloat16, and these are in torch.float32" in fast.unsupported_reason(torch.float32)


@pytest.mark.usefixtures("library")
def test_layers_that_do_more_than_their_weights_say_stay() -> None:
    host, image = converted().host, images(dtype=torch.float32)
    host.blocks[0].mlp.fc2.register_forward_hook(lambda layer, given, out: 3 * out)
    parametrizations.weight_norm(host.blocks[0].mlp.fc1)
    host.blocks[1].mlp.fc1 = doubled(host.blocks[1].mlp.fc1)
    model = msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8)).eval()
    fast = CpuMSViT(model)
    assert type(fast.host.blocks[1].mlp.fc1) is Doubled
    with torch.no_grad():
        assert relative_error(fast(image).logits, model(image).logits) < 1e-5


def test_where_packing_serves_nothing_a_warning_says_why(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library promises that a packed weight serves other numbers of rows: where it does not, nothing is packed."""
    model, x, image = converted(), torch.randn(5, 32), images(dtype=torch.float32)
    linear = model.host.blocks[0].mlp.fc1
    packed_linear.any_rows.cache_clear()
    if library == "neither":  # a column-major weight is an ordinary tensor, but too large a one gains nothing
        monkeypatch.setattr(packed_linear, "MAX_SMALL", 100)
    else:
        monkeypatch.setattr(packed_linear, FORMS[library], lambda weight: lambda x, bias: x.new_ones(1))
    with pytest.warns(UserWarning, match=f"changes nothing here: .* {library}"):
        fast = msvit.compile(model)
    assert not packed_layers(fast)
    with torch.no_grad():
        assert torch.equal(PackedLinear.of(linear)(x), linear(x))
        assert torch.equal(fast(image).logits, model(image).logits)
    packed_linear.any_rows.cache_clear()


@pytest.mark.parametrize("make", [CpuMSViT, for_a_gpu])
@pytest.mark.usefixtures("library")
def test_an_uncompiled_model_is_as_before_compiling(make: Callable[..., msvit.MSViT]) -> None:
    model, image = converted(), images(dtype=torch.float32)
    fast: Any = make(model)
    with torch.no_grad():
        fast(image)
        plain = fast.uncompiled()
        assert torch.equal(plain(image).logits, model(image).logits)
    assert [type(part) for part in plain.modules()] == [type(part) for part in model.modules()]
    assert all(one is other for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    pickle.dumps(plain)
    assert model.uncompiled() is model
    segmenter = msvit.convert_segmenter(model.host, 5, coarse=8, gate=model.gate).eval()
    assert type(msvit.compile(segmenter).uncompiled().encoder) is msvit.MSViT


@pytest.mark.usefixtures("library")
def test_models_are_packed_under_autocast_too() -> None:
    packed_linear.any_rows.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert packed_layers(CpuMSViT(converted()))


@pytest.mark.parametrize("make", [CpuMSViT, for_a_gpu])
@pytest.mark.usefixtures("library")
def test_copies_and_files_hold_weights_only(make: Callable[..., msvit.MSViT], tmp_path: Path) -> None:
    model, image = converted(), images(dtype=torch.float32)
    fast = make(model)
    with torch.no_grad():
        want = fast(image).logits
        for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), make(fast)):
            assert torch.equal(again(image).logits, want)
        loaded = msvit.load(msvit.save(fast, tmp_path))
        assert relative_error(loaded(image).logits, want) < 1e-5
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert CudaMSViT(fast).inductor
    assert fast.to("cpu").float() is fast  # what changes nothing is no trouble
    with pytest.raises(ValueError, match="again"):
        fast.double()
    assert next(model.parameters()).dtype is torch.float32
