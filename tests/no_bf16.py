"""A CPU that has bf16 made to look like one that has none.

There PyTorch reports no support; the first product in bf16 that oneDNN is asked for fails with a warning, and PyTorch
then leaves oneDNN out for the rest of the process.
"""

import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WARNING = "mkldnn_matmul failed, switching to BLAS gemm:mkldnn_matmul bf16 path needs a cpu with bf16 support"


def hide_bf16() -> None:
    """For the rest of the process, and on x86_64 for those it starts."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"  # read by oneDNN at its first use; it has an effect on x86_64 only
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"):
        setattr(torch.cpu, name, lambda: False)
    torch.ops.mkldnn._is_mkldnn_bf16_supported = Unsupported(torch.ops.mkldnn._is_mkldnn_bf16_supported)
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        none = {name: False for name in found if "bf16" in name or "amx" in name}
        torch.cpu.get_capabilities = lambda: {**found, **none}
    linear = F.linear

    def failing_linear(input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        if is_bf16(input) and torch.backends.mkldnn.enabled:
            warnings.warn(WARNING, UserWarning, stacklevel=2)
            torch.backends.mkldnn.enabled = False
        return linear(input, weight, bias)

    F.linear = failing_linear


class Unsupported:
    """An operator that says no. All else about it is as before: torch goes through its operators when it compiles."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator

    def __call__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)


def is_bf16(input: Tensor) -> bool:
    if input.device.type != "cpu":
        return False
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") is torch.bfloat16
    return input.dtype is torch.bfloat16
