"""What dtype="fp8" takes and what it raises for (its numbers: test_replays.py, on a GPU test_fp8_cuda.py)."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_pairs import pair, run
from tiny import KINDS, SWINS, batch_of, tiny_model

import msvit
from msvit.fast import cuda, fp8_encoder
from msvit.fast.fp8_encoder import Fp8Encoder

pytestmark = pytest.mark.usefixtures("fake_graphs")


WAYS: dict[str, Callable[[cuda.CudaMSViT], cuda.CudaMSViT]] = {
    "with_options": lambda fast: fast.with_options(gate=msvit.AllFine(coarse=8)),
    "pickle": lambda fast: pickle.loads(pickle.dumps(fast)),
    "compile": lambda fast: cuda.CudaMSViT(fast, **fast.settings),
}


@pytest.mark.parametrize("way", WAYS)
def test_another_model_of_it_runs_in_fp8_too(way: str) -> None:
    model, fast = pair(dtype="fp8")
    image, mask = batch_of(model, 2)
    other = WAYS[way](fast)
    assert type(other.fused) is Fp8Encoder
    assert isinstance(other.gate, msvit.AllFine) == (way == "with_options")
    assert torch.equal(run(other.eval(), image, mask).logits, run(fast, image, mask).logits)


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "needs graphs, mode packed, .* mode masked": {"mode": "masked"},
    "needs graphs, mode packed, .* graphs=False": {"graphs": False},
    "needs reducer=None, and here is ToMe": {"reducer": msvit.ToMe(r=2)},
    r"model.bfloat16\(\)\), and here is torch.float16": {"dtype": torch.float16},
    "widths that 16 divides, .* with heads of {40}": {"embed_dim": 40, "num_heads": 1},
    "timm's usual ViT blocks, .* here is a Eva": {"name": KINDS[2]},
    "timm's usual ViT blocks, .* here is a SwinTransformer": {"name": SWINS[0]},
    "Triton with heads of 16, 32, 64 or 128 .* heads of {16}": {"backend": "varlen"},
    r"a CUDA device of capability \(8, 9\), and here is cpu": {"capability": (8, 9)},
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_models_that_cannot_run_in_fp8_raise(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"dtype": torch.bfloat16, **UNSUPPORTED[message]}
    graphs, backend = options.pop("graphs", True), options.pop("backend", "triton")
    monkeypatch.setattr(fp8_encoder, "choose_backend", lambda *given, cuda: backend)
    monkeypatch.setattr(fp8_encoder, "MIN_CAPABILITY", options.pop("capability", (0, 0)))
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        cuda.CudaMSViT(tiny_model(**options).eval(), graphs=graphs, dtype="fp8")


CALLS = {
    "training": "gradients on, autocast to None; .* or a model compiled without dtype",
    "train mode": "call eval",
    "autocast": "autocast to torch.float16",
    "images in float32": "here are images in torch.float32, gradients off, .* use images.bfloat16",
    "images' gradients": "gradients on",
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_cannot_run_in_fp8_raise(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = pair(dtype="fp8")
    image, mask = batch_of(model, 2)
    image = image if call == "images in float32" else image.bfloat16()
    image.requires_grad_(call == "images' gradients")
    fast.train(call == "train mode")
    monkeypatch.setattr(cuda, "autocast_dtype", lambda: torch.float16 if call == "autocast" else None)
    for each in (fast, fast.encode):
        with torch.set_grad_enabled(call == "training"), pytest.raises(ValueError, match=CALLS[call]):
            run(fast, image, mask) if call == "train mode" else each(image, mask)
