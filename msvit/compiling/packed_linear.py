"""A linear layer whose weights are laid out for the matrix product once, not in every call.

    fast = PackedLinear.of(linear)    # the same parameters, hooks and name; the same output
    fast(x)                           # a product with the packed weight where it serves, else what the layer did before

MKL copies a weight into blocks of its own before each product. With few tokens that takes a good part of the time.
PyTorch without MKL (ARM64) spends about 0.08 ms of each product on a row-major weight, as `nn.Linear` has it; small
layers run faster with a column-major one.
"""

from functools import cache, lru_cache
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_SMALL = 300_000  # weights of a layer that gains without MKL: 1.4x at 128 x 384, 1.1x at 192 x 768
ROWS = 256  # tokens MKL plans for: no slower than the plain product from 50 to 1600, and 1.2x faster around 100


class PackedLinear(nn.Linear):
    """Packed anew when the weight was replaced or a write to it was counted, and after `refresh()`."""

    stands_for = nn.Linear  # the class that is written when a model is saved

    _packed: Tensor | None
    _source: Tensor | None
    _writes: int | None

    @staticmethod
    def of(linear: nn.Linear) -> "PackedLinear":
        """The same layer, sharing parameters and hooks."""
        packed = PackedLinear.__new__(PackedLinear)
        packed.__dict__.update(linear.__dict__)
        packed.refresh()
        return packed

    def refresh(self) -> None:
        self._packed = self._source = self._writes = None

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")  # ten times faster than attributes
        if weight is None or not _serves(input, weight, bias):
            return super().forward(input)
        return _linear(input, self.packed(weight), weight, bias, input.numel() // weight.shape[1])

    def packed(self, weight: Tensor) -> Tensor:
        """The weight as the product wants it."""
        writes = None if weight.is_inference() else weight._version
        source = self._source  # kept, so that no other weight can come to lie at its address
        if self._packed is None or source is None or source.data_ptr() != weight.data_ptr() or self._writes != writes:
            with torch.inference_mode(False), torch.no_grad():
                self._packed = _pack(weight.detach())
            self._source, self._writes = weight.detach(), writes
        return self._packed

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        return {**state, "_packed": None, "_source": None, "_writes": None}  # MKL's form must not be copied


def can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether packing makes this module faster. Only plain linear layers: a subclass may have another forward."""
    if not isinstance(module, nn.Linear) or type(module) not in (nn.Linear, PackedLinear):
        return False
    weight = module.weight
    if weight.dtype is not torch.float32 or not weight.is_cpu:
        return False
    return any_rows(*weight.shape) if has_mkl() else weight.numel() <= MAX_SMALL


def _serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if x.dtype is not torch.float32 or weight.dtype is not torch.float32 or not (x.is_cpu and weight.is_cpu):
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return False
    special = torch.compiler.is_compiling() or type(x) is not Tensor or torch.is_autocast_enabled("cpu")
    return not special and x.numel() > 0


@cache
def has_mkl() -> bool:
    names = ("_mkl_linear", "_mkl_reorder_linear_weight")
    return torch.backends.mkl.is_available() and all(hasattr(torch.ops.mkl, name) for name in names)


@lru_cache(maxsize=256)
def any_rows(out_features: int, in_features: int) -> bool:
    """Does a weight packed for ROWS tokens serve other numbers too? MKL does not promise it, so each shape is tried."""
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.randn(out_features, in_features, generator=draw)
        packed = _pack(weight)
        for rows in (1, 50, 95, 2 * ROWS + 1):
            x = torch.randn(rows, in_features, generator=draw)
            want = F.linear(x, weight)
            if not (_linear(x, packed, weight, None, rows) - want).norm() <= 1e-5 * want.norm():
                return False
    return True


def _pack(weight: Tensor) -> Tensor:
    if not has_mkl():
        return weight.t().contiguous().t()
    return torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), ROWS)


def _linear(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """`F.linear` with a weight that `_pack` returned. `rows`: the rows of `x`, all axes but the last flattened."""
    if not has_mkl():
        return F.linear(x, packed, bias)
    return torch.ops.mkl._mkl_linear.default(x, packed, weight, bias, rows)
