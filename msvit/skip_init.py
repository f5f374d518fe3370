"""Build a model for its sizes alone, without drawing weights that have no memory.

    with torch.device("meta"), skip_init():
        sketch = timm.create_model("vit_large_patch16_224")      # a quarter of the time

On the device "meta" timm's `trunc_normal_` computes nothing, but takes most of the time. Tensors with memory are drawn
as ever: PyTorch draws again what falls outside the bounds, so that one who skipped it would wait forever.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

WRITES = {
    getattr(Tensor, name)
    for name in ("uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_")
}  # fmt: skip


class skip_init(TorchFunctionMode):  # noqa: N801  (a context, as torch.no_grad)
    """Tensors without memory are not written to."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in WRITES and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))
