"""The modules that are exported: a model's gate and its trunk, from tensors to tensors, in shapes without guards.

    gate, trunk = GateGraph(model, grid, max_tokens), TrunkGraph(model, grid, batch, max_tokens, features=False)
    gate(images)                   # {"scores", "mask"}
    trunk(images, mask)            # {"logits", "tokens"}
    WholeGraph(gate, trunk)(images)  # {"logits", "mask", "tokens"}

`model` is a copy on the CPU in float32 and eval mode. Tables that follow from weights are buffers here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.execution import export_layout
from msvit.execution.export_layout import ExportLayout, ranks
from msvit.gates import AllCoarse, AllFine, DiscGate, Gate, LogitGate
from msvit.gates.fixed import ScoreGate
from msvit.reduction import Reducer, ToMe
from msvit.reduction.tome import num_unmerged
from msvit.segmenter import Segmenter
from msvit.shapes import Bool, Float, Int
from msvit.tokens import dense_map
from msvit.tokens.patches import patch_pixels
from msvit.types import Heads, Layout, ScaleGrid, TokenBatch, changed

Named = dict[str, Tensor]
FIXED = (AllFine, AllCoarse, DiscGate)  # gates that decide the same for every image
CHANNELS = 4  # onnxruntime's WebGPU backend computes convolutions of 33 channels wrongly, of 36 rightly
IMAGE_CHANNELS = 3  # up to here it has a kernel of its own


class GateGraph(nn.Module):
    """The gate: images -> the score of each cell, positive where it is fine, and the mask."""

    fixed: Tensor | None  # (1, hc, wc): scores of gates that decide the same for every image

    gate: Any

    def __init__(self, model: Any, grid: ScaleGrid, max_tokens: int | None) -> None:
        super().__init__()
        self.gate = pad_conv_channels(model.gate)
        self.grid = grid
        image = torch.zeros(1, model.backbone.in_chans, grid.height, grid.width)
        fixed = margins(self.gate, image) if isinstance(self.gate, FIXED) else None
        self.register_buffer("fixed", fixed)
        self.max_fine = num_fine_cells(model.backbone, grid, max_tokens)

    def forward(self, images: Tensor) -> Named:
        images = pad_to_cells(images, self.grid)
        fixed = self.fixed
        scores = margins(self.gate, images) if fixed is None else fixed.expand(images.shape[0], -1, -1)
        return {"scores": scores, "mask": limit_fine(scores > 0, scores, self.max_fine)}


class TrunkGraph(nn.Module):
    """The model after the gate: images, mask -> logits, or features, and the tokens of each image without prefix."""

    model: Any
    backbone: Any
    table: Tensor  # (ids, d)
    rotary: Tensor | None

    def __init__(
        self, model: Any, grid: ScaleGrid, batch: int | None, max_tokens: int | None, features: bool
    ) -> None:
        super().__init__()
        self.model, self.backbone, self.grid, self.features = model, model.backbone, grid, features
        self.merging = None if model.reducer is None else RowMerging(model.reducer)
        self.layout = choose_layout(model, batch, max_tokens)
        self.max_fine = num_fine_cells(model.backbone, grid, max_tokens)
        rotary = self.backbone.rotary(grid)
        self.register_buffer("table", self.backbone.token_table(grid).detach().clone())
        self.register_buffer("rotary", None if rotary is None else rotary.detach().clone())

    def forward(self, images: Tensor, mask: Bool[Tensor, "b hc wc"]) -> Named:
        padded = pad_to_cells(images, self.grid)
        layout = self.layout(limit_fine(mask, mask.float(), self.max_fine), self.grid, self.backbone.num_prefix)
        tokens = self.backbone(self.embed(padded, layout), rotary=self.rotary, reducer=self.merging)
        return {**self.head(tokens, images), "tokens": tokens.layout.count}

    def embed(self, images: Tensor, layout: ExportLayout) -> TokenBatch:
        """Embed tokens as `msvit.tokens.tokenize` does, without a scatter; the rows of prefix tokens are not used."""
        grid, num_prefix = self.grid, layout.num_prefix
        pixels = patch_pixels(images, grid).flatten(0, 1)  # (b ids, pixels)
        patch = (layout.token - num_prefix).clamp(min=0) + layout.image * grid.num_ids
        x = self.backbone.project(pixels.index_select(0, patch))
        x = x if not num_prefix else torch.where((layout.token >= num_prefix)[:, None], x, 0.0)
        return TokenBatch(self.table.index_select(0, layout.token) + x, layout)

    def head(self, tokens: TokenBatch, images: Tensor) -> Named:
        """Return "logits", or "features" (b, d, hf, wf) and, if the host has prefix tokens, "prefix" (b, p, d)."""
        segments = isinstance(self.model, Segmenter)
        tokens = tokens.with_x(self.model.norm(tokens.x)) if segments else tokens
        if self.features:
            return {"features": dense_map(tokens), **({"prefix": tokens.prefix} if tokens.layout.num_prefix else {})}
        if not segments:
            if (logits := self.backbone.head(tokens)) is None:
                raise ValueError("the model has neither logits nor a pooled output; pass features=True")
            return {"logits": logits}
        logits = self.model.decoder(dense_map(tokens))
        size = (self.grid.height, self.grid.width)
        logits = F.interpolate(logits, size=size, mode="bilinear", align_corners=False)
        return {"logits": logits[:, :, : images.shape[2], : images.shape[3]]}


class WholeGraph(nn.Module):
    """The whole model: images -> logits, or features, the mask and the number of tokens."""

    def __init__(self, gate: GateGraph, trunk: TrunkGraph) -> None:
        super().__init__()
        self.gate, self.trunk = gate, trunk

    def forward(self, images: Tensor) -> Named:
        mask = self.gate(images)["mask"]
        outputs = self.trunk(images, mask)
        tokens = outputs.pop("tokens")
        return {**outputs, "mask": mask, "tokens": tokens}


def choose_layout(model: Any, batch: int | None, max_tokens: int | None) -> Callable[..., ExportLayout]:
    """Return the function that makes layouts in the model's mode; `batch` is None if it may be any."""
    if model.reducer is not None:
        return export_layout.fine_rows
    if max_tokens is not None:
        return partial(export_layout.fixed_rows, length=max_tokens)
    if model.mode == "masked":
        raise ValueError(
            "mode 'masked' runs every token there could be, so that its file would be slower than the dense host's; "
            "export model.with_options(mode='packed'), or pass max_tokens_per_image= for static shapes"
        )
    if batch == 1:
        return export_layout.packed_one
    return export_layout.packed_rows if model.mode == "packed" else export_layout.padded_rows


def pad_to_cells(images: Tensor, grid: ScaleGrid) -> Tensor:
    """Pad with zeros to the right and below, as `Segmenter.pad` does."""
    height, width = grid.height - images.shape[2], grid.width - images.shape[3]
    return F.pad(images, (0, width, 0, height)) if height or width else images


def margins(gate: Gate, images: Tensor) -> Float[Tensor, "b hc wc"]:
    """Return each cell's margin, positive where it is fine: logit minus threshold, or how much a share may shrink."""
    if isinstance(gate, LogitGate):
        return gate(images).logits - gate._threshold
    threshold, share = (gate.config.get(name) for name in ("threshold", "share"))
    if isinstance(gate, ScoreGate) and threshold is not None:
        return gate.scores(images) - threshold
    if isinstance(gate, ScoreGate) and share is not None:
        scores = gate.scores(images)
        num_cells = scores.shape[1] * scores.shape[2]
        return (round(share * num_cells) - 0.5 - ranks(scores)) / num_cells
    return gate(images).mask - 0.5


def limit_fine(mask: Bool[Tensor, "b hc wc"], scores: Float[Tensor, "b hc wc"], max_fine: int | None) -> Tensor:
    """Limit each image to `max_fine` fine cells, those with the highest scores."""
    return mask if max_fine is None else mask & (ranks(scores) < max_fine)


def num_fine_cells(backbone: Any, grid: ScaleGrid, max_tokens: int | None) -> int | None:
    """Return how many cells of an image can be fine with so many tokens, prefix included; None: any number."""
    name, num_prefix = "max_tokens_per_image", backbone.num_prefix
    return None if max_tokens is None else backbone.num_fine(max_tokens, grid, name, num_prefix)


def pad_conv_channels(module: Any, multiple: int = CHANNELS) -> Any:
    """Pad the convolutions of a module by zeros to a multiple of channels, in place; return it."""
    for name, child in module.named_children():
        if type(child) is nn.Conv2d and child.groups == 1 and child.in_channels > IMAGE_CHANNELS:
            extra = -child.in_channels % multiple
            setattr(module, name, PaddedConv(child, extra) if extra else child)
        else:
            pad_conv_channels(child, multiple)
    return module


class PaddedConv(nn.Module):
    """A convolution with `extra` more channels, whose input and weights are 0."""

    def __init__(self, conv: nn.Conv2d, extra: int) -> None:
        super().__init__()
        self.stride, self.padding, self.dilation, self.extra = conv.stride, conv.padding, conv.dilation, extra
        self.weight = nn.Parameter(F.pad(conv.weight.detach(), (0, 0, 0, 0, 0, extra)), requires_grad=False)
        self.bias = conv.bias

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x with channels of zeros in addition."""
        x = F.pad(x, (0, 0, 0, 0, 0, self.extra))
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation)


class RowMerging(Reducer):
    """The merging of a `ToMe`, for rows of tokens that are all active: static shapes, no scatter, the same numbers."""

    can_be_traced = True

    def __init__(self, tome: ToMe) -> None:
        super().__init__()
        self.tome = tome

    def begin(self, tokens: TokenBatch) -> TokenBatch:
        """Count each token once; every patch has a token of its own."""
        layout = tokens.layout
        first = torch.arange(layout.batch)[:, None] * layout.max_len
        owner = first + torch.arange(layout.num_prefix, layout.max_len)
        return changed(tokens, layout=changed(layout, size=torch.ones_like(layout.weight), patch_to_slot=owner))

    def acts_between(self, index: int) -> bool:
        return self.tome.acts_between(index)

    def between(self, index: int, start: Layout, tokens: TokenBatch, heads: Heads) -> TokenBatch:
        count = tokens.layout.max_len - tokens.layout.num_prefix
        num_merged = count - num_unmerged(count, self.tome.num_merged(index), self.tome.rate)
        return merge_rows(tokens, heads.k, num_merged) if num_merged else tokens


def merge_rows(tokens: TokenBatch, keys: Float[Tensor, "slots heads head_dim"], num_merged: int) -> TokenBatch:
    """Merge the `num_merged` most similar pairs of each image to their means by area."""
    layout = tokens.layout
    assert isinstance(layout, ExportLayout)
    assert layout.size is not None, "begin gives sizes"
    batch, length, prefix = layout.batch, layout.max_len, layout.num_prefix
    first = list(range(prefix + prefix % 2, length, 2))  # even places, as in `bipartite_matching`
    second = list(range(prefix + 1 - prefix % 2, length, 2))
    even, odd = slice(first[0], None, 2), slice(second[0], None, 2)
    num_kept = len(first) - num_merged

    metric = F.normalize(keys.mean(1), dim=-1).reshape(batch, length, -1)
    best, partner = (metric[:, even] @ metric[:, odd].transpose(1, 2)).max(2)  # (b, even)
    merged = ranks(best) < num_merged
    leaves = merged[:, None] & (partner[:, None] == torch.arange(len(second))[:, None])  # (b, odd, even)
    added = leaves.to(tokens.x.dtype)
    order = torch.where(merged, 0, len(first)) - torch.arange(len(first))  # those that stay, by place: no ties
    kept = order.float().topk(num_kept, dim=1).indices  # (b, num_kept)

    x, size, token = (t.reshape(batch, length, -1) for t in (tokens.x, layout.size, layout.token))
    weighted = x * size
    total = size[:, odd] + added @ size[:, even]
    mean = (weighted[:, odd] + added @ weighted[:, even]) / total
    new_x, new_size, new_token = (
        torch.cat([t[:, :prefix], take(t[:, even], kept), new], dim=1).flatten(0, 1)
        for t, new in ((x, mean), (size, total), (token, token[:, odd]))
    )

    stay = prefix + (~merged).long().cumsum(1) - 1
    place = torch.where(merged, prefix + num_kept + partner, stay)  # (b, even): where each token is now
    fixed = torch.arange(prefix), prefix + num_kept + torch.arange(len(second))
    places = torch.cat([fixed[0].expand(batch, -1), place, fixed[1].expand(batch, -1)], dim=1)
    listed = [*range(prefix), *first, *second]
    places = places[:, torch.tensor([listed.index(each) for each in range(length)])]
    image, new_length = torch.arange(batch), length - num_merged
    assert layout.patch_to_slot is not None, "begin gives owners"
    smaller = changed(
        layout,
        token=new_token[:, 0],
        image=image[:, None].expand(batch, new_length).flatten(),
        weight=torch.ones_like(new_size[:, 0]),
        cu_seqlens=torch.arange(batch + 1) * new_length,
        max_len=new_length,
        size=new_size[:, 0],
        patch_to_slot=(places + image[:, None] * new_length).flatten()[layout.patch_to_slot],
    )
    return changed(tokens, x=new_x, layout=smaller)


def take(rows: Float[Tensor, "b n d"], index: Int[Tensor, "b m"]) -> Float[Tensor, "b m d"]:
    """Return rows of each image by index."""
    first = torch.arange(index.shape[0])[:, None] * rows.shape[1]  # of each image
    return rows.flatten(0, 1).index_select(0, (first + index).flatten()).unflatten(0, index.shape)
