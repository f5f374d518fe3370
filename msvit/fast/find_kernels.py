"""Triton kernels, if there are any: `kernels` is their module, or None, and then everything is done in plain torch."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

kernels: Any = None
if torch.version.cuda is not None and find_spec("triton") is not None:
    kernels = import_module("msvit.fast.kernels")


def runs_kernels(x: Tensor) -> bool:
    """Return whether kernels can run on this tensor."""
    return kernels is not None and x.is_cuda


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks: then it is called as it is, and no kernel replaces it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
