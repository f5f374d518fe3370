"""The base class of compiled models: copied modules that share parameters and buffers with the original."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from msvit.fast.fast_layers import as_class
from msvit.model import MSViT


class CompiledMSViT(MSViT):
    """A converted model made to run faster; its weights are those of the model it was made from."""

    def __init__(self, model: Any) -> None:
        if not isinstance(model, CompiledMSViT) and type(model) is not MSViT:
            raise ValueError(
                f"compile takes the MSViT that msvit.convert returns, got {type(model).__name__}, "
                f"whose forward may differ; call msvit.convert first"
            )
        copy: Any = with_same_weights(model)
        super().__init__(copy.backbone, copy.gate, copy.coarse, copy.mode, copy.reducer)
        self.take_metadata(model)

    def with_options(self, *args: Any, **options: Any) -> "CompiledMSViT":
        """Return a compiled model of the same weights with other options; see `MSViT.with_options`."""
        kind: Any = type(self)
        return kind(super().with_options(*args, **options), **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `msvit.compile` that made this model."""
        return {}

    def uncompiled(self) -> MSViT:
        """Return a model of the same weights and options that is not compiled."""
        plain: MSViT = with_same_weights(MSViT.with_options(self))
        replace_layers(plain, lambda part: hasattr(part, "stands_for"), lambda part: as_class(part, part.stands_for))
        return plain

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights as `nn.Module` does, then refresh all that was computed from the old ones."""
        incompatible_keys = super().load_state_dict(*args, **kwargs)
        self.refresh()  # with assign=True the weights are other tensors
        return incompatible_keys

    def train(self, mode: bool = True) -> "CompiledMSViT":
        """Set the mode, and refresh all that was computed from weights."""
        self.refresh()  # training may have written to weights in ways that PyTorch does not count
        super().train(mode)
        return self

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Raise ValueError: the weights belong to the model this one was made from."""
        raise ValueError(
            "this compiled model shares its weights; call reset_classifier of model.uncompiled(), and compile it again"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CompiledMSViT":
        weight = self.backbone.host.patch_embed.proj.weight
        after = fn(weight)
        if (after.dtype, after.device) != (weight.dtype, weight.device):
            raise ValueError(
                f"this compiled model shares its weights, {weight.dtype} on {weight.device}; "
                f"convert model.uncompiled() to {after.dtype} on {after.device}, and call msvit.compile again"
            )
        return super()._apply(fn, recurse)


def with_same_weights(module: nn.Module) -> Any:
    """Return a deep copy of the modules that shares all parameters and buffers."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return deepcopy(module, {**tensors})


def replace_layers(module: nn.Module, wanted: Callable[[nn.Module], bool], make: Callable[[Any], nn.Module]) -> None:
    """Replace every submodule for which `wanted` is true by `make(submodule)`."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if wanted(child):
                setattr(parent, name, make(child))
