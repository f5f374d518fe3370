"""On a CPU: the weights of the host's blocks are packed once for the matrix product, not in every call.

With one image this is a good part of the time: 85 MB of a ViT-S are read and rearranged for some 95 tokens. Without MKL
and without oneDNN's Arm Compute Library only small layers gain. bfloat16 is packed on x86_64 CPUs that multiply it.
"""

import torch
from torch import nn

from msvit.fast import packed_linear
from msvit.fast.base import CompiledMSViT, replace_layers
from msvit.fast.packed_linear import MAX_SMALL, PackedLinear, can_pack


class CpuMSViT(CompiledMSViT):
    """A model compiled for inference on a CPU: linear layers run packed where that is faster, in the weights' dtype.

    Gradients go the plain way, so call it under `torch.no_grad` or `torch.inference_mode`. After a write to weights
    that PyTorch does not count (`.data`, a fused optimizer, inference mode) call `refresh()`, `train()` or `eval()`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        replace_layers(self.backbone.blocks, can_pack, PackedLinear.of)
        if not packed_linear.has_mkl():  # with it gate and head are too small to gain
            replace_layers(self.gate, can_pack, PackedLinear.of)
        self.eval()
        for layer in self.packed_layers():
            layer.packed(layer.weight)

    def packed_layers(self) -> list[PackedLinear]:
        """Return the layers that hold packed weights."""
        return [layer for layer in self.modules() if isinstance(layer, PackedLinear)]

    def refresh(self) -> None:
        """Pack all weights anew, in the next calls."""
        super().refresh()
        for layer in self.packed_layers():
            layer.refresh()

    def unsupported_reason(self, dtype: torch.dtype | None = None, needs_grad: bool = False) -> str | None:
        """Return why no layer runs packed with images of this dtype, by default the weights' one; None if some do."""
        if needs_grad:
            return "on a CPU models are compiled for inference only"
        weight_dtype = self.backbone.host.patch_embed.proj.weight.dtype
        if weight_dtype is not torch.float32 and not (weight_dtype is torch.bfloat16 and packed_linear.has_bf16()):
            return (
                f"on a CPU it packs float32 weights, and bfloat16 ones where the CPU has instructions for them, these "
                f"are {weight_dtype}; convert the model with model.float() first"
            )
        given = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else dtype
        if given not in (None, weight_dtype):
            return f"on a CPU weights are packed for products in {weight_dtype}, and these are in {given}"
        if self.packed_layers():
            return None
        if not packed_linear.has_mkl() and not packed_linear.has_acl():
            return (
                f"PyTorch has neither MKL nor the Arm Compute Library here, and the host's linear layers have more "
                f"than {MAX_SMALL:,} weights each"
            )
        return f"none of the host's linear layers can be packed for {'MKL' if packed_linear.has_mkl() else 'oneDNN'}"
