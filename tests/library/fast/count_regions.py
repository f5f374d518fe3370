"""Models compiled one after the other in one process: how often are encoders and their regions compiled?

count_encoders(name)     # seven batches of a small evaluation: the encoder, and for how many slots
count_regions.py         # models with reducers, and training: each region, in a process without others
"""

import json
from typing import Any

import pytest
import torch
from plain_kernels import use_plain_kernels
from tiny import SWINS, gradients, images, relative_error, tiny_host, tiny_model
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import msvit
from msvit.backbones import blocks
from msvit.execution.attention import force_backend
from msvit.fast import cuda, plan, regions
from msvit.reduction import dynamicvit, evit, make_reducer, tome

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


def count_regions() -> dict[str, dict[str, int]]:
    found, small = {}, {"dtype": torch.float32, "img_size": 24, "embed_dim": 16, "num_heads": 1}
    for depth, batches in {4: (4, 3), 12: (2,)}.items():
        host, at = tiny_host(depth=depth, **small), (depth // 4, depth // 2, 3 * depth // 4)
        for name, settings in {"evit": {"at": at}, "dynamicvit": {"at": at}, "tome": {"r": 2}}.items():
            for gate in (None, msvit.AllFine(coarse=8)):
                model = msvit.convert(host, coarse=8, gate=gate, reducer=make_reducer(name, **settings)).eval()
                evaluate(model, batches)
        found[f"{depth} blocks"] = compiled()
    train(msvit.convert(tiny_host(depth=4, drop_path_rate=0.3, **small), 8, "learned").train())
    return {**found, "training": compiled()}


def count_encoders(name: str) -> dict[str, int]:
    swin = {"img_size": 32, "depths": (1, 1), "num_heads": (1, 2), "window_size": 8}  # 2 x 2 cells, as for the others
    model = tiny_model(name, torch.float32, **(swin if name in SWINS else {"dynamic_img_size": True})).eval()
    (fast, slots), graphs = without_graphs(model), []

    def backend(graph: torch.fx.GraphModule, example: object) -> object:
        graphs.append(graph)
        return graph.forward

    fast.compiled_encoder.compile(backend=backend, fullgraph=True)
    for turn, size in enumerate([4] * 6 + [3]):
        image = images(size, 2 * model.coarse, 2 * model.coarse, dtype=torch.float32)
        compare(model, fast, image, torch.rand(size, 2, 2) < turn / 6)
    return {"compiled": len(graphs), "slots": len(slots)}


def prepare(patch: pytest.MonkeyPatch) -> None:
    """Small buckets, and kernels in plain torch."""
    patch.setattr(plan, "SMALL", 8)
    patch.setattr(plan, "ALIGN", 4)
    use_plain_kernels(patch)


if __name__ == "__main__":
    regions.OPTIONS.update(backend="eager", fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        print(json.dumps(count_regions()))
