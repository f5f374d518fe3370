"""Thirteen batches of a small evaluation through an accelerated model: how often is it compiled, for how many slots?"""

import json
import sys

import torch
from tiny import images, relative_error, tiny_host

import msvit
from msvit.acceleration import cuda
from msvit.execution.attention import force_backend
from msvit.reduction import make_reducer

cuda.SMALL, cuda.ALIGN = 8, 4


@torch.no_grad()
def main(name: str, reducer: str) -> None:
    host = tiny_host(name, torch.float32, dynamic_img_size=True)
    settings = {"none": {}, "tome": {"r": 3}}.get(reducer, {"at": (0, 1)})
    model = msvit.convert(host, coarse=8, reducer=make_reducer(reducer, **settings)).eval()
    fast = cuda.CudaMSViT(model, compile=False, graphs=False)
    compiled, slots = [], set()

    def backend(graph: torch.fx.GraphModule, example: object) -> object:
        compiled.append(graph)
        return graph.forward

    fast.trunk.compile(backend=backend, fullgraph=True)
    with force_backend("triton"):
        for turn, size in enumerate([4] * 12 + [3]):
            image = images(size, dtype=torch.float32)
            mask = torch.rand(size, 2, 2) < turn / 12
            got = fast._plan(image, fast.grid(image), learns=False)(image, mask)
            assert relative_error(got.logits, model(image, mask=mask).logits) < 1e-4
            assert torch.equal(got.tokens.count, model(image, mask=mask).tokens.count)
            slots.add(got.tokens.x.shape[0])
    print(json.dumps({"compiled": len(compiled), "slots": len(slots)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
