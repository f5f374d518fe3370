"""Tokens: from an image and a layout to a TokenBatch, and back to a map.

    tokenizer.tokenize(image, layout, backbone)  # what the transformer sees: only the layout's tokens are embedded
    dense_map(tokens)                            # (b, d, hf, wf): each fine patch gets the token that covers it
    from_dense(dense, tokens.layout)             # and back, exactly
"""

from msvit.tokens.dense import dense_map, from_dense

__all__ = ["dense_map", "from_dense"]
