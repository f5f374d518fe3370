"""Products of many rows by cuBLASLt, called directly so that none has a workspace.

    multiply(x, weight, y, bias)             # y = x weight^T + bias
    multiply(x, weight, y, bias, gelu=True)  # GELU of it, the tanh approximation
    multiply(x, weight, y, add=True)         # y += x weight^T

PyTorch gives cuBLAS a workspace. Then cuBLAS chooses kernels that count their tiles there, and clears the counter
before each: in a CUDA graph that takes as long as a small kernel. The library is the one that PyTorch has loaded; where
there is none, for few rows (whose sums may be split, which needs a workspace) and on a CPU the products are PyTorch's.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from functools import cache
from typing import Any

import torch
from torch import Tensor

LEAST_ROWS = 2048
OPERAND_BYTES = 256  # cuBLASLt takes for granted that operands lie at multiples of it
TYPES = {torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_16F, CUDA_R_16BF
FLOAT, COMPUTE_FLOAT = 0, 68  # CUDA_R_32F, CUBLAS_COMPUTE_32F
TRANSPOSE_FIRST, EPILOGUE, BIAS_POINTER = 3, 7, 8  # CUBLASLT_MATMUL_DESC_TRANSA and so on
BIAS, GELU_BIAS = 4, 36  # CUBLASLT_EPILOGUE_...
MAX_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm and what is known about it."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


class Library:
    """cuBLASLt on one device."""

    def __init__(self, name: str, device: int) -> None:
        self.functions = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)  # OSError unless it is loaded
        self.handle = c_void_p()
        with torch.cuda.device(device):
            self.call("Create", byref(self.handle))

    def call(self, name: str, *args: Any) -> None:
        status = self.functions[f"cublasLt{name}"](*args)
        if status:
            raise RuntimeError(f"cublasLt{name} failed with status {status}")

    @contextmanager
    def descriptor(self, kind: str, *args: Any) -> Iterator[c_void_p]:
        """One of cuBLASLt's, which is destroyed at the end."""
        made = c_void_p()
        self.call(f"{kind}Create", byref(made), *args)
        try:
            yield made
        finally:
            self.call(f"{kind}Destroy", made)

    def multiply(self, x: Tensor, weight: Tensor, y: Tensor, bias: Tensor | None, gelu: bool, add: bool) -> bool:
        """Whether there is a way without a workspace; then it is done.

        In cuBLAS's order, columns first, this is y^T = weight x^T (+ y^T), with `weight` given as its transpose.
        """
        (rows, inner), width, kind = x.shape, weight.shape[0], TYPES[x.dtype]
        settings: dict[int, Any] = {TRANSPOSE_FIRST: c_int32(1)}
        if bias is not None:
            settings |= {EPILOGUE: c_uint32(GELU_BIAS if gelu else BIAS), BIAS_POINTER: c_void_p(bias.data_ptr())}
        with ExitStack() as stack:
            product = stack.enter_context(self.descriptor("MatmulDesc", COMPUTE_FLOAT, FLOAT))
            for name, value in settings.items():
                self.call("MatmulDescSetAttribute", product, name, byref(value), c_size_t(sizeof(value)))
            sizes = [(c_uint64(high), c_uint64(wide)) for high, wide in ((inner, width), (inner, rows), (width, rows))]
            of_weight, of_x, of_y = (
                stack.enter_context(self.descriptor("MatrixLayout", kind, high, wide, c_int64(high.value)))
                for high, wide in sizes
            )
            wanted, none = stack.enter_context(self.descriptor("MatmulPreference")), c_uint64(0)
            self.call("MatmulPreferenceSetAttribute", wanted, MAX_WORKSPACE, byref(none), c_size_t(sizeof(none)))
            found, number, layouts = Heuristic(), c_int(), (of_weight, of_x, of_y, of_y)
            choose = self.functions["cublasLtMatmulAlgoGetHeuristic"]
            status = choose(self.handle, product, *layouts, wanted, 1, byref(found), byref(number))
            if status or not number.value or found.status:
                return False
            one, beta = c_float(1), c_float(1 if add else 0)
            at_weight, at_x, at_y = (c_void_p(t.data_ptr()) for t in (weight, x, y))
            stream = c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
            status = self.functions["cublasLtMatmul"](
                self.handle, product, byref(one), at_weight, of_weight, at_x, of_x, byref(beta),
                at_y, of_y, at_y, of_y, byref(found), None, c_size_t(0), stream,
            )  # fmt: skip
            return not status


@cache
def find_library(device: int) -> Library | None:
    """The one that PyTorch uses, if it is where it is expected and computes what it should."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        library = Library(f"libcublasLt.so.{major}", device)
        return library if is_right(library, f"cuda:{device}") else None
    except (OSError, AttributeError, RuntimeError):
        return None


def is_right(library: Library, device: str) -> bool:
    """Whether it computes a product of small whole numbers, and adds another."""
    counts = torch.arange(128 * 64, device=device)
    whole = (counts[: 32 * 64].view(32, 64) % 3, counts.view(128, 64) % 5, counts[:128] % 7)
    x, weight, bias = (t.bfloat16() for t in whole)
    y = x.new_zeros(32, 128)
    done = library.multiply(x, weight, y, bias, gelu=False, add=False)
    done = done and library.multiply(x, weight, y, None, gelu=False, add=True)
    want = 2 * (x.double() @ weight.double().T) + bias
    return done and bool(((y.double() - want).abs() <= want / 64).all())  # rounded twice, to 8 bits


def multiply(
    x: Tensor, weight: Tensor, y: Tensor, bias: Tensor | None = None, gelu: bool = False, add: bool = False
) -> None:
    """x (rows, d), weight (e, d), bias (e,) of one dtype -> y (rows, e). `gelu` needs a bias, `add` takes none."""
    tensors = (x, weight, y) if bias is None else (x, weight, y, bias)
    if x.is_cuda and len(x) >= LEAST_ROWS and fits(*tensors):
        library = find_library(x.device.index)
        if library is not None and library.multiply(x, weight, y, bias, gelu, add):
            return
    if add:
        y.addmm_(x, weight.T)
    elif gelu:
        torch.ops.aten._addmm_activation.out(bias, x, weight.T, use_gelu=True, out=y)
    elif bias is None:
        torch.mm(x, weight.T, out=y)
    else:
        torch.addmm(bias, x, weight.T, out=y)


def fits(x: Tensor, weight: Tensor, y: Tensor, *bias: Tensor) -> bool:
    """Whether cuBLASLt, which sees nothing but pointers, may have them; PyTorch raises an error where it should."""
    same = all((t.dtype, t.device) == (x.dtype, x.device) for t in (weight, y, *bias))
    aligned = all(t.is_contiguous() and t.data_ptr() % OPERAND_BYTES == 0 for t in (x, weight, y, *bias))
    shapes = [(len(weight), x.shape[1]), (len(x), len(weight)), *[(len(weight),) for _ in bias]]
    return x.dtype in TYPES and same and aligned and [t.shape for t in (weight, y, *bias)] == shapes
