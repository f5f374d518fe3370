"""The encoder of a plain ViT for inference in 16 bits: seven kernels per block, in memory that is allocated once.

    norm, product, attention, product + residual, norm, product + GELU, product + residual

Bias and GELU are computed in the matrix products, and residuals are their accumulators. A product that adds to the
residual has no place for a bias, so biases stay out of the residual: what they have added up to before each norm is a
constant vector (`shifts`), and the norm adds it. Layer scales are multiplied into weights. GELU is cuBLAS's, the tanh
approximation: it differs from the exact one by up to 5e-4, and in a layer's output by less than bfloat16 rounds.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msvit.backbones.blocks import Residual, run_block
from msvit.backbones.timm_vit import TimmViT
from msvit.execution.layout import packed_layout
from msvit.fast.encoders import PlainEncoder, PlainOutput
from msvit.fast.fast_layers import is_plain_norm
from msvit.fast.find_kernels import kernels
from msvit.fast.fused_ops import FusedBlock, FusedOps, Norm, is_plain_block
from msvit.tokens.tokenizer import nan_or_zero
from msvit.types import ScaleGrid, TokenBatch


class PackedIndices(NamedTuple):
    """The layout of a batch: token id and image of each slot, and where images begin."""

    token: Tensor
    image: Tensor
    cu_seqlens: Tensor
    max_len: int
    size: None = None  # of keys, which all count once
    has_inactive: bool = False  # as in Layout

    @staticmethod
    def empty(slots: int, batch: int, max_len: int, device: torch.device) -> "PackedIndices":
        """Allocate the layout of a batch, not yet filled."""
        token, image = (torch.zeros(slots, dtype=torch.long, device=device) for _ in range(2))
        cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        return PackedIndices(token, image, cu_seqlens, max_len)

    def fill(self, mask: Tensor, grid: ScaleGrid, num_prefix: int) -> None:
        """Write the layout of a mask."""
        kernels.pack_indices_into(mask, num_prefix, *grid.cells, grid.k, self.token, self.image, self.cu_seqlens)

    def narrow(self, rows: int) -> "PackedIndices":
        """Return the first `rows` slots, in which all tokens fit."""
        return self._replace(token=self.token[:rows], image=self.image[:rows])

    def clamped(self, rows: int) -> "PackedIndices":
        """Return the first `rows` slots, whether all tokens fit or not: images past the end have no tokens."""
        return self if rows == len(self.token) else self._replace(cu_seqlens=self.cu_seqlens.clamp(max=rows))


class FusedTokens(NamedTuple):
    """Residual sum and layout of packed tokens."""

    x: Tensor
    layout: PackedIndices


class Workspace(FusedOps):
    """Operations in memory for so many slots. Pixels, queries to values, and an MLP's hidden layer share a part."""

    def __init__(self, encoder: "FusedEncoder", like: Tensor, rows: int) -> None:
        """Allocate the memory, of the dtype and on the device of `like`."""
        self.rows, width = rows, encoder.width
        self.shared = like.new_zeros(rows * max(encoder.patch_weight.shape[1], 3 * width, encoder.mlp_width))
        self.x, self.y = like.new_zeros(rows + 1, width), like.new_zeros(rows, width)  # x: see `embed`

    def take(self, rows: int, width: int, like: Tensor | None = None) -> Tensor:
        """Return (rows, width) of the shared memory, which overwrites what was taken before."""
        return self.shared[: rows * width].view(rows, width)

    def take_y(self, x: Tensor) -> Tensor:
        """Return the memory for the output of norm or attention."""
        return self.y[: len(x)]


class FusedTables(NamedTuple):
    """Tensors computed from weights beforehand."""

    start: Tensor  # (ids, d): what tokens start from
    shifts: Tensor  # (2 blocks + 1, d), float32: what biases have added up to before each norm
    proj: list[Tensor | None]  # weights times layer scales, of each block; None without layer scale
    fc2: list[Tensor | None]


class FusedEncoder:
    """A packed encoder in parts: `embed`, `run_blocks`, `finish`, each for the first slots of a `Workspace`."""

    leaves_branch = False  # whether what the last block computed is still to be added to the residual
    workspace_type = Workspace

    def __init__(self, plain: PlainEncoder) -> None:
        self.backbone = plain.backbone
        self.slots, self.tokens = plain.slots, plain.tokens
        blocks = self.backbone.host.blocks
        self.width = blocks[0].attn.proj.out_features
        self.mlp_width = max(block.mlp.fc1.out_features for block in blocks)

    @staticmethod
    def can_fuse(backbone: Any) -> bool:
        """Return whether every block is timm's usual one: LayerNorm, an MLP with the exact GELU, no norm of heads."""
        if type(backbone) is not TimmViT:
            return False
        host = backbone.host
        norms = (host.norm, host.norm_pre)
        plain = all(is_plain_norm(norm) or type(norm) is nn.Identity for norm in norms)
        return plain and type(host.patch_embed.norm) is nn.Identity and all(map(is_plain_block, host.blocks))

    def workspace(self, like: Tensor, rows: int) -> Workspace:
        """Allocate the memory for so many slots, on the device and in the dtype of `like`."""
        return self.workspace_type(self, like, rows)

    @property
    def patch_weight(self) -> Tensor:
        """The weights of the patch embedding, (d, c p p)."""
        return self.backbone.host.patch_embed.proj.weight.flatten(1)

    def tables(self, grid: ScaleGrid) -> FusedTables:
        """Compute token starts, sums of biases and weights times layer scales."""
        start = token_starts(self.backbone, grid)
        total = torch.zeros(self.width, device=start.device)
        shifts, folded = [total], list[Tensor | None]()
        for layer, scale in self.residual_layers():
            if layer.bias is not None:
                total = total + layer.bias.float() * (1 if scale is None else scale.float())
            shifts.append(total)
            folded.append(None if scale is None else layer.weight * scale[:, None])
        return FusedTables(start, torch.stack(shifts), folded[::2], folded[1::2])

    def residual_layers(self) -> list[tuple[Any, Tensor | None]]:
        """Return the layers that add to the residual, in order, and their layer scales."""
        return [
            (layer, getattr(scale, "gamma", None))
            for block in self.backbone.host.blocks
            for layer, scale in ((block.attn.proj, block.ls1), (block.mlp.fc2, block.ls2))
        ]

    def table_sources(self) -> list[Tensor]:
        """Return the weights that `tables` are made of, and anew when one of these is written."""
        sources: list[Tensor | None] = [*start_sources(self.backbone)]
        for layer, scale in self.residual_layers():
            sources += [layer.bias, scale, None if scale is None else layer.weight]
        return [source for source in sources if source is not None]

    def takes_address(self, image: Tensor) -> bool:
        """Return True: images are always read by their address."""
        return True

    def embed(
        self, image: Tensor, address: Tensor | None, indices: PackedIndices, grid: ScaleGrid, mask: Tensor,
        tables: FusedTables, workspace: Workspace, rows: int,
    ) -> None:  # fmt: skip
        """Embed the tokens of the first `rows` slots."""
        pixels, norm = workspace.take(rows, self.patch_weight.shape[1]), self.backbone.host.norm_pre
        embed_into(workspace.x, self.backbone, image, address, indices.narrow(rows), grid, mask, tables.start, pixels)
        if type(norm) is not nn.Identity:
            Norm(norm, torch.zeros_like(tables.shifts[0]))(workspace.x[:rows], workspace.x[:rows])

    def run_blocks(
        self, which: range, indices: PackedIndices, tables: FusedTables, workspace: Workspace, rows: int
    ) -> None:
        """Run the blocks of these indices on the first `rows` slots."""
        branch = workspace.y[:rows] if self.leaves_branch and which.start > 0 else None
        residual = Residual(FusedTokens(workspace.x[:rows], indices.narrow(rows)), branch)
        for index in which:
            residual = run_block(workspace, self.block(index, tables), residual)

    def block(self, index: int, tables: FusedTables) -> FusedBlock:
        """Return the layers of a block with the tables' weights."""
        block, shifts = self.backbone.host.blocks[index], tables.shifts[2 * index :]
        norms = Norm(block.norm1, shifts[0]), Norm(block.norm2, shifts[1])
        return FusedBlock.of(block, *norms, tables.proj[index], tables.fc2[index])

    def finish(
        self, indices: PackedIndices, grid: ScaleGrid, tables: FusedTables, workspace: Workspace, rows: int, head: bool
    ) -> PlainOutput:
        """Run the last norm and, with `head`, the host's head on the first `rows` slots."""
        indices, x, y = indices.narrow(rows), workspace.x[:rows], workspace.y[:rows]
        if self.leaves_branch:
            x.add_(y)
        Norm(self.backbone.host.norm, tables.shifts[-1])(x, y)
        weight = (torch.arange(rows, device=y.device) < indices.cu_seqlens[-1]).float()
        arrays = (indices.token, indices.image, weight, indices.cu_seqlens)
        layout = packed_layout(grid, self.backbone.num_prefix, *arrays, has_padding=True)
        logits = self.backbone.head(TokenBatch(y, layout)) if head else None
        return PlainOutput(logits, y, weight, *indices[:3])


def token_starts(backbone: Any, grid: ScaleGrid) -> Tensor:
    """Return (ids, d): what tokens start from, with the bias of the patch embedding."""
    proj, start = backbone.host.patch_embed.proj, backbone.make_token_table(grid)
    if proj.bias is not None:
        start = start.float()
        start[backbone.num_prefix :] += proj.bias
    return start.to(proj.weight.dtype)


def start_sources(backbone: Any) -> list[Tensor]:
    """Return position embedding, patch embedding's bias and prefix tokens, of which `token_starts` are made."""
    host = backbone.host
    sources = (host.pos_embed, host.patch_embed.proj.bias, *backbone.prefix())
    return [source for source in sources if source is not None]


def embed_into(
    x: Tensor, backbone: Any, image: Tensor, address: Tensor | None, layout: Any, grid: ScaleGrid, mask: Tensor,
    start: Tensor, pixels: Tensor,
) -> None:  # fmt: skip
    """Embed the tokens of the layout in the first rows of x; a row more takes the marks of images past the end."""
    tokens = x[: len(pixels)]
    slots = (layout.image, layout.token, backbone.num_prefix)
    kernels.gather_pixels_into(image, *slots, grid.fine, grid.k, pixels, address)
    torch.index_select(start, 0, layout.token, out=tokens)
    tokens.addmm_(pixels, backbone.host.patch_embed.proj.weight.flatten(1).T)
    marks = nan_or_zero(mask).to(x.dtype)[:, None].expand(-1, x.shape[1])
    x.index_add_(0, layout.cu_seqlens[:-1], marks)
