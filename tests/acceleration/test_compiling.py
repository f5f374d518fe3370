"""How often the trunk is compiled, counted where there is no GPU: the same plan, without graphs, on a CPU."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import KINDS, SWINS, images, interpretable, relative_error, tiny_host

import msvit
from msvit.acceleration import cuda


@pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")
@pytest.mark.parametrize(
    ("name", "reducer"),
    [
        *((name, "none") for name in (*KINDS[:3], SWINS[0])),
        *((KINDS[0], name) for name in ("evit", "dynamicvit", "tome")),
    ],
)
def test_an_evaluation_compiles_once_whatever_the_masks_and_the_last_batch(name: str, reducer: str) -> None:
    """In a process of its own: the type checks of these tests cannot be compiled."""
    script = Path(__file__).parents[1] / "count_compiles.py"
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script), name, reducer], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["slots"] > 4
    assert counts["compiled"] == 1


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


def made(mode: str = "packed") -> tuple[msvit.MSViT, cuda.CudaMSViT]:
    model = msvit.convert(tiny_host(dtype=torch.float32), coarse=8, mode=mode).eval()
    return model, cuda.CudaMSViT(model, compile=False, graphs=False)


def run(fast: cuda.CudaMSViT, learns: bool = False) -> cuda.Plan:
    image = images(2, dtype=torch.float32)
    plan = fast._plan(image, fast.grid(image), learns)
    plan(image, torch.ones(2, 2, 2))
    return plan


def test_weights_written_to_in_silence_are_noticed_after_train_or_eval() -> None:
    model, fast = made()
    plan, image, mask = run(fast), images(2, dtype=torch.float32), torch.ones(2, 2, 2)
    assert plan.is_fresh()
    model.host.pos_embed.data.add_(1)  # as a fused optimizer does it: no version is counted
    fast.eval()
    model.eval()
    with torch.no_grad():
        assert not plan.is_fresh()
        assert relative_error(plan(image, mask).logits, model(image, mask=mask).logits) < 1e-5
    assert plan.is_fresh()


def test_counted_changes_are_noticed_at_once() -> None:
    model, fast = made()
    plan = run(fast)
    with torch.no_grad():
        model.host.cls_token.add_(1)
    assert not plan.is_fresh()


@pytest.mark.parametrize("change", ["learns", "mode of a part", "another head", "another gate"])
def test_what_a_capture_would_not_see_makes_a_new_plan(change: str) -> None:
    _, fast = made()
    plan = run(fast, learns=True)
    assert run(fast, learns=True) is plan
    if change == "learns":
        fast.host.pos_embed.requires_grad_(False)
    elif change == "mode of a part":
        fast.host.blocks[0].train()
    elif change == "another head":
        fast.host.head = torch.nn.Linear(32, 5)
    else:
        fast.gate = msvit.LearnedGate(coarse=8)
    assert run(fast, learns=True) is not plan


def test_modes_and_states_are_kept() -> None:
    model = msvit.convert(tiny_host(dtype=torch.float32), coarse=8, mode="masked").train()
    model.gate.eval()
    fast = cuda.CudaMSViT(model, compile=False)
    assert fast.mode == "masked"
    assert [m.training for m in fast.modules()] == [m.training for m in model.modules()]


def test_copies_and_files_work(tmp_path: Path) -> None:
    model, fast = made()
    run(fast)
    image = images(2, dtype=torch.float32)
    msvit.save(fast, tmp_path / "saved")
    with torch.no_grad():
        want = model(image).logits
        for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), msvit.load(tmp_path / "saved")):
            assert relative_error(other(image).logits, want) < 1e-5
    assert cuda.CudaMSViT(fast).compiles


def test_a_subclass_is_refused_and_so_is_a_move() -> None:
    class Other(msvit.MSViT):
        pass

    model, fast = made()
    with pytest.raises(ValueError, match="may do what is not known here"):
        msvit.accelerate(Other(model.backbone, model.gate, model.coarse))
    with pytest.raises(ValueError, match=r"call msvit\.accelerate again"):
        fast.double()


def test_what_is_no_converted_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call msvit\.convert first"):
        msvit.accelerate(tiny_host())
