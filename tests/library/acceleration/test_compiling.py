"""How often the trunk is compiled, counted where there is no GPU: the same plan, without graphs, on a CPU."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import KINDS, SWINS, images, interpretable, relative_error, tiny_host

import msvit
from msvit.compiling import cuda

TESTS = Path(__file__).parents[2]
needs_kernels = pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")


def counted(script: Path, *args: str) -> Any:
    """In a process of its own: the type checks of these tests cannot be compiled."""
    path = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script), *args], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@needs_kernels
@pytest.mark.parametrize(
    "name", [KINDS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in (*KINDS[1:3], SWINS[0]))]
)
def test_an_evaluation_compiles_once_whatever_the_masks_and_the_last_batch(name: str) -> None:
    counts = counted(TESTS / "count_compiles.py", name)
    assert counts["slots"] > 4
    assert counts["compiled"] == 1


@pytest.fixture(scope="module")
def regions() -> dict[str, dict[str, int]]:
    """How often each was compiled after four blocks, after twelve, and after training."""
    return counted(TESTS / "library/acceleration/count_compile_regions.py")


@needs_kernels
@pytest.mark.slow  # the same for a plain model: below
def test_with_reducers_each_region_is_compiled_once_for_all_blocks_and_models(
    regions: dict[str, dict[str, int]],
) -> None:
    halves = {"both_halves": 1, "attention_half": 2, "mlp_half": 1}  # ToMe's sizes count in attention
    assert regions["4 blocks"] == {**halves, "focus": 2, "thin_out": 2, "merge_alike": 2}  # spare slots, or none
    assert regions["12 blocks"] == regions["4 blocks"]


@needs_kernels
@pytest.mark.slow
def test_training_compiles_a_block_once_whatever_its_stochastic_depth(regions: dict[str, dict[str, int]]) -> None:
    more = {name: num - regions["12 blocks"][name] for name, num in regions["training"].items()}
    assert more.pop("both_halves") == 2  # without depth to be drawn, as the first block, and with it
    assert not any(more.values())


def test_slots_come_in_few_sizes_and_always_suffice() -> None:
    for most in (197, 1024, 1025, 12_608, 50_432):
        sizes = [cuda.bucket(needed, most) for needed in range(1, most + 1)]
        assert len(set(sizes)) <= cuda.NUM_BUCKETS + 1
        assert all(size >= needed for needed, size in enumerate(sizes, 1))


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_gives_the_models_gradients(name: str) -> None:
    model = msvit.convert(tiny_host(name, torch.float32, dynamic_img_size=True), coarse=8)
    fast = cuda.CudaMSViT(model, inductor=False, graphs=False)
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
    fast = cuda.CudaMSViT(model, inductor=False)
    fast.eval()
    assert model.training
    assert model.backbone.training
    assert [id(p) for p in fast.parameters()] == [id(p) for p in model.parameters()]
    assert fast.state_dict().keys() == model.state_dict().keys()
    assert type(model.host.blocks[0].mlp.act) is torch.nn.GELU


def made(mode: str = "packed") -> tuple[msvit.MSViT, cuda.CudaMSViT]:
    model = msvit.convert(tiny_host(dtype=torch.float32), coarse=8, mode=mode).eval()
    return model, cuda.CudaMSViT(model, inductor=False, graphs=False)


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
        fast.refresh()  # a part that is replaced is not looked for in every call
    else:
        fast.gate = msvit.LearnedGate(coarse=8)
    assert run(fast, learns=True) is not plan


def test_modes_and_states_are_kept() -> None:
    model = msvit.convert(tiny_host(dtype=torch.float32), coarse=8, mode="masked").train()
    model.gate.eval()
    fast = cuda.CudaMSViT(model, inductor=False)
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
    assert cuda.CudaMSViT(fast).inductor


def test_a_subclass_is_refused_and_so_is_a_move() -> None:
    class Other(msvit.MSViT):
        pass

    model, fast = made()
    with pytest.raises(ValueError, match="whose forward may differ"):
        msvit.compile(Other(model.backbone, model.gate, model.coarse))
    with pytest.raises(ValueError, match=r"call msvit\.compile again"):
        fast.double()


def test_what_is_no_converted_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call msvit\.convert first"):
        msvit.compile(tiny_host())


@pytest.mark.parametrize("compile", [True, "blocks", False])
@pytest.mark.parametrize("reducer", [None, msvit.ToMe(r=2)], ids=["no reducer", "ToMe"])
def test_with_a_reducer_the_trunk_is_never_compiled_whole(compile: bool | str, reducer: msvit.Reducer | None) -> None:
    fast = cuda.CudaMSViT(msvit.convert(tiny_host(dtype=torch.float32), coarse=8), inductor=compile, graphs=False)
    fast, image = fast.with_options(reducer=reducer), images(2, dtype=torch.float32)
    fast._plan(image, fast.grid(image), learns=False)
    whole = fast.trunk._compiled_call_impl is not None
    assert whole == (compile is True and reducer is None)
    assert fast.regional == (bool(compile) and not whole)


def test_an_unknown_way_to_compile_is_refused() -> None:
    with pytest.raises(ValueError, match=r'inductor is .block., but must be True, False or "blocks"'):
        msvit.compile(made()[0], inductor="block")
