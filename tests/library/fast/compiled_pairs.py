"""A tiny model and the same compiled for a GPU, which runs here by the fixture `fake_graphs`."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from tiny import KINDS, SWINS, tiny_model
from torch import Tensor, nn

import msvit
from msvit.execution.attention import force_backend
from msvit.fast import cuda
from msvit.output import MSViTOutput

REDUCERS = {
    "evit": lambda: msvit.EViT(0.6, at=(0, 1)),
    "dynamicvit": lambda: msvit.DynamicViT(0.6, at=(1,)),
    "tome": lambda: msvit.ToMe(r=3),
}


def model_of(name: str = KINDS[0], **options: Any) -> msvit.MSViT:
    """With a 2 x 2 grid of cells, some fine, some coarse. `name`: a host, or a reducer in the usual ViT."""
    if name in REDUCERS:
        name, options = KINDS[0], {"reducer": REDUCERS[name](), **options}
    small = {"img_size": 32, "depths": (2, 1), "num_heads": (1, 2), "window_size": 8} if name in SWINS else {}
    gate = msvit.LearnedGate(coarse=16 if name in SWINS else 8, grid=(2, 2), threshold=3.0)
    return tiny_model(name, torch.float32, **{"gate": gate, **small, **options}).eval()


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def doubled(layer: nn.Linear) -> Doubled:
    """A layer of another class with the same weights."""
    other = Doubled(layer.in_features, layer.out_features, dtype=layer.weight.dtype).eval()
    other.load_state_dict(layer.state_dict())
    return other


def pair(name: str = KINDS[0], dtype: str = "float32", **options: Any) -> tuple[msvit.MSViT, cuda.CudaMSViT]:
    """In float32 of the same weights. Else the compiled model has its own, in float16, or in bfloat16 for FP8."""
    model = model_of(name, **options)
    if dtype == "float32":
        return model, cuda.CudaMSViT(model, inductor=False)
    half = torch.float16 if dtype == "float16" else torch.bfloat16
    with torch.no_grad():
        for parameter in model.parameters():  # biases, positions and layer scales are 0 or constant at first
            parameter.add_(0.2 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(half))
    return model, cuda.CudaMSViT(deepcopy(model).to(half), inductor=False, dtype=None if dtype == "float16" else "fp8")


def run(fast: cuda.CudaMSViT, image: Tensor, mask: Tensor | None = None, learns: bool = False) -> MSViTOutput:
    """What forward does with images on a GPU, here in the precision of the weights."""
    dtype = next(fast.host.parameters()).dtype
    with torch.set_grad_enabled(learns):
        return fast._run_plan(image.to(dtype), None if mask is None else mask.to(dtype), learns)


def plainly(model: msvit.MSViT) -> Callable[..., MSViTOutput]:
    def call(image: Tensor, mask: Tensor | None = None) -> MSViTOutput:
        with force_backend("sdpa"):
            return model(image, mask=mask)

    return call
