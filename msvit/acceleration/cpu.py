"""On a CPU: the weights of the host's blocks are packed once for the matrix product, not in every call.

With one image this is a good part of the time: 85 MB of a ViT-S are read and rearranged for some 95 tokens.
"""

import platform
import warnings

import torch
from torch import nn

from msvit.acceleration.base import Accelerated, replace_layers
from msvit.acceleration.packed_linear import PackedLinear, can_pack, has_mkl


class CpuMSViT(Accelerated):
    """For inference on a CPU: linear layers run packed where MKL has that, in float32.

    Gradients go the plain way, so call it under `torch.no_grad` or `torch.inference_mode`. After a write to weights
    that PyTorch does not count (`.data`, a fused optimizer, inference mode) call `refresh()`, `train()` or `eval()`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        replace_layers(self.backbone.blocks, can_pack, PackedLinear.of)  # gate and head are too small to gain
        self.eval()
        layers = [layer for layer in self.modules() if isinstance(layer, PackedLinear)]
        if not layers:
            warnings.warn(f"msvit.accelerate changes nothing here: {why_not(self)}", stacklevel=3)
        for layer in layers:
            layer.packed(layer.weight)

    def refresh(self) -> None:
        super().refresh()
        for layer in self.modules():
            if isinstance(layer, PackedLinear):
                layer.forget()


def why_not(model: Accelerated) -> str:
    """Why no layer of this model could be packed."""
    if not has_mkl():
        return f"on a CPU it packs weights for MKL, which this build of PyTorch has not ({platform.machine()})"
    dtype = model.backbone.host.patch_embed.proj.weight.dtype
    if dtype is not torch.float32:
        return f"on a CPU it packs float32 weights, and these are {dtype}; convert the model with model.float() first"
    return "none of the host's linear layers can be packed for MKL"
