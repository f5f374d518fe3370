"""On a CPU: the weights of the host's blocks are packed once for the matrix product, not in every call.

With one image this is a good part of the time: 85 MB of a ViT-S are read and rearranged for some 95 tokens.
"""

from torch import nn

from msvit.acceleration.base import Accelerated, replace_layers
from msvit.acceleration.packed_linear import PackedLinear, can_pack


class CpuMSViT(Accelerated):
    """For inference on a CPU: linear layers run packed where MKL has that, in float32.

    Gradients go the plain way, so call it under `torch.no_grad` or `torch.inference_mode`. After training the
    original with a fused optimizer, which changes weights without saying so, call `eval()` on the accelerated model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        replace_layers(self.backbone.blocks, can_pack, PackedLinear.of)  # gate and head are too small to gain
        self.eval()
        for layer in self.modules():
            if isinstance(layer, PackedLinear):
                layer.packed(layer.weight)
