"""The tokenizer: (image, layout) -> TokenBatch. Embeds the tokens of the layout, and no others."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from msvit.tokens.patches import active_pixels
from msvit.types import Layout, ScaleGrid, TokenBatch


@runtime_checkable
class Embedding(Protocol):
    """What the tokenizer asks of a host."""

    def project(self, pixels: Tensor) -> Tensor:
        """(n, c p p) -> (n, d): the host's patch embedding."""

    def start(self, grid: ScaleGrid) -> Tensor:
        """(ids, d): what each token starts from: prefix tokens, then the positions of cells and patches."""


def tokenize(
    image: Float[Tensor, "b c h w"], layout: Layout, embedding: Embedding, start: Tensor | None = None
) -> TokenBatch:
    """`start` is the embedding's table of that name, where it was made beforehand."""
    slots = layout.patch_slots
    table = embedding.start(layout.grid) if start is None else start
    x = table[layout.token]  # (slots, d)
    pixels = active_pixels(image, layout.image[slots], layout.token[slots] - layout.num_prefix, layout.grid)
    patches = x[slots] + embedding.project(pixels).to(x.dtype)
    return TokenBatch(x.index_put((slots,), patches), layout)
