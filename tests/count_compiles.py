"""Thirteen batches of a small evaluation through an accelerated model: how often is it compiled, for how many slots?"""

import json
import sys

import pytest
import torch
from plain_launches import use_plain_launches
from tiny import SWINS, images, relative_error, tiny_host, tiny_swin

import msvit
from msvit.compiling import cuda
from msvit.execution.attention import force_backend

cuda.SMALL, cuda.ALIGN = 8, 4


@torch.no_grad()
def main(name: str) -> None:
    if name in SWINS:  # a 2 x 2 grid of cells, as for the others
        small = {"img_size": 32, "depths": (1, 1), "num_heads": (1, 2), "window_size": 8}
        side, coarse, host = 32, 16, tiny_swin(name, torch.float32, **small)
    else:
        side, coarse, host = 16, 8, tiny_host(name, torch.float32, dynamic_img_size=True)
    model = msvit.convert(host, coarse=coarse).eval()
    fast = cuda.CudaMSViT(model, inductor=False, graphs=False)
    compiled, slots, pack_indices = [], set(), fast.trunk.pack_indices

    def backend(graph: torch.fx.GraphModule, example: object) -> object:
        compiled.append(graph)
        return graph.forward

    def recorded(mask: torch.Tensor, grid: msvit.ScaleGrid, num: int, least: int) -> object:
        slots.add(num)
        return pack_indices(mask, grid, num, least)

    fast.trunk.pack_indices = recorded
    fast.trunk.compile(backend=backend, fullgraph=True)
    with force_backend("triton"):
        for turn, size in enumerate([4] * 12 + [3]):
            image = images(size, side, side, dtype=torch.float32)
            mask = torch.rand(size, 2, 2) < turn / 12
            got = fast._plan(image, fast.grid(image), learns=False)(image, mask)
            with force_backend("sdpa"):
                want = model(image, mask=mask)
            assert relative_error(got.logits, want.logits) < 1e-4
            assert torch.equal(got.tokens.count, want.tokens.count)
    print(json.dumps({"compiled": len(compiled), "slots": len(slots)}))


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        use_plain_launches(patch)
        main(*sys.argv[1:])
