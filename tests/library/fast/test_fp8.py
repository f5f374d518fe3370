"""What dtype="fp8" takes and what it raises for (its numbers: test_replays.py, on a GPU test_fp8_cuda.py)."""

import io
import re
from functools import partial
from typing import Any

import pytest
import torch
from compiled_pairs import pair, run
from tiny import KINDS, SWINS, batch_of, tiny_model

import msvit
from msvit.fast import cuda, fp8_encoder
from msvit.fast.fp8_encoder import Fp8Encoder

pytestmark = pytest.mark.usefixtures("fake_graphs")




@pytest.mark.parametrize("way", ["with_options", "pickle", "compile"])
def test_another_model_of_it_runs_in_fp8_too(way: str) -> None:
    model, fast = pair(dtype="fp8")
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


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_models_that_cannot_run_in_fp8_raise(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cuda.CudaMSViT(UNSUPPORTED[message]().eval(), dtype="fp8")


def test_a_model_that_cannot_stay_in_fp8_raises() -> None:
    _, fast = pair(dtype="fp8")
    with pytest.raises(ValueError, match="the reducer EViT runs in 16 bits"):
        fast.with_options(reducer=msvit.EViT(0.5, at=(0,)))
    with pytest.raises(ValueError, match="CUDA graphs only; leave out graphs=False"):
        cuda.CudaMSViT(fast, graphs=False, dtype="fp8")


def test_heads_that_our_attention_does_not_take_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_encoder, "choose_backend", lambda *given, cuda: "varlen")
    with pytest.raises(ValueError, match="heads of 16 channels run by varlen"):
        pair(dtype="fp8")


@pytest.mark.parametrize("call", ["training", "train mode", "autocast", "images in float32", "images' gradients"])
def test_calls_that_cannot_run_in_fp8_raise(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = pair(dtype="fp8")
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


def test_the_error_of_a_product_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = fp8_encoder.product_error.__wrapped__
    assert probe(torch.device("cpu")) is None

    def broken(*given: Any, **options: Any) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", broken)
    assert probe(torch.device("cpu")) == "CUBLAS_STATUS_NOT_SUPPORTED"


@pytest.mark.parametrize("dtype", ["int8", torch.float8_e4m3fn, True])
def test_other_types_raise(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r'must be None \(that of the weights\) or "fp8"'):
        msvit.compile(tiny_model(), dtype=dtype)
