"""Checks of arguments: each returns its value, or raises a ValueError that names the argument and what it must be.

    coarse = check_int("coarse", coarse, at_least=2)
    share = check_number("share", share, at_least=0, at_most=1, example=0.3)
    fuse = check_flag("fuse", fuse)
    grid = check_ints("grid", grid, num=2)
    check_tensor("dense", dense, (batch, None, rows, columns), "b, d, hf, wf")

None of them reads a tensor's values, so that nothing waits for a device; `check_values` does, on a CPU only, and
`warn_of_pixels`. While a function is compiled or traced tensors are not checked.
"""

import math
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Bound = int | float | None
MAX_PIXEL = 20.0  # of normalised images, whatever the mean and std
MAX_WEIGHTS = 2**30  # of one layer that is made here: 4 GiB in 32 bits
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
KINDS = {"float": FLOATS, "int": INTS, "real": FLOATS | INTS | {torch.bool}}


def is_traced() -> bool:
    """Return whether torch.compile, torch.export or torch.jit traces this call: then sizes are no plain numbers."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()  # (torch.jit.is_tracing is two more calls)


def is_vmapped(tensor: Tensor) -> bool:
    """Return whether it stands for many tensors, in torch.func.vmap: no values can be read or written in place."""
    if torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def is_readable(*tensors: Tensor) -> bool:
    """Return whether values may be read: not of meta tensors, in vmap, for a tracer, or while a graph is captured."""
    if any(tensor.is_meta or is_vmapped(tensor) for tensor in tensors) or torch._C._len_torch_dispatch_stack():
        return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def check_eval(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if one is in training mode."""
    if any(each.training for each in modules):
        raise ValueError("a model with parts in training mode does not predict as it is used; call model.eval() first")


def shown(value: object) -> str:
    """Format a value for an error message: short, and never a tensor's numbers."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def check_int(
    name: str, value: Any, at_least: int | None = None, at_most: int | None = None, example: object = None
) -> int:
    """Return a whole number, or raise ValueError unless it lies within these bounds."""
    whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    if whole and _inside(value, None, at_least, None, at_most):
        return int(value)
    span = _span(None, at_least, None, at_most)
    raise ValueError(f"{name} is {shown(value)}, but must be a whole number{span}{_example(name, example)}")


def warn(message: str) -> None:
    """Warn at the caller's line: the first above that is neither msvit's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("msvit", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warn_of_pixels(image: Tensor, limit: float) -> bool:
    """Warn if pixels beyond a limit cannot be normalised ones. Returns whether it did; of NaN nothing is said."""
    low, high = (bound.item() for bound in image.detach().aminmax())
    if not (largest := max(-low, high)) > limit:
        return False
    warn(
        f"pixels are up to {largest:.0f}, but models take normalised ones, of a few units; normalise images by the "
        f"mean and std of the host's training, as model.preprocessing does"
    )
    return True


def check_number(
    name: str,
    value: Any,
    above: Bound = None,
    at_least: Bound = None,
    below: Bound = None,
    at_most: Bound = None,
    example: object = None,
) -> float:
    """Return a finite number as a float, or raise ValueError unless it lies within these bounds."""
    finite = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if finite and _inside(value, above, at_least, below, at_most):
        return float(value)
    span = _span(above, at_least, below, at_most)
    raise ValueError(f"{name} is {shown(value)}, but must be a finite number{span}{_example(name, example)}")


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, but must be True or False")
    return value


def check_choice(name: str, value: Any, known: Iterable[str]) -> str:
    """Return one of the known names, or raise ValueError."""
    known = list(known)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"unknown {name} {shown(value)}; known: {', '.join(known)}")
    return value


def check_ints(
    name: str, value: Any, num: int, at_least: int = 1, at_most: int | None = None, example: object = None
) -> tuple[int, ...]:
    """Return `num` whole numbers, such as the rows and columns of a grid."""
    try:
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == num:
            return tuple(check_int(name, each, at_least, at_most) for each in value)
    except ValueError:
        pass
    span = _span(None, at_least, None, at_most)
    raise ValueError(f"{name} is {shown(value)}, but must be {num} whole numbers{span}{_example(name, example)}")


def check_numbers(name: str, values: Any, num: int | None, words: str, **bounds: Any) -> tuple[float, ...]:
    """Return `num` finite numbers (None: any number of them but 0) within the bounds. `words`: what they must be."""
    right = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not right or len(values) != (num or max(1, len(values))):
        raise ValueError(f"{name} is {shown(values)}, but must be {words}")
    return tuple(check_number(f"{name}[{place}]", value, **bounds) for place, value in enumerate(values))


def check_kind(name: str, value: Any, kind: Any, words: str) -> None:
    """Raise ValueError unless the value is of a class. `words`: what it must be, and how to get one."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {shown(value)}, but must be {words}")


def check_path(name: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError(f"{name} is {shown(value)}, but must be the path of a folder, a str or a Path")
    return Path(value)


def check_weights(num: int, names: str) -> None:
    """Raise ValueError for layers of too many weights. `names`: the arguments that their number follows from."""
    if num > MAX_WEIGHTS:
        raise ValueError(f"{names} make a layer of {num} weights, but {MAX_WEIGHTS} are the most; make it smaller")


def check_tensor(
    name: str, value: Any, shape: tuple[int | None, ...] | None = None, axes: str = "", kind: str = "float"
) -> None:
    """Raise ValueError unless it is a tensor of this shape (None: any length but 0) and kind: float, int or real."""
    if is_traced():
        return
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {shown(value)}, but must be a tensor{_axes(axes)}")
    if value.dtype not in KINDS[kind]:
        raise ValueError(f"{name} is {shown(value)}, but must be a {kind} tensor{_axes(axes)}; convert it")
    if shape is None:
        return
    fits = value.ndim == len(shape)
    for have, want in zip(value.shape, shape, strict=False):
        fits = fits and (have > 0 if want is None else have == want)
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} is {shown(value)}, but must be ({wanted}){_axes(axes)}")


def check_values(
    name: str,
    value: Tensor,
    above: Bound = None,
    at_least: Bound = None,
    at_most: Bound = None,
    remedy: str = "",
) -> None:
    """Raise ValueError unless all values lie within the bounds; NaN never does. CPU tensors only: no GPU sync."""
    if is_traced() or value.device.type != "cpu" or not value.numel():
        return
    low, high = (bound.item() for bound in value.detach().aminmax())
    if low != low or not all(_inside(bound, above, at_least, None, at_most) for bound in (low, high)):
        span = _span(above, at_least, None, at_most)
        raise ValueError(f"{name} has values from {low} to {high}, but they must be numbers{span}{remedy}")


def _inside(value: Any, above: Bound, at_least: Bound, below: Bound, at_most: Bound) -> bool:
    high = (above is None or value > above) and (at_least is None or value >= at_least)
    return high and (below is None or value < below) and (at_most is None or value <= at_most)


def _span(above: Bound, at_least: Bound, below: Bound, at_most: Bound) -> str:
    """The bounds in words: "in [0, 1)", ">= 2"."""
    low = "" if above is at_least is None else f"({above}" if at_least is None else f"[{at_least}"
    high = "" if below is at_most is None else f"{below})" if at_most is None else f"{at_most}]"
    if low and high:
        return f" in {low}, {high}"
    low = low.replace("(", "> ").replace("[", ">= ")
    high = f"{'<' if high.endswith(')') else '<='} {high[:-1]}" if high else ""
    return f" {low or high}" if low or high else ""


def _example(name: str, example: object) -> str:
    return "" if example is None else f"; pass for example {name}={example}"


def _axes(axes: str) -> str:
    return f" ({axes})" if axes else ""
