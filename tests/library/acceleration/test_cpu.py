"""An accelerated model is the same model: the same numbers, the same weights, the original as it was."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from tiny import KINDS, images, mixed_mask, relative_error, tiny_host
from torch import nn
from torch.nn.utils import parametrizations

import msvit
from msvit.compiling import packed_linear
from msvit.compiling.cpu import CpuMSViT
from msvit.compiling.packed_linear import PackedLinear, has_mkl

needs_mkl = pytest.mark.skipif(not has_mkl(), reason="this build of torch has no MKL")


def converted(name: str = "vit_small_patch16_224", dtype: torch.dtype = torch.float32) -> msvit.MSViT:
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2)).to(dtype)
    return msvit.convert(tiny_host(name, dtype), coarse=8, gate=gate).eval()


def packed_layers(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.fixture(params=["MKL", "no MKL"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With MKL where it is there, and as on a machine without it."""
    if request.param == "MKL" and not has_mkl():
        pytest.skip("this build of torch has no MKL")
    if request.param == "no MKL":
        monkeypatch.setattr(packed_linear, "has_mkl", lambda: False)
    return request.param


@pytest.mark.parametrize("name", KINDS)
def test_the_accelerated_model_gives_the_same_numbers(name: str, either: str) -> None:
    model = converted(name)
    fast = CpuMSViT(model)
    assert packed_layers(fast.backbone)
    assert bool(packed_layers(fast.gate)) == (either == "no MKL")
    for batch, size in ((1, 16), (2, 16), (5, 16), (3, 32)):
        image = images(batch, size, size, torch.float32)
        mask = mixed_mask(max(batch, 2), size // 8, size // 8, torch.float32)[:batch]
        with torch.no_grad():
            assert relative_error(fast(image, mask=mask).logits, model(image, mask=mask).logits) < 1e-5
            got, want = fast(image), model(image)  # by the gate
        assert relative_error(got.logits, want.logits) < 1e-5
        assert torch.equal(got.gate.mask, want.gate.mask)


@pytest.mark.parametrize("rows", [1, 2, 17, 255, 256, 257, 700])
@pytest.mark.parametrize(("num_in", "num_out", "bias"), [(32, 96, True), (33, 1, False), (96, 32, True)])
@pytest.mark.usefixtures("either")
def test_a_packed_layer_takes_any_number_of_rows(rows: int, num_in: int, num_out: int, bias: bool) -> None:
    linear = nn.Linear(num_in, num_out, bias=bias)
    packed, x = PackedLinear.of(linear), torch.randn(rows, 2, num_in)
    with torch.no_grad():
        for given in (x, x.transpose(0, 1), x[:, 0], x[0, 0], x[:0]):
            torch.testing.assert_close(packed(given), linear(given), rtol=1e-4, atol=1e-5)


def test_the_original_stays_as_it_was(either: str) -> None:
    model = converted().train()
    parts, state = dict(model.named_modules()), {name: t.clone() for name, t in model.state_dict().items()}
    fast = CpuMSViT(model)
    fast(images(dtype=torch.float32))
    assert dict(model.named_modules()) == parts
    assert all(part.training for part in parts.values())
    assert not packed_layers(model)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert not any(part.training for part in fast.modules())


def test_weights_are_shared(either: str) -> None:
    model = converted("eva02_tiny_patch14_224")
    fast = CpuMSViT(model)
    own = dict(fast.named_parameters())
    assert own.keys() == dict(model.named_parameters()).keys()
    assert all(own[name] is parameter for name, parameter in model.named_parameters())


CHANGES = {
    "written": lambda layer, new: layer.weight.copy_(new),
    "other data": lambda layer, new: setattr(layer.weight, "data", new),
    "loaded": lambda layer, new: layer.load_state_dict({"weight": new, "bias": layer.bias.clone()}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_noticed(change: str, either: str) -> None:
    model, image = converted(), images(dtype=torch.float32)
    fast, layer = CpuMSViT(model), model.host.blocks[0].mlp.fc1
    with torch.no_grad():
        before = fast(image).logits
        CHANGES[change](layer, torch.randn_like(layer.weight))
        assert relative_error(fast(image).logits, before) > 1e-3
        assert relative_error(fast(image).logits, model(image).logits) < 1e-5


def test_a_weight_put_in_the_place_of_another_is_noticed(either: str) -> None:
    fast, image = CpuMSViT(converted()), images(dtype=torch.float32)
    with torch.no_grad():
        fast(image)
        fast.host.blocks[0].mlp.fc1.weight = nn.Parameter(torch.randn(128, 32))
        assert relative_error(fast(image).logits, copy.deepcopy(fast)(image).logits) < 1e-6


def test_eval_makes_it_look_at_the_weights_again(either: str) -> None:
    model, image = converted(), images(dtype=torch.float32)
    fast = CpuMSViT(model)
    with torch.no_grad():
        fast(image)
        model.host.blocks[0].mlp.fc1.weight.data.mul_(3)  # uncounted, as a fused optimizer's step
        assert relative_error(fast.eval()(image).logits, model(image).logits) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_go_the_plain_way(dtype: torch.dtype) -> None:
    model, image = converted(dtype=dtype), images(dtype=dtype)
    fast = CpuMSViT(model)
    assert not packed_layers(fast)
    with torch.no_grad():
        assert torch.equal(fast(image).logits, model(image).logits)


def test_autocast_goes_the_plain_way() -> None:
    model, image = converted(), images(dtype=torch.float32)
    fast = CpuMSViT(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast(image).logits, model(image).logits)


def test_gradients_are_those_of_the_original(either: str) -> None:
    model, image = converted(), images(dtype=torch.float32)
    fast, grads = CpuMSViT(model), []
    for each in (model, fast):
        model.zero_grad()
        each(image).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in model.host.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_layers_that_do_more_than_their_weights_say_stay() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    host, image = tiny_host(dtype=torch.float32), images(dtype=torch.float32)
    parametrizations.weight_norm(host.blocks[0].mlp.fc1)
    host.blocks[1].mlp.fc1 = Doubled(32, 128)
    model = msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8)).eval()
    fast = CpuMSViT(model)
    assert type(fast.host.blocks[1].mlp.fc1) is Doubled
    with torch.no_grad():
        assert relative_error(fast(image).logits, model(image).logits) < 1e-5


@needs_mkl
def test_a_shape_that_packing_does_not_serve_goes_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL does not promise that a packed weight serves other numbers of rows: where it does not, nothing is packed."""
    packed_linear.any_rows.cache_clear()
    monkeypatch.setattr(packed_linear, "_linear", lambda x, packed, weight, bias, rows: x @ weight.T + rows)
    assert not packed_layers(CpuMSViT(converted()))
    packed_linear.any_rows.cache_clear()


def test_hooks_on_layers_are_called(either: str) -> None:
    model, seen = converted(), []
    model.host.blocks[0].mlp.fc1.register_forward_hook(lambda *_: seen.append(1))
    CpuMSViT(model)(images(dtype=torch.float32))
    assert seen == [1]


def test_macs_are_those_of_the_original(either: str) -> None:
    model, image, mask = converted(), images(4, dtype=torch.float32), mixed_mask(4, 2, 2)
    fast = CpuMSViT(model)
    assert torch.equal(msvit.macs(fast, image, mask), msvit.macs(model, image, mask))
    assert torch.equal(msvit.macs(fast, image), msvit.macs(model, image))


def test_copies_and_files_hold_weights_only(either: str, tmp_path: Path) -> None:
    model, image = converted(), images(dtype=torch.float32)
    fast = CpuMSViT(model)
    with torch.no_grad():
        want = fast(image).logits
        for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), CpuMSViT(fast)):
            assert torch.equal(again(image).logits, want)
        loaded = msvit.load(msvit.save(fast, tmp_path))
        assert relative_error(loaded(image).logits, want) < 1e-5
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_moving_it_elsewhere_is_refused_with_the_remedy(either: str) -> None:
    model = converted()
    fast = CpuMSViT(model)
    with pytest.raises(ValueError, match=r"convert that one .* msvit\.compile again"):
        fast.double()
    assert next(model.parameters()).dtype is torch.float32
    assert fast.to("cpu").float() is fast  # what changes nothing is no trouble


def test_a_model_that_was_not_converted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"msvit\.convert"):
        CpuMSViT(tiny_host())


def test_accelerating_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "has_mkl", lambda: False)
    monkeypatch.setattr(packed_linear, "MAX_SMALL", 100)
    model = msvit.convert(tiny_host(dtype=torch.float32), coarse=8).eval()
    with pytest.warns(UserWarning, match="changes nothing here: .* no MKL"):
        fast = msvit.compile(model)
    assert torch.equal(fast(images(2, dtype=torch.float32)).logits, model(images(2, dtype=torch.float32)).logits)


def test_a_moving_average_written_through_data_is_seen() -> None:
    """By a plain model at once, by one with packed weights after `refresh`."""
    model = msvit.convert(tiny_host(dtype=torch.float32), coarse=8).eval()
    fast, image = msvit.compile(model), images(2, dtype=torch.float32)
    with torch.no_grad():
        before = model(image).logits, fast(image).logits
        for parameter in model.parameters():
            parameter.data.mul_(0.9).add_(torch.ones_like(parameter), alpha=0.1)
        fast.refresh()
        want = msvit.convert(copy.deepcopy(model.host), coarse=8, gate=model.gate).eval()(image).logits
        assert relative_error(model(image).logits, want) < 1e-6
        assert relative_error(fast(image).logits, want) < 1e-5
        assert all(relative_error(logits, want) > 1e-3 for logits in before)
