"""AttentionRecorder: the attention of the class token, block by block. No token is removed.

    recorder = AttentionRecorder()
    model = msvit.convert(vit, gate=msvit.AllFine(coarse=32), reducer=recorder)
    model(image)
    recorder.attention_map()   # (b, hc, wc), sums to 1 over the cells of an image
"""

from typing import Any

import torch
from torch import Tensor

from msvit.reduction.base import Reducer
from msvit.reduction.compact import Rows
from msvit.reduction.evit import class_attention, needs_class_token
from msvit.shapes import Float
from msvit.types import Heads, Layout, TokenBatch


class AttentionRecorder(Reducer):
    """A recorder of the share of the class token's attention that each cell gets, in the later half of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = 0
        self.maps: list[Tensor] = []

    def fit(self, host: Any) -> None:
        needs_class_token("AttentionRecorder", host, "choose another gate loss")
        self.first = len(host.blocks) // 2

    def begin(self, tokens: TokenBatch) -> TokenBatch:
        self.maps.clear()
        return tokens

    def acts_between(self, index: int) -> bool:
        return index >= self.first

    def between(self, index: int, start: Layout, tokens: TokenBatch, heads: Heads) -> TokenBatch:
        rows, grid = Rows(start), start.grid
        attention = rows.collect(class_attention(heads, rows))  # (slots,)
        cells = attention.new_zeros(start.batch, 1 + grid.num_cells)  # prefix tokens are in no cell: -1
        cells.index_put_((start.image.long(), start.cell + 1), attention, accumulate=True)
        self.maps.append(cells[:, 1:].unflatten(1, grid.cells))
        return tokens

    def attention_map(self) -> Float[Tensor, "b hc wc"]:
        """Return the class token's attention in the last forward, a geometric mean over blocks."""
        floor = torch.finfo(torch.float32).tiny
        mean = torch.stack([attention.clamp(min=floor).log() for attention in self.maps]).mean(0).exp()
        return mean / mean.sum((1, 2), keepdim=True)
