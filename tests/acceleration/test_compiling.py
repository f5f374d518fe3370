"""How often the trunk is compiled, counted where there is no GPU: the same plan, without graphs, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import KINDS, images, relative_error, tiny_host

import msvit
from msvit.acceleration import cuda
from msvit.execution.fused import kernels


@pytest.mark.skipif(kernels is None, reason="needs Triton")
@pytest.mark.parametrize("name", KINDS[:3])
def test_an_evaluation_hardly_compiles_whatever_the_masks_and_the_last_batch(name: str) -> None:
    """In a process of its own: the type checks of these tests cannot be compiled."""
    script = Path(__file__).parents[1] / "count_compiles.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script), name], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["slots"] > 4
    assert counts["compiled"] <= 2  # on a CPU a layout without spare slots lies in memory in another way


def test_slots_come_in_few_sizes_and_always_suffice() -> None:
    for most in (197, 1024, 1025, 12_608, 50_432):
        sizes = {cuda.bucket(needed, most) for needed in range(1, most + 1)}
        assert len(sizes) <= cuda.NUM_BUCKETS + 1
        assert all(cuda.bucket(needed, most) >= needed for needed in range(1, most + 1))


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_gives_the_models_gradients(name: str) -> None:
    model = msvit.convert(tiny_host(name, torch.float32, dynamic_img_size=True), coarse=8)
    fast = cuda.CudaMSViT(model, compile=False, graphs=False)
    image, found = images(4, dtype=torch.float32), []
    for run in (model, lambda image, mask: fast._plan(image, fast.grid(image), learns=True)(image, mask)):
        mask = (torch.rand(4, 2, 2, generator=torch.Generator().manual_seed(1)) < 0.5).float().requires_grad_()
        model.zero_grad()
        run(image, mask=mask).logits.square().sum().backward()
        found.append([mask.grad, *[p.grad for p in model.backbone.parameters()]])
    assert all(relative_error(got, want) < 1e-4 for got, want in zip(*found, strict=True) if want is not None)
    assert all((got is None) == (want is None) for got, want in zip(*found, strict=True))


def test_the_original_keeps_its_modes_and_shares_its_weights() -> None:
    model = msvit.convert(tiny_host(dtype=torch.float32), coarse=8).train()
    fast = cuda.CudaMSViT(model, compile=False)
    fast.eval()
    assert model.training
    assert model.backbone.training
    assert [id(p) for p in fast.parameters()] == [id(p) for p in model.parameters()]
    assert fast.state_dict().keys() == model.state_dict().keys()
    assert type(model.host.blocks[0].mlp.act) is torch.nn.GELU


def test_what_is_no_converted_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call msvit\.convert first"):
        msvit.accelerate(tiny_host())
