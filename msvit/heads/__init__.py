"""Heads: from a TokenBatch to a prediction.

    classify(host, tokens)                        # the host's own head, pooling by covered area where it pools
    MaskDecoder(384, 150)(dense_map(tokens))      # segmentation; LinearDecoder too
"""

from msvit.heads.classify import classify
from msvit.heads.segment import DECODERS, LinearDecoder, MaskDecoder

__all__ = ["DECODERS", "LinearDecoder", "MaskDecoder", "classify"]
