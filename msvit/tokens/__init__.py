"""Tokens: from an image and a layout to a TokenBatch, and back to a map.

    tokens = tokenize(image, layout, backbone)   # what the transformer sees: only the layout's tokens are embedded
    dense_map(tokens)                            # (b, d, hf, wf): each fine patch gets the token that covers it
    from_dense(dense, tokens.layout)             # and back, exactly
"""

from msvit.tokens.dense import dense_map, from_dense
from msvit.tokens.patches import active_pixels, coarse_positions, cut_patches, patch_pixels
from msvit.tokens.tokenizer import Embedding, nan_or_zero, tokenize

__all__ = [
    "Embedding",
    "active_pixels",
    "coarse_positions",
    "cut_patches",
    "dense_map",
    "from_dense",
    "nan_or_zero",
    "patch_pixels",
    "tokenize",
]
