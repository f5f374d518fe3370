"""Triton kernels for CUDA: each does in one launch what takes many otherwise.

    pack_indices(mask, num_prefix, ...)                  # which tokens run: token, image, cu_seqlens
    gather_pixels(image, which, patch, ...)         # the pixels of the tokens that run, and of no others
    attention(q, k, v, weight, cu_q, cu_k, ...)     # attention inside each image, with all gradients, the gate's too
    window_attention(q, k, v, cell, rank, ...)      # attention inside windows that may be partly empty
    gelu(x)                                         # the exact one, as fast as memory

Each has an equivalent in plain torch, against which it is tested: on a GPU, and without one in
Triton's interpreter. All are custom ops, so torch.compile takes them as they are. Kernels are written in Triton's
language, which has no types: hence no_type_check.
"""

from msvit.execution.kernels.activation import gelu
from msvit.execution.kernels.attending import attention, can_attend
from msvit.execution.kernels.tokens import gather_pixels, pack_indices
from msvit.execution.kernels.windows import window_attention

__all__ = ["attention", "can_attend", "gather_pixels", "gelu", "pack_indices", "window_attention"]
