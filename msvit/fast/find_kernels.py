"""Are there Triton kernels here? `kernels` is their module, or None: then everything is done in plain torch.

What has hooks is called as it is: no kernel stands in for it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

kernels: Any = None
if torch.version.cuda is not None and find_spec("triton") is not None:
    kernels = import_module("msvit.fast.kernels")


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
