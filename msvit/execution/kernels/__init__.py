"""Triton kernels for CUDA: each does in one launch what takes many otherwise.

    pack_indices(mask, num_prefix, ...)                  # which tokens run: token, image, cu_seqlens
    gather_pixels(image, which, patch, ...)         # the pixels of the tokens that run, and of no others
    attention(q, k, v, weight, cu_q, cu_k, ...)     # attention inside each image, with all gradients, the gate's too
    window_attention(q, k, v, cell, rank, ...)      # attention inside windows that may be partly empty
    self_attention(qkv, bias, weight, ...)          # the same for qkv in one tensor, with the gradient of its bias
    gelu(x, bias)                                   # the exact one of x + bias, as fast as memory, with both gradients
    linear(x, weight, bias)                         # of which the bias gets its gradient by a kernel
    merge_tokens(x, keys, token, ...)               # ToMe's reduction: the smaller batch, and what covers each patch
    normalize_into(x, shift, weight, bias, eps, y)  # LayerNorm(x + shift); normalize_then_add: LayerNorm(x), x += added
    normalize_fp8_into, gelu_fp8_into               # LayerNorm and GELU to rows in FP8 with scales (fp8.py)
    add_norm(x, u, added, weight, bias, eps, ...)   # x + u + added and its LayerNorm, with all gradients
    pool_moments(image, scale, shift, side)         # mean and variance of small squares
    cell_mlp, stem, downsample, mix_cells           # the layers of gates (gates.py)

What ends in `_into` writes to memory that it is given, for inference. What reads images takes their address, too
(addresses.py).

Each has an equivalent in plain torch, against which it is tested: on a GPU, and without one in
Triton's interpreter. All are custom ops, so torch.compile takes them as they are. Kernels are written in Triton's
language, which has no types: hence no_type_check.
"""

from msvit.execution.kernels.activation import gelu
from msvit.execution.kernels.attending import attention, attention_into, can_attend, self_attention
from msvit.execution.kernels.fp8 import gelu_fp8_into, normalize_fp8_into
from msvit.execution.kernels.gates import (
    cell_mlp,
    downsample,
    fits_cell_mlp,
    fits_context_gate,
    mix_cells,
    stem,
)
from msvit.execution.kernels.linears import linear
from msvit.execution.kernels.merging import can_merge, merge_tokens
from msvit.execution.kernels.norms import add_norm, normalize_into, normalize_then_add
from msvit.execution.kernels.pooling import pool_moments
from msvit.execution.kernels.tokens import gather_pixels, gather_pixels_into, pack_indices, pack_indices_into
from msvit.execution.kernels.windows import window_attention

__all__ = [
    "add_norm",
    "attention",
    "attention_into",
    "can_attend",
    "can_merge",
    "cell_mlp",
    "downsample",
    "fits_cell_mlp",
    "fits_context_gate",
    "gather_pixels",
    "gather_pixels_into",
    "gelu",
    "gelu_fp8_into",
    "linear",
    "merge_tokens",
    "mix_cells",
    "normalize_fp8_into",
    "normalize_into",
    "normalize_then_add",
    "pack_indices",
    "pack_indices_into",
    "pool_moments",
    "self_attention",
    "stem",
    "window_attention",
]
