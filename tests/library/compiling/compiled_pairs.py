"""A tiny model and the same compiled for a GPU, which runs here by the fixture `fake_graphs`."""

from collections.abc import Callable
from typing import Any

import torch
from tiny import KINDS, SWINS, tiny_model
from torch import Tensor

import msvit
from msvit.compiling import cuda
from msvit.execution.attention import force_backend
from msvit.types import MSViTOutput

REDUCERS = {
    "evit": lambda: msvit.EViT(0.6, at=(0, 1)),
    "dynamicvit": lambda: msvit.DynamicViT(0.6, at=(1,)),
    "tome": lambda: msvit.ToMe(r=3),
}


def model_of(name: str = KINDS[0], power: float = 0.0, **options: Any) -> msvit.MSViT:
    """With a 2 x 2 grid of cells, some fine, some coarse."""
    small = {"img_size": 32, "depths": (2, 1), "num_heads": (1, 2), "window_size": 8} if name in SWINS else {}
    gate = msvit.LearnedGate(coarse=16 if name in SWINS else 8, grid=(2, 2), threshold=3.0)
    model = tiny_model(name, torch.float32, **{"gate": gate, **small, **options}).eval()
    return model.with_options(proportional_attention=power)


def pair(name: str = KINDS[0], **options: Any) -> tuple[msvit.MSViT, cuda.CudaMSViT]:
    model = model_of(name, **options)
    return model, cuda.CudaMSViT(model, inductor=False)


def run(fast: cuda.CudaMSViT, image: Tensor, mask: Tensor | None = None, learns: bool = False) -> MSViTOutput:
    """What forward does with images on a GPU."""
    with torch.set_grad_enabled(learns):
        return fast._run_plan(image, mask, learns)


def plainly(model: msvit.MSViT) -> Callable[..., MSViTOutput]:
    def call(image: Tensor, mask: Tensor | None = None) -> MSViTOutput:
        with force_backend("sdpa"):
            return model(image, mask=mask)

    return call
