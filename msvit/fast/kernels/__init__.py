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

from importlib import import_module
from typing import Any

# Module -> what it defines for others. Loaded on first use: a model on a CPU needs none of them.
_NAMES = {
    "activation": ("gelu",),
    "addresses": (),
    "attending": ("attention", "attention_into", "can_attend", "self_attention"),
    "fp8": ("gelu_fp8_into", "normalize_fp8_into"),
    "gates": ("cell_mlp", "downsample", "fits_cell_mlp", "fits_context_gate", "mix_cells", "stem"),
    "linears": ("linear",),
    "merging": ("can_merge", "merge_tokens"),
    "norms": ("add_norm", "normalize_into", "normalize_then_add"),
    "pooling": ("pool_moments",),
    "sums": (),
    "tokens": ("gather_pixels", "gather_pixels_into", "pack_indices", "pack_indices_into"),
    "windows": ("window_attention",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _NAMES:
        raise AttributeError(f"msvit.fast.kernels has no {name!r}; it has {', '.join(_HOME)}")
    module = import_module(f"{__name__}.{_HOME.get(name, name)}")
    value = getattr(module, name) if name in _HOME else module
    globals()[name] = value
    return value
