"""Models compiled with dtype="fp8", by plain launches and graphs that need no GPU (on one: test_fp8_cuda.py)."""

import io
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from fake_graphs import use_fake_graphs
from plain_launches import use_plain_launches
from tiny import KINDS, SWINS, batch_of, interprets, relative_error, tiny_model
from torch import Tensor

import msvit
from msvit.compiling import cuda, fp8_encoder, plan
from msvit.compiling.fp8_encoder import FP8, Fp8Encoder
from msvit.execution.attention import force_backend
from msvit.types import MSViTOutput

pytestmark = pytest.mark.skipif(not interprets(), reason="needs Triton's interpreter, and so no GPU")
HOSTS = (KINDS[0], KINDS[1], KINDS[4])  # a class token; layer scales and registers; pooling by attention
# Relative errors: of tiny models with random weights, by rounding to three bits, and by rounding to bfloat16.
BOUND, EXACT_BOUND = 0.2, 0.03


def plain_scaled_mm(
    x: Tensor, weight: Tensor, scale_x: Tensor, scale_weight: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype,
    use_fast_accum: bool, out: Tensor,
) -> Tensor:  # fmt: skip
    """torch._scaled_mm with scales per row and column, and what it asks for on a GPU."""
    rows, columns = x.shape[0], weight.shape[1]
    assert x.dtype is weight.dtype is fp8_encoder.FP8
    assert x.is_contiguous()
    assert weight.T.is_contiguous()
    assert x.shape[1] % 16 == columns % 16 == 0
    assert (scale_x.shape, scale_weight.shape) == ((rows, 1), (1, columns))
    assert scale_x.dtype is scale_weight.dtype is torch.float32
    assert out.dtype is out_dtype is torch.bfloat16
    product = (x.double() @ weight.double()) * scale_x * scale_weight
    return out.copy_(product if bias is None else product + bias)


@pytest.fixture(autouse=True, params=["one graph", "buckets"])
def _graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_fake_graphs(monkeypatch)
    use_plain_launches(monkeypatch)
    monkeypatch.setattr(torch, "_scaled_mm", plain_scaled_mm)
    monkeypatch.setattr(fp8_encoder, "unsupported_device", lambda device: None)
    if request.param == "buckets":
        monkeypatch.setattr(plan, "SMALL", 8)
        monkeypatch.setattr(plan, "ALIGN", 4)
    with force_backend("triton"):
        yield


once = pytest.mark.parametrize("_graphs", ["buckets"], indirect=True)


def pair(name: str = KINDS[0], **options: Any) -> tuple[msvit.MSViT, cuda.CudaMSViT]:
    """A model in 32 bits, and the same with weights in bfloat16, compiled for FP8."""
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2), threshold=3.0)
    model = tiny_model(name, torch.float32, gate=gate, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases, positions and layer scales are 0 or constant at first
            parameter.add_(0.2 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16())
    return model, cuda.CudaMSViT(deepcopy(model).bfloat16(), inductor=False, dtype="fp8")


def run(fast: cuda.CudaMSViT, image: Tensor, mask: Tensor | None = None, learns: bool = False) -> MSViTOutput:
    """What forward does with images on a GPU."""
    with torch.set_grad_enabled(learns):
        return fast._run_plan(image.bfloat16(), mask, learns)


def plain(model: msvit.MSViT, image: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad(), force_backend("sdpa"):
        return model(image, mask=mask).logits


@pytest.mark.parametrize(
    ("_graphs", "name", "stored"),
    [("buckets", name, torch.float32) for name in HOSTS]
    + [("one graph", HOSTS[1], torch.float32), ("buckets", HOSTS[1], FP8)],
    indirect=["_graphs"],
)
def test_it_is_near_the_model_whatever_was_predicted(
    name: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without rounding to FP8 as near as in bfloat16: scales, biases, layer scales and residuals are right."""
    monkeypatch.setattr(fp8_encoder, "FP8", stored)
    model, fast = pair(name)
    assert type(fast.fused) is Fp8Encoder
    image, mask = batch_of(model, 3)
    for given in (torch.zeros_like(mask), torch.ones_like(mask), mask):  # predicted too small, then too large
        out = run(fast, image, given)
        with torch.no_grad(), force_backend("sdpa"):
            want = model(image, mask=given)
        for got, wanted in ((out.logits, want.logits), (msvit.dense_map(out.tokens), msvit.dense_map(want.tokens))):
            assert relative_error(got.float(), wanted) < (BOUND if stored is FP8 else EXACT_BOUND)


@once
@pytest.mark.parametrize("name", HOSTS[:2])
def test_weights_times_their_scales_are_those_of_the_layers(name: str) -> None:
    """That of fc2 with its layer scale, so that the residual gets what the block adds to it."""
    model, fast = pair(name)
    image, mask = batch_of(model, 2)
    run(fast, image, mask)
    made = [value.float() * scale for value, scale in fast.fused.weights]
    wanted = []
    for block in model.host.blocks:
        scale = getattr(block.ls2, "gamma", torch.ones(32))
        wanted += [block.attn.qkv.weight, block.mlp.fc1.weight, block.mlp.fc2.weight * scale[:, None]]
    assert all(relative_error(got, want) < 0.03 for got, want in zip(made, wanted, strict=True))


@once
@pytest.mark.parametrize("layer", ["mlp.fc2", "all"])
def test_changed_weights_are_seen_by_all_batch_sizes_which_share_one_copy(
    layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes that PyTorch counts, and `refresh()` after others."""
    monkeypatch.setattr(fp8_encoder, "FP8", torch.float32)
    model, fast = pair()
    batches = [batch_of(model, num) for num in ((2, 3) if layer == "all" else (2,))]
    for image, mask in batches:
        run(fast, image, mask)
    addresses = [rows.value.data_ptr() for rows in fast.fused.weights]
    with torch.no_grad():
        for (name, old), new in zip(model.named_parameters(), fast.parameters(), strict=True):
            if layer == "all":
                old.copy_((0.7 * old).bfloat16())
                new.data.copy_(old)
            elif name.endswith(f"{layer}.weight"):
                new.copy_(old.neg_())
    if layer == "all":
        fast.refresh()
    for image, mask in batches:
        assert relative_error(run(fast, image, mask).logits.float(), plain(model, image, mask)) < EXACT_BOUND
    assert [rows.value.data_ptr() for rows in fast.fused.weights] == addresses


@once
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, about NaN
def test_nan_stays_in_its_image_and_its_batch() -> None:
    model, fast = pair()
    image, mask = batch_of(model)
    wanted = plain(model, image, mask)
    wrong = image.clone()
    wrong[0, :, 0, 0] = torch.nan
    for each, is_nan in ((image, False), (wrong, True), (image, False)):
        found = run(fast, each, mask).logits.float()
        assert found.isnan().all(1).tolist() == [is_nan, False, False, False]
        assert relative_error(found[1:], wanted[1:]) < BOUND


@once
@pytest.mark.parametrize("way", ["with_options", "pickle", "compile"])
def test_another_model_of_it_runs_in_fp8_too(way: str) -> None:
    model, fast = pair()
    image, mask = batch_of(model, 2)
    want = run(fast, image, mask).logits
    if way == "with_options":
        other = fast.with_options(gate=msvit.AllFine(coarse=8))
    elif way == "compile":
        other = cuda.CudaMSViT(fast, **fast.settings)
    else:
        file = io.BytesIO()
        torch.save(fast, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert type(other.fused) is Fp8Encoder
    assert torch.equal(run(other.eval(), image, mask).logits, want)


def halved(**options: Any) -> Any:
    return lambda: tiny_model(dtype=torch.bfloat16, **options)


UNSUPPORTED = {
    "mode packed, and this is masked": halved(mode="masked"),
    "reducer ToMe runs in 16 bits; use model.with_options": halved(reducer=msvit.ToMe(r=2)),
    "float32; use model.bfloat16": lambda: tiny_model(dtype=torch.float32),
    "float16; use model.bfloat16": lambda: tiny_model(dtype=torch.float16),
    "multiples of 16, and here are 40, 120": halved(embed_dim=40, num_heads=1),
    "timm's usual ViT blocks, .* Eva differ": lambda: tiny_model(KINDS[2], torch.bfloat16),
    "timm's usual ViT blocks, .* SwinTransformer": lambda: tiny_model(SWINS[0], torch.bfloat16),
}


@once
@pytest.mark.parametrize("message", UNSUPPORTED)
def test_models_that_cannot_run_in_fp8_raise(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cuda.CudaMSViT(UNSUPPORTED[message]().eval(), dtype="fp8")


@once
def test_a_model_that_cannot_stay_in_fp8_raises() -> None:
    _, fast = pair()
    with pytest.raises(ValueError, match="the reducer EViT runs in 16 bits"):
        fast.with_options(reducer=msvit.EViT(0.5, at=(0,)))
    with pytest.raises(ValueError, match="CUDA graphs only; leave out graphs=False"):
        cuda.CudaMSViT(fast, graphs=False, dtype="fp8")


@once
def test_heads_that_our_attention_does_not_take_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_encoder, "choose_backend", lambda *given, cuda: "varlen")
    with pytest.raises(ValueError, match="heads of 16 channels run by varlen"):
        pair()


@once
@pytest.mark.parametrize("call", ["training", "train mode", "autocast", "images in float32", "images' gradients"])
def test_calls_that_cannot_run_in_fp8_raise(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = pair()
    image, mask = batch_of(model, 2)
    image = image if call == "images in float32" else image.bfloat16()
    image.requires_grad_(call == "images' gradients")
    if call == "train mode":
        fast.train()
    monkeypatch.setattr(fp8_encoder, "autocast_dtype", lambda: torch.float16 if call == "autocast" else None)
    message = {
        "training": "is for inference; .* train a model compiled without dtype",
        "train mode": "call eval",
        "autocast": "autocast is on",
        "images in float32": "these are torch.float32; use images.bfloat16",
        "images' gradients": "no gradients of images",
    }[call]
    plan_only = partial(fast._run_plan, needs_grad=False)  # what forward does on a GPU
    for each in (plan_only,) if call == "train mode" else (fast, fast.encode):
        with torch.set_grad_enabled(call == "training"), pytest.raises(ValueError, match=message):
            each(image, mask)


DEVICES = {
    "on cpu; move it there first": ("cpu", None, None),
    "cuda:0 has 8.6": ("cuda:0", (8, 6), None),
    r"no such product for cuda:0 \(NOT_SUPPORTED\); install another": ("cuda:0", (12, 0), "NOT_SUPPORTED"),
}


@once
@pytest.mark.parametrize("message", DEVICES)
def test_other_devices_raise(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    device, capability, error = DEVICES[message]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fp8_encoder, "product_error", lambda device: error)
    assert re.search(message, fp8_encoder.unsupported_device(torch.device(device)) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fp8_encoder, "product_error", lambda device: None)
    assert (fp8_encoder.unsupported_device(torch.device(device)) is None) == (device != "cpu")
    with pytest.raises(ValueError, match='dtype is "fp8", but it needs a CUDA device'):
        msvit.compile(msvit.convert_segmenter(tiny_model(dtype=torch.bfloat16).host, 3, coarse=8), dtype="fp8")


@once
def test_the_error_of_a_product_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = fp8_encoder.product_error.__wrapped__
    assert probe(torch.device("cpu")) is None

    def broken(*given: Any, **options: Any) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", broken)
    assert probe(torch.device("cpu")) == "CUBLAS_STATUS_NOT_SUPPORTED"


@once
@pytest.mark.parametrize("dtype", ["int8", torch.float8_e4m3fn, True])
def test_other_types_raise(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r'must be None \(that of the weights\) or "fp8"'):
        msvit.compile(tiny_model(), dtype=dtype)
