"""Whether a command runs its model compiled, and if not, why.

    runner, choice = compile_where_supported(model, graphs="auto", inductor="auto", num_calls=5000, learns=True)
    choice.reason      # None, or "gradient checkpointing is on, which CUDA graphs cannot hold"
    describe(choice)   # the line that is printed for it

`runner` is the model itself where nothing is compiled. What a model does not support is decided by the library
(`unsupported_reason` of a compiled model); here is what depends on the command.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from msvit.fast.compile import compile as compile_model
from msvit.segmenter import Segmenter
from msvit_lab.config import Switch

MIN_CALLS = 2000  # inductor takes 20 to 60 s, which fewer calls do not save


@dataclass(frozen=True)
class Choice:
    """`compiled`: on a GPU as CUDA graphs, on a CPU with packed weights. `inductor`: by torch.compile too."""

    compiled: bool
    inductor: bool = False
    reason: str | None = None  # why it is not compiled; None where that was asked for


def choose(
    device: str, graphs: Switch, inductor: Switch, num_calls: int, learns: bool = False, num_processes: int = 1
) -> Choice:
    """What to do on this type of device, if the model supports it. `num_calls`: forwards, or steps if it `learns`."""
    if graphs is False:
        return Choice(compiled=False)
    if learns and device != "cuda":
        return Choice(compiled=False, reason="training is compiled on a GPU only")
    if learns and num_processes > 1:
        why = f"{num_processes} processes train together, and CUDA graphs do not hold the exchange of gradients"
        return Choice(compiled=False, reason=why)
    pays = num_calls > MIN_CALLS if inductor == "auto" else inductor
    return Choice(compiled=True, inductor=device == "cuda" and pays)


def compile_where_supported(
    model: Any, graphs: Switch = "auto", inductor: Switch = "auto", *, num_calls: int, learns: bool = False,
    num_processes: int = 1,
) -> tuple[Any, Choice]:  # fmt: skip
    """The model, compiled if it can be, and what was chosen. Call it under the autocast of the forwards."""
    device = next(model.parameters()).device.type
    choice = choose(device, graphs, inductor, num_calls, learns, num_processes)
    if not choice.compiled:
        return model, choice
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "msvit.compile changes nothing here")  # the reason says so
        fast = compile_model(model, inductor=choice.inductor)
    encoder: Any = fast.encoder if isinstance(fast, Segmenter) else fast
    reason = encoder.unsupported_reason(needs_grad=learns)
    return (fast, choice) if reason is None else (model, Choice(compiled=False, reason=reason))


def compile_for_batches(model: Any, size: int, num_calls: int, graphs: Switch = "auto") -> tuple[Any, Choice]:
    """The same for inference on batches of `size` images, of which the last may be smaller."""
    fast, choice = compile_where_supported(model, graphs, num_calls=num_calls)
    on_gpu = next(model.parameters()).is_cuda
    return (WholeBatches(model, fast, size) if choice.compiled and on_gpu else fast), choice


def describe(choice: Choice) -> str | None:
    """A sentence for the person who started the command; None if there is nothing to say."""
    if choice.reason is not None:
        return f"uncompiled: {choice.reason}"
    return "compiling: the first steps take up to a minute" if choice.inductor else None


class WholeBatches:
    """A compiled model for batches of one size. Others run uncompiled, as each size would be captured for itself.

    Everything but a call is that of the uncompiled model.
    """

    def __init__(self, model: Any, fast: Any, size: int) -> None:
        self.model, self.fast, self.size = model, fast, size

    def __call__(self, image: torch.Tensor) -> Any:
        return (self.fast if len(image) == self.size else self.model)(image)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
