"""Build a model without drawing its weights, where they are loaded or not needed.

    with torch.device("meta"), skip_init():
        sketch = timm.create_model("vit_large_patch16_224")      # sizes alone: a fifth of the time

timm draws weights by `trunc_normal_`, the longest part of building a model, on the device "meta" too.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

DRAWS = {Tensor.uniform_, Tensor.normal_, Tensor.erfinv_, init.uniform_, init.normal_, init.kaiming_uniform_}
WRITES = DRAWS | {Tensor.mul_, Tensor.add_, Tensor.clamp_, Tensor.fill_, Tensor.zero_, init.constant_}


class skip_init(TorchFunctionMode):  # noqa: N801  (a context, as torch.no_grad)
    """Random numbers are not drawn; tensors without memory are not written to at all."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in WRITES:
            tensor = args[0] if args else kwargs["tensor"]
            if func in DRAWS or tensor.is_meta:
                return tensor
        return func(*args, **kwargs)
