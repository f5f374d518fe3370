"""On a CPU: the weights of the host's blocks are packed once for the matrix product, not in every call.

With one image this is a good part of the time: 85 MB of a ViT-S are read and rearranged for some 95 tokens.
"""

from collections.abc import Callable
from copy import deepcopy

from torch import Tensor, nn

from msvit.acceleration.packed_linear import PackedLinear, can_pack
from msvit.model import MSViT


class CpuMSViT(MSViT):
    """The same model for inference on a CPU; its weights are those of the model it was made from."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CpuMSViT":
        weight = self.backbone.host.patch_embed.proj.weight
        after = fn(weight)
        if (after.dtype, after.device) != (weight.dtype, weight.device):
            raise ValueError(
                f"this accelerated model shares its weights, {weight.dtype} on {weight.device}, with the model it was "
                f"made from; convert that one to {after.dtype} on {after.device} and call msvit.accelerate again"
            )
        return super()._apply(fn, recurse)


def accelerate_cpu(model: nn.Module) -> CpuMSViT:
    """A copy in eval mode that shares all parameters; its linear layers run packed where MKL has that, in float32.

    Gradients go the plain way, so call it under `torch.no_grad` or `torch.inference_mode`. After training the
    original with a fused optimizer, which changes weights without saying so, call `eval()` on the accelerated model.
    """
    if not isinstance(model, MSViT) or type(model) not in (MSViT, CpuMSViT):
        raise ValueError(
            f"accelerate takes the MSViT that msvit.convert returns, got {type(model).__name__}; "
            f"a subclass may do what is not known here"
        )
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copy = deepcopy(model, {**tensors})  # each of them stands for itself
    pack_layers(copy.backbone.host.blocks)  # the gate and the head are too small to gain
    fast = CpuMSViT(copy.backbone, copy.gate, copy.coarse, mode="packed").eval()
    for layer in fast.modules():
        if isinstance(layer, PackedLinear):
            layer.packed(layer.weight)
    return fast


def pack_layers(module: nn.Module) -> None:
    """Put a packed layer in the place of every linear one inside."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if can_pack(child):
                setattr(parent, name, PackedLinear.of(child))
