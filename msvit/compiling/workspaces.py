"""Products without cuBLAS's workspace, for graphs of large batches.

Where it has a workspace, cuBLAS chooses kernels that count their tiles there, and clears the counter before each: in a
graph that takes as long as a small kernel. What it needs a workspace for is to split long sums, such as those of
gradients of weights: these are captured with one.

How large it is can be set since torch 2.13 or so; torch 2.11 reads it from the environment in every call. What a user
has set is left as it is.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

VARIABLES = {"CUBLASLT_WORKSPACE_SIZE": "0", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}
SIDE = 256  # of the product that is tried


@cache
def lean_stream(device: int) -> torch.cuda.Stream | None:
    """A stream for products without a workspace, and for nothing else; None where they do not run.

    cuBLAS keeps the workspace that a stream had first.
    """
    stream = torch.cuda.Stream(device)
    try:
        with torch.cuda.stream(stream), without_workspace():
            x = torch.ones(SIDE, SIDE, device=f"cuda:{device}", dtype=torch.bfloat16)
            y = torch.addmm(x[0], x, x)
            torch.ops.aten._addmm_activation.out(x[0], x, x, use_gelu=True, out=y)
            y.addmm_(x, x)
            stream.synchronize()
    except RuntimeError:
        return None
    return stream


def is_set_by_user() -> bool:
    """Whether a user cares which products run: then they run as everywhere."""
    lt = torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublaslt
    return lt or torch.are_deterministic_algorithms_enabled() or any(name in os.environ for name in VARIABLES)


@contextmanager
def without_workspace() -> Iterator[None]:
    """cuBLAS gets no workspace on streams that it has not seen before. Not where `is_set_by_user`."""
    names = ("cublas_workspace_size", "cublaslt_workspace_size")
    settings: list[Any] = [getattr(torch.backends.cuda, name, None) for name in names]
    if None in settings:
        os.environ |= VARIABLES
        try:
            yield
        finally:
            for name in VARIABLES:
                del os.environ[name]
        return
    before = [setting() for setting in settings]
    try:
        for setting in settings:
            setting(0)
        yield
    finally:
        for setting, size in zip(settings, before, strict=True):
            setting(size)
