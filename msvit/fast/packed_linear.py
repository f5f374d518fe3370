"""A linear layer whose weights are laid out for the matrix product once, not in every call.

    fast = PackedLinear.of(linear)    # the same parameters, hooks and name; the same output
    fast(x)                           # a product with the packed weight where it serves, else what the layer did before

MKL and oneDNN copy a weight into blocks of their own before each product. With few tokens that takes a good part of the
time. `choose_form` returns how a weight is kept: MKL's blocks, those of oneDNN (in bfloat16, and on ARM64, where it
calls the Arm Compute Library), or column-major for small weights, whose products are short beside oneDNN's overhead.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.fast.fast_layers import as_class

# Weights of a layer up to which column-major is faster, on a Neoverse-N1:
MAX_SMALL = 300_000  # than row-major, as nn.Linear has it: 1.4x at 128 x 384, 1.1x at 192 x 768
MAX_SMALL_ACL = 60_000  # than oneDNN's blocks: 1.3x at 128 x 128, 1.0x at 128 x 384, 0.9x at 192 x 768

ROWS = 256  # tokens a weight is packed for: no slower than the plain product from 50 to 1600, 1.2x faster around 100

Product = Callable[[Tensor, Tensor | None], Tensor]  # F.linear(x, weight, bias), as a function of x and bias


def pack_for_mkl(weight: Tensor) -> Product:
    """Copy a weight into blocks for MKL's product."""
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), ROWS)

    def linear(x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkl._mkl_linear.default(x, packed, weight, bias, x.numel() // x.shape[-1])

    return linear


def pack_for_onednn(weight: Tensor) -> Product:
    """Copy a weight into blocks for oneDNN's product, which the tensor records; copied again where rows need others."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def make_column_major(weight: Tensor) -> Product:
    """Copy a weight in column-major order."""
    packed = weight.t().contiguous().t()
    return lambda x, bias: F.linear(x, packed, bias)


class PackedLinear(nn.Linear):
    """A linear layer that packs its weight anew when that was replaced or written to, and after `refresh()`."""

    stands_for = nn.Linear  # the class that is written when a model is saved

    _packed: Product | None
    _source: Tensor | None
    _writes: int | None

    @staticmethod
    def of(linear: nn.Linear) -> "PackedLinear":
        """Return the same layer, sharing parameters and hooks."""
        packed = as_class(linear, PackedLinear)
        packed.refresh()
        return packed

    def refresh(self) -> None:
        """Drop the packed weight: the next call packs it anew."""
        self._packed = self._source = self._writes = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output, by the packed weight where that serves."""
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")  # ten times faster than attributes
        if weight is None or not _serves(input, weight, bias):
            return super().forward(input)
        packed = self.packed(weight)
        return super().forward(input) if packed is None else packed(input, bias)

    def packed(self, weight: Tensor) -> Product | None:
        """Return the product with the packed weight, or None where packing does not serve it."""
        writes = None if weight.is_inference() else weight._version
        source = self._source  # kept, so that no other weight can come to lie at its address
        if source is None or source.data_ptr() != weight.data_ptr() or self._writes != writes:
            with torch.inference_mode(False), torch.no_grad():
                form = choose_form(weight)
                self._packed = None if form is None else form(weight.detach())
            self._source, self._writes = weight.detach(), writes
        return self._packed

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        return {**state, "_packed": None, "_source": None, "_writes": None}  # a library's form must not be copied


def can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether packing makes a module faster. Only plain linear layers: a subclass may have another forward."""
    if not isinstance(module, nn.Linear) or type(module) not in (nn.Linear, PackedLinear):
        return False
    weight = module.weight
    return weight.is_cpu and choose_form(weight) is not None


def choose_form(weight: Tensor) -> Callable[[Tensor], Product] | None:
    """Return the fastest form of a weight of this shape and dtype, or None where that is the form it has."""
    out_features, in_features = weight.shape
    if weight.dtype is torch.bfloat16 and has_bf16():
        return pack_for_onednn if any_rows(pack_for_onednn, out_features, in_features, weight.dtype) else None
    if weight.dtype is not torch.float32:
        return None
    if has_mkl():
        return pack_for_mkl if any_rows(pack_for_mkl, out_features, in_features) else None
    small = out_features * in_features <= (MAX_SMALL_ACL if has_acl() else MAX_SMALL)
    if small or not has_acl():
        return make_column_major if small else None
    return pack_for_onednn if any_rows(pack_for_onednn, out_features, in_features) else None


def _serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if x.dtype is not weight.dtype or not (x.is_cpu and weight.is_cpu):
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return False
    special = torch.compiler.is_compiling() or type(x) is not Tensor or torch.is_autocast_enabled("cpu")
    return not special and x.numel() > 0


@cache
def has_mkl() -> bool:
    """Return whether PyTorch has MKL's product with packed weights."""
    names = ("_mkl_linear", "_mkl_reorder_linear_weight")
    return torch.backends.mkl.is_available() and all(hasattr(torch.ops.mkl, name) for name in names)


@cache
def has_acl() -> bool:
    """Return whether oneDNN calls the Arm Compute Library. Without it its products are slow on ARM64."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    available = getattr(torch.backends.mkldnn, "is_acl_available", lambda: False)
    return available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


@cache
def has_bf16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this x86_64 CPU: packed it is up to 1.5 times faster (AMX)."""
    found = torch.cpu.get_capabilities() if torch.backends.mkldnn.is_available() else {}
    if not any(found.get(name, False) for name in ("amx_bf16", "avx512_bf16")):
        return False
    try:
        pack_for_onednn(torch.ones(16, 16, dtype=torch.bfloat16))(torch.ones(1, 16, dtype=torch.bfloat16), None)
    except RuntimeError:  # ONEDNN_MAX_CPU_ISA allows no such instructions
        return False
    return True


@lru_cache(maxsize=256)
def any_rows(
    form: Callable[[Tensor], Product], out_features: int, in_features: int, dtype: torch.dtype = torch.float32
) -> bool:
    """Return whether a weight packed for ROWS tokens serves other numbers: tried, as no library promises it."""
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        weight = torch.randn(out_features, in_features, generator=draw).to(dtype)
        packed = form(weight)
        for rows in (1, 50, 95, 2 * ROWS + 1):
            x = torch.randn(rows, in_features, generator=draw).to(dtype)
            want = F.linear(x, weight).float()
            if not (packed(x, None) - want).norm() <= (1e-5 if dtype is torch.float32 else 1e-2) * want.norm():
                return False
    return True
