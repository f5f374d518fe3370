"""Two processes with half a batch each are one process with the whole batch.

The second process runs this very file (see the end), so that it needs no test module to be importable.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import msvit.losses
from msvit.losses import LOSSES
from msvit.losses.batch_shaping import gather_with_grad

GRID, IMAGES = (2, 3), 8
SPLITS = [4, 6]  # images of the first process


def step(name: str, images: slice, averaged: bool) -> dict[str, torch.Tensor]:
    """Loss and gradients of a tiny gate, and of the loss's own parameters, on some of the images."""
    torch.manual_seed(0)
    features = torch.randn(IMAGES, *GRID, 5, dtype=torch.float64)[images]
    gate = nn.Linear(5, 1).double()
    loss = LOSSES[name](0.4, **({"grid": GRID} if name == "gbas" else {})).double()
    value = loss(torch.sigmoid(gate(features)).squeeze(-1))
    value.backward()
    value = value.detach()
    for each in (*(p.grad for p in gate.parameters()), *([value] if name == "l0" else [])) if averaged else ():
        dist.all_reduce(each)  # as DDP does
        each /= 2
    gradients = {key: p.grad for module in (gate, loss) for key, p in module.named_parameters()}
    return {"value": value, **gradients}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """What each of two processes computed, for both splits of the images."""
    folder = tmp_path_factory.mktemp("two")
    root = Path(msvit.losses.__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    other = subprocess.Popen([sys.executable, __file__, str(folder), "1"], env=env)
    try:
        main(folder, 0)
        assert other.wait(timeout=120) == 0
    finally:
        other.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


# L0 is an average of averages: of equal batches
@pytest.mark.parametrize(("name", "first"), [(name, n) for name in LOSSES for n in SPLITS if (name, n) != ("l0", 6)])
def test_two_processes_give_the_loss_and_gradient_of_one(results, name, first):
    whole = step(name, slice(IMAGES), averaged=False)
    for result in results:
        for key, expected in whole.items():
            assert expected.abs().max() > 1e-4, key  # something to agree on
            torch.testing.assert_close(result[first][name][key], expected, rtol=0, atol=1e-12)


def test_processes_with_different_grids_are_refused_with_both_shapes(results):
    for result in results:
        assert "process 0 brings shape (2, 3) and process 1 brings (2, 4), but" in result["refusal"]


def main(folder: Path, rank: int) -> None:
    group = {"init_method": f"file://{folder}/rendezvous", "timeout": timedelta(seconds=120)}
    dist.init_process_group("gloo", **group, rank=rank, world_size=2)
    results: dict = {}
    for first in SPLITS:
        images = slice(0, first) if rank == 0 else slice(first, IMAGES)
        results[first] = {name: step(name, images, averaged=True) for name in LOSSES}
    try:
        gather_with_grad(torch.rand(2, 3 + rank))
    except ValueError as refusal:
        results["refusal"] = str(refusal)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
