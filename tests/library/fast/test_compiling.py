"""How often the encoder is compiled, counted where there is no GPU: the same plan, without graphs, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from count_regions import count_encoders, prepare
from tiny import KINDS, SWINS, interpretable

from msvit.fast import plan
from msvit.fast.fused_plan import FusedPlan

TESTS = Path(__file__).parents[2]
needs_kernels = pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")


def counted() -> Any:
    """In a process in which nothing else was compiled."""
    path = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    script = [sys.executable, str(Path(__file__).with_name("count_regions.py"))]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@needs_kernels
@pytest.mark.parametrize(
    "name", [KINDS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in (*KINDS[1:3], SWINS[0]))]
)
def test_an_evaluation_compiles_once_whatever_the_masks_and_the_last_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(monkeypatch)
    torch._dynamo.reset()
    counts = count_encoders(name)
    assert counts["slots"] > 4
    assert counts["compiled"] == 1


@pytest.fixture(scope="module")
def regions() -> dict[str, dict[str, int]]:
    """How often each was compiled after four blocks, after twelve, and after training."""
    return counted()


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


@pytest.mark.parametrize("num_buckets", [plan.NUM_BUCKETS["packed"], FusedPlan.num_buckets])
def test_slots_come_in_few_sizes_and_always_suffice(num_buckets: int) -> None:
    for most in (197, 1024, 1025, 12_608, 50_432):
        step = plan.bucket_step(most, num_buckets)
        sizes = [plan.bucket(needed, most, step) for needed in range(1, most + 1)]
        assert len(set(sizes)) <= num_buckets + 1
        assert all(most >= size >= needed for needed, size in enumerate(sizes, 1))
