"""Models with reducers, accelerated one after the other in one process: how often is each region compiled?"""

import json

import pytest
import torch
from plain_launches import use_plain_launches
from tiny import images, relative_error, tiny_host
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import msvit
from msvit import compile_regions as regions
from msvit.backbones import blocks
from msvit.compiling import cuda
from msvit.execution.attention import force_backend
from msvit.reduction import dynamicvit, evit, make_reducer, tome

cuda.SMALL, cuda.ALIGN = 8, 4
regions.OPTIONS.update(backend="eager", fullgraph=True)
REGIONS = (
    blocks.both_halves, blocks.attention_half, blocks.mlp_half, evit.focus, dynamicvit.thin_out, tome.merge_alike
)  # fmt: skip


def compiled() -> dict[str, int]:
    return {run.__name__: len(_debug_get_cache_entry_list(run.__wrapped__)) for run in REGIONS}


def plain_layouts(fast: cuda.CudaMSViT) -> cuda.CudaMSViT:
    """Arrays that are views of no others, as the kernel makes them on a GPU."""
    pack_indices = fast.trunk.pack_indices
    fast.trunk.pack_indices = lambda *given: tuple(array.clone() for array in pack_indices(*given))
    return fast


@torch.no_grad()
def evaluate(model: msvit.MSViT, batches: tuple[int, ...]) -> None:
    fast = plain_layouts(cuda.CudaMSViT(model, inductor=False, graphs=False))
    fast.regional = True
    for turn, size in enumerate(batches):
        image = images(size, 24, 24, dtype=torch.float32)
        mask = None if type(model.gate) is msvit.AllFine else torch.rand(size, 3, 3) < 0.3 + 0.4 * turn
        with force_backend("triton"):
            got = fast._plan(image, fast.grid(image), learns=False)(image, mask)
        want = model(image, mask=mask)
        assert relative_error(got.logits, want.logits) < 1e-4
        assert torch.equal(got.tokens.count, want.tokens.count)


def train(model: msvit.MSViT) -> None:
    """With other weights in the modules' places in every step, as a capture has them."""
    fast = plain_layouts(cuda.CudaMSViT(model, inductor=False, graphs=False))
    image, mask = images(2, 24, 24, dtype=torch.float32), (torch.rand(2, 3, 3) < 0.5).float().requires_grad_()
    plan = fast._plan(image, fast.grid(image), learns=True)
    for turn in range(3):
        twins = {name: torch.nn.Parameter(weight.detach()) for name, weight in fast.trunk.named_parameters()}
        found = []
        for fast.regional in (False, True):
            torch.manual_seed(turn)
            with force_backend("triton"):
                logits = plan._run(image, mask, plan.most, full=False, weights=twins)[0]
                grads = torch.autograd.grad(logits.square().sum(), [mask, *twins.values()], allow_unused=True)
            found.append([grad for grad in grads if grad is not None])
        assert all(relative_error(got, want) < 1e-4 for want, got in zip(*found, strict=True))


def main() -> None:
    found, small = {}, {"dtype": torch.float32, "img_size": 24, "embed_dim": 16, "num_heads": 1}
    for depth, batches in {4: (4, 3), 12: (2,)}.items():
        host, at = tiny_host(depth=depth, **small), (depth // 4, depth // 2, 3 * depth // 4)
        for name, settings in {"evit": {"at": at}, "dynamicvit": {"at": at}, "tome": {"r": 2}}.items():
            for gate in (None, msvit.AllFine(coarse=8)):
                model = msvit.convert(host, coarse=8, gate=gate, reducer=make_reducer(name, **settings)).eval()
                evaluate(model, batches)
        found[f"{depth} blocks"] = compiled()
    train(msvit.convert(tiny_host(depth=4, drop_path_rate=0.3, **small), coarse=8).train())
    found["training"] = compiled()
    print(json.dumps(found))


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        use_plain_launches(patch)
        main()
