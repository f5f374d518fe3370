"""Heads: from a TokenBatch to a prediction.

    classify(host, tokens)      # the host's own head, pooling by covered area where it pools
"""

from msvit.heads.classify import classify

__all__ = ["classify"]
