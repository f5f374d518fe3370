"""What every PyTorch model is expected to do: copies, files, precisions, transforms, several processes.

Elsewhere: compiled models are copied and pickled (fast/test_cpu.py), two processes that train with DDP
(lab/training/test_processes.py), layer decay and data configuration (test_host_settings.py).
What runs in processes of its own below is this very file (see the end).
"""

import copy
import io
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import SWINS, Logits, assert_same, batch_of, gradients, images, mixed_mask, relative_error, tiny_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel

import msvit

NAMES = ("vit_small_patch16_224", "eva02_tiny_patch14_224", SWINS[0])


def learned(name: str = NAMES[0], **options: Any) -> msvit.MSViT:
    """A tiny model in eval mode whose gate has weights."""
    gate = msvit.LearnedGate(coarse=16 if name in SWINS else 8)
    return tiny_model(name, gate=gate.to(options.get("dtype", torch.float64)), **options).eval()


def through_file(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_copies_and_files_are_the_same_model_with_weights_of_their_own(name: str) -> None:
    """A state dict's weights go back into the bare host, too."""
    model = learned(name)
    image, mask = batch_of(model)
    want = model(image).logits  # fills tables of positions, which copies must not share
    loaded, host, prefix = learned(name), copy.deepcopy(model.host), "backbone.host."
    for weight in (*loaded.parameters(), *host.parameters()):
        weight.zero_()
    state = through_file(model.state_dict(), weights_only=True)
    loaded.load_state_dict(state)
    host.load_state_dict({key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)})
    assert_same([host(image)], [model(image, torch.ones_like(mask)).logits])
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), through_file(model, weights_only=False)
    for other in (*copies, loaded):
        assert torch.equal(other(image).logits, want)
        for weight in other.parameters():
            weight.zero_()
    assert torch.equal(model(image).logits, want)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_precision_changes_as_in_any_module(name: str) -> None:
    model = learned(name)
    image, mask = batch_of(model)
    want = model(image, mask).logits
    for other, dtype in ((copy.deepcopy(model).float(), torch.float32), (copy.deepcopy(model).half(), torch.float16)):
        got = other(image.to(dtype), mask).logits
        assert got.dtype is dtype
        assert relative_error(got.double(), want) < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_saves_memory_and_has_the_same_gradients(name: str) -> None:
    model, found = learned(name).train(), []
    image, mask = batch_of(model)
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        kept: list[int] = []
        with saved_tensors_hooks(lambda saved, kept=kept: kept.append(saved.numel()) or saved, lambda saved: saved):
            logits = model(image, mask).logits
        found.append((sum(kept), gradients(logits, model.host)))
    assert found[1][0] < 0.6 * found[0][0]
    assert_same(found[1][1], found[0][1])


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_each_image_by_torch_func(name: str) -> None:
    """vmap needs mode masked: the others count tokens, and take weights one at a time.

    Tables of positions are not made from what is passed.
    """
    model = learned(name, mode="masked")
    image, _ = batch_of(model)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(model, weights, (image[None],)).logits.square().sum()

    each = vmap(grad(loss), (None, 0))(weights, image)
    whole = gradients(model(image).logits, *model.parameters())
    found = [value.sum(0) for value in each.values()]
    assert_same(found, [torch.zeros_like(f) if w is None else w for f, w in zip(found, whole, strict=True)])
    with torch.no_grad():
        want = model(image).logits
        other = {key: 0.9 * value for key, value in weights.items()}
        twice = {key: torch.stack([other[key], value]) for key, value in weights.items()}
        found = vmap(lambda weights: functional_call(model, weights, (image,)).logits)(twice)
        for mode in model.backbone.modes:
            assert_same([functional_call(model.with_options(mode=mode), other, (image,)).logits, want], found)
        assert torch.equal(model(image).logits, want)
        assert_same([vmap(lambda each: model(each[None]).logits[0])(image)], [want])
        features = vmap(lambda each: model.forward_features(each[None])[0])(image)
        assert_same([features], [model.forward_features(image)])
    with pytest.raises(ValueError, match=r"mode 'packed' counts the fine cells.*vmap.*mode='masked'"):
        vmap(lambda each: model.with_options(mode="packed")(each[None]).logits[0])(image)


def test_no_mode_that_counts_runs_without_values() -> None:
    model = learned().to("meta")
    with pytest.raises(ValueError, match=r"mode 'packed' counts.*device 'meta' have no values"):
        model(images().to("meta"))
    with torch.no_grad():
        assert model.with_options(mode="masked")(images().to("meta")).logits.shape == (3, 5)


def traced(model: msvit.MSViT, image: Tensor) -> nn.Module:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", ".*torch.jit.*deprecated.*")
        return torch.jit.trace(Logits(model), image, check_trace=False)


@pytest.mark.parametrize(
    ("name", "mode", "reducer", "words"),
    [
        (NAMES[0], "packed", None, "mode 'packed'.*mode='masked'"),
        (NAMES[0], "trimmed", None, "mode 'trimmed'.*mode='masked'"),
        (SWINS[0], "packed", None, "mode 'packed'.*mode='masked'"),
        (NAMES[0], "masked", msvit.EViT(rate=0.7, at=(0, 1)), "the reducer EViT.*reducer=None"),
    ],
)
def test_a_trace_that_would_record_its_examples_counts_is_an_error(
    name: str, mode: str, reducer: msvit.Reducer | None, words: str
) -> None:
    model = tiny_model(name, mode=mode, reducer=reducer).eval()
    with pytest.raises(ValueError, match=words):
        traced(model, batch_of(model)[0])


@pytest.mark.parametrize("name", [NAMES[0], SWINS[0]])
@torch.no_grad()
def test_a_traced_masked_model_is_exact_on_other_images(name: str) -> None:
    model = tiny_model(name, mode="masked").eval()
    image, _ = batch_of(model, 8)
    model.gate.threshold = model.gate.scores(image).median().item()
    example, others = image.split(4)
    out = model(others)
    counts = out.gate.mask.sum((1, 2))
    assert len(counts.unique()) > 1
    assert not torch.equal(counts, model(example).gate.mask.sum((1, 2)))
    torch.testing.assert_close(traced(model, example)(others), out.logits, rtol=0, atol=1e-12)


def sharded_gradients(rank: int, world: int) -> None:
    """DDP and FSDP2 on the CPU have the gradients of one process with the whole batch."""
    image, mask = images(4), mixed_mask(4, 2, 2)
    part = slice(rank * 4 // world, (rank + 1) * 4 // world)
    for mode in ("packed", "masked"):
        model, other, whole = (learned(mode=mode).train() for _ in range(3))
        whole(image, mask).logits.square().mean().backward()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        wrapped(image[part], mask[part]).logits.square().mean().backward()
        fully_shard(other, mesh=init_device_mesh("cpu", (world,)))
        other(image[part], mask[part]).logits.square().mean().backward()
        for one, two, want in zip(model.parameters(), other.parameters(), whole.parameters(), strict=True):
            if want.grad is not None and want.grad.any():
                assert_same([one.grad, two.grad.full_tensor()], [want.grad, want.grad])
    register_fsdp_forward_method(other, "forward_features")
    assert_same([other.forward_features(image[part], mask[part])], [whole.forward_features(image[part], mask[part])])
    blocks = learned()
    fully_shard(blocks.host.blocks[0], mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(ValueError, match=r"single blocks of the host.*fully_shard\(model\)"):
        blocks(image)


def run_group(rank: int, world: int, store: Any) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        sharded_gradients(rank, world)
    finally:
        dist.destroy_process_group()


def test_ddp_and_fsdp_have_the_gradients_of_the_plain_model() -> None:
    run_group(0, 1, dist.HashStore())


@pytest.mark.slow
def test_ddp_and_fsdp_over_two_processes(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, __file__, rank, tmp_path / "store"], env=env) for rank in "01"]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    run_group(int(sys.argv[1]), 2, dist.FileStore(sys.argv[2], 2))
