"""Execution: three ways to run the same tokens.

    layout = MODES["packed"](gate, grid, num_prefix)   # masked | trimmed | packed: same numbers, other speeds
    y = attend(q, k, v, layout)                         # attention inside each image, Eq. 10
"""

from msvit.execution.attention import attend
from msvit.execution.cells import CELL_MODES
from msvit.execution.layout import MODES, limit_tokens, masked, packed, trimmed

__all__ = ["CELL_MODES", "MODES", "attend", "limit_tokens", "masked", "packed", "trimmed"]
