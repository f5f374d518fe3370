"""How often encoders and their regions are compiled, counted where there is no GPU: without graphs, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_kernels import use_plain_kernels
from tiny import KINDS, SWINS, gradients, images, interpretable, relative_error, tiny_host, tiny_model
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounter

import msvit
from msvit.backbones import blocks
from msvit.execution.attention import force_backend
from msvit.fast import cuda, plan, regions
from msvit.fast.fused_plan import FusedPlan
from msvit.reduction import dynamicvit, evit, make_reducer, tome

TESTS = Path(__file__).parents[2]
needs_kernels = pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")
REGIONS = (*blocks.REGIONS, evit.focus, dynamicvit.thin_out, tome.merge_alike)


def compiled() -> dict[str, int]:
    return {run.__name__: len(_debug_get_cache_entry_list(run.__wrapped__)) for run in REGIONS}


def without_graphs(model: msvit.MSViT) -> tuple[cuda.CudaMSViT, set[int]]:
    """The model with arrays that are views of no others, as the kernel makes them, and the numbers of slots it has."""
    fast, slots = cuda.CudaMSViT(model, inductor=False, graphs=False), set()
    pack_indices = fast.compiled_encoder.pack_indices

    def recorded(mask: torch.Tensor, sample: torch.Tensor, *about: Any) -> Any:
        slots.add(about[1])
        found = pack_indices(mask, sample, *about)
        return type(found)(*[array.clone() for array in found])

    fast.compiled_encoder.pack_indices = recorded
    return fast, slots


@torch.no_grad()
def compare(model: msvit.MSViT, fast: cuda.CudaMSViT, image: torch.Tensor, mask: torch.Tensor | None) -> None:
    with force_backend("triton"):
        got = fast._plan(image, needs_grad=False)(image, mask)
    with force_backend("sdpa"):
        want = model(image, mask=mask)
    assert relative_error(got.logits, want.logits) < 1e-4
    assert torch.equal(got.tokens.count, want.tokens.count)


def evaluate(model: msvit.MSViT, batches: tuple[int, ...]) -> None:
    fast, _ = without_graphs(model)
    fast.regional = True
    for turn, size in enumerate(batches):
        mask = None if type(model.gate) is msvit.AllFine else torch.rand(size, 3, 3) < 0.3 + 0.4 * turn
        compare(model, fast, images(size, 24, 24, dtype=torch.float32), mask)


def train(model: msvit.MSViT) -> None:
    """With other weights in the modules' places in every step, as a capture has them."""
    fast, _ = without_graphs(model)
    image, mask = images(2, 24, 24, dtype=torch.float32), (torch.rand(2, 3, 3) < 0.5).float().requires_grad_()
    plan = fast._plan(image, needs_grad=True)
    for turn in range(3):
        twins = {name: torch.nn.Parameter(weight.detach()) for name, weight in fast.compiled_encoder.named_parameters()}
        found = []
        for fast.regional in (False, True):
            torch.manual_seed(turn)
            with force_backend("triton"):
                logits = plan._run(image, mask, mask.detach(), plan.max_slots, full=False, weights=twins).logits
                found.append([grad for grad in gradients(logits, mask, *twins.values()) if grad is not None])
        assert all(relative_error(got, want) < 1e-4 for want, got in zip(*found, strict=True))


def print_counts() -> None:
    """After four blocks, after twelve, and after training."""
    small = {"dtype": torch.float32, "img_size": 24, "embed_dim": 16, "num_heads": 1}
    for depth, batches in {4: (4, 3), 12: (2,)}.items():
        host, at = tiny_host(depth=depth, **small), (depth // 4, depth // 2, 3 * depth // 4)
        for name, settings in {"evit": {"at": at}, "dynamicvit": {"at": at}, "tome": {"r": 2}}.items():
            for gate in (None, msvit.AllFine(coarse=8)):
                model = msvit.convert(host, coarse=8, gate=gate, reducer=make_reducer(name, **settings)).eval()
                evaluate(model, batches)
        print(json.dumps(compiled()))
    train(msvit.convert(tiny_host(depth=4, drop_path_rate=0.3, **small), 8, "learned").train())
    print(json.dumps(compiled()))


def prepare(patch: pytest.MonkeyPatch) -> None:
    """Small buckets, and kernels in plain torch."""
    patch.setattr(plan, "SMALL", 8)
    patch.setattr(plan, "ALIGN", 4)
    use_plain_kernels(patch)


@needs_kernels
@pytest.mark.parametrize(
    "name", [KINDS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in (*KINDS[1:3], SWINS[0]))]
)
def test_an_evaluation_compiles_once_whatever_the_masks_and_the_last_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(monkeypatch)
    torch._dynamo.reset()
    swin = {"img_size": 32, "depths": (1, 1), "num_heads": (1, 2), "window_size": 8}  # 2 x 2 cells, as for the others
    model = tiny_model(name, torch.float32, **(swin if name in SWINS else {"dynamic_img_size": True})).eval()
    (fast, slots), counter = without_graphs(model), CompileCounter()
    fast.compiled_encoder.compile(backend=counter, fullgraph=True)
    for turn, size in enumerate([4] * 6 + [3]):
        image = images(size, 2 * model.coarse, 2 * model.coarse, dtype=torch.float32)
        compare(model, fast, image, torch.rand(size, 2, 2) < turn / 6)
    assert len(slots) > 4
    assert counter.frame_count == 1


@needs_kernels
@pytest.mark.slow
def test_each_region_is_compiled_once_for_all_blocks_and_models_and_steps() -> None:
    """Whatever reducers, masks and last batches there are, in four blocks or twelve, and the depth drawn in training.

    Counted in a process in which nothing else was compiled: it runs this very file.
    """
    path = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    of_four, of_twelve, trained = map(json.loads, done.stdout.splitlines())
    halves = {"both_halves": 1, "attention_half": 2, "mlp_half": 1}  # ToMe's sizes count in attention
    assert of_four == {**halves, "focus": 2, "thin_out": 2, "merge_alike": 2}  # spare slots, or none
    assert of_twelve == of_four
    assert trained == {**of_twelve, "both_halves": 3}  # without depth to be drawn, as the first block, and with it


@pytest.mark.parametrize("num_buckets", [plan.NUM_BUCKETS["packed"], FusedPlan.num_buckets])
def test_slots_come_in_few_sizes_and_always_suffice(num_buckets: int) -> None:
    for most in (197, 1024, 1025, 12_608, 50_432):
        step = plan.bucket_step(most, num_buckets)
        sizes = [plan.bucket(needed, most, step) for needed in range(1, most + 1)]
        assert len(set(sizes)) <= num_buckets + 1
        assert all(most >= size >= needed for needed, size in enumerate(sizes, 1))


if __name__ == "__main__":
    regions.OPTIONS.update(backend="eager", fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        print_counts()
