"""The tokenizer: (image, layout) -> TokenBatch. Embeds the tokens of the layout, and no others."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from msvit.tokens.patches import patch_pixels
from msvit.types import Layout, ScaleGrid, TokenBatch


@runtime_checkable
class Embedding(Protocol):
    """What the tokenizer asks of a host."""

    def project(self, pixels: Tensor) -> Tensor:
        """(n, c p p) -> (n, d): the host's patch embedding."""

    def start(self, grid: ScaleGrid) -> Tensor:
        """(ids, d): what each token starts from: prefix tokens, then the positions of cells and patches."""


def tokenize(image: Float[Tensor, "b c h w"], layout: Layout, embedding: Embedding) -> TokenBatch:
    slots = layout.patch_slots
    pixels = patch_pixels(image, layout.grid)[layout.image[slots], layout.token[slots] - layout.num_prefix]
    x = embedding.start(layout.grid)[layout.token]  # (slots, d)
    return TokenBatch(x.index_add(0, slots, embedding.project(pixels).to(x.dtype)), layout)
