"""The tokenizer: (image, layout) -> TokenBatch. Embeds the tokens of the layout, and no others."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from msvit.checks import is_vmapped
from msvit.execution.layout import take_rows
from msvit.shapes import Float
from msvit.tokens.patches import active_pixels
from msvit.types import Layout, TokenBatch, unchecked


def tokenize(
    image: Float[Tensor, "b c h w"],
    layout: Layout,
    backbone: Any,
    table: Tensor | None = None,
    mask: Float[Tensor, "b hc wc"] | None = None,
) -> TokenBatch:
    """Embed the tokens of the layout. `table`: the backbone's `token_table`, if computed already.

    `mask`: the gate's decisions, read for NaN only: an image with a NaN decision gets NaN in its first token, which
    attention spreads to all others.
    """
    grid = layout.grid
    table = backbone.token_table(grid) if table is None else table
    return embed(layout, backbone, table, mask, lambda which, patch: active_pixels(image, which, patch, grid))


def embed(
    layout: Layout,
    backbone: Any,
    table: Tensor,
    mask: Float[Tensor, "b hc wc"] | None,
    pixels_of: Callable[[Tensor, Tensor], Tensor],
) -> TokenBatch:
    """Embed the tokens of the layout, whose pixels `pixels_of(which, patch)` returns as `active_pixels` does."""
    x = take_rows(table, layout.token)  # (slots, d)
    if mask is not None:
        marks = nan_or_zero(mask).to(x.dtype)[:, None].expand(-1, x.shape[1])
        add = x.index_add if is_vmapped(mask) else x.index_add_
        x = add(0, layout.cu_seqlens[:-1], marks)
    if not layout.num_prefix:
        pixels = pixels_of(layout.image, layout.token)
        return unchecked(TokenBatch, x=x + backbone.project(pixels).to(x.dtype), layout=layout, kept=())
    slots = layout.patch_slots
    pixels = pixels_of(layout.image[slots], layout.token[slots] - layout.num_prefix)
    patches = x[slots] + backbone.project(pixels).to(x.dtype)
    return unchecked(TokenBatch, x=x.index_put((slots,), patches), layout=layout, kept=())


def nan_or_zero(mask: Float[Tensor, "b hc wc"]) -> Float[Tensor, " b"]:
    """Return NaN for images with a NaN decision, 0 for the others: added to a token it marks the whole image."""
    return 0 * mask.detach().flatten(1).mean(1)
