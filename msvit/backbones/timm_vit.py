"""timm's VisionTransformer (ViT, DeiT, DeiT III, CLIP, SigLIP, DINOv2), and its Eva with rotary positions.

Eva is the class of EVA-02 and DINOv3.
"""

import torch
from timm.layers import build_rotary_pos_embed
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, freq_bands
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from msvit.backbones.base import keeps_forward_of
from msvit.backbones.plain import PlainBackbone
from msvit.types import ScaleGrid


class TimmViT(PlainBackbone):
    """The adapter of timm's VisionTransformer."""

    @classmethod
    def serves(cls, host: nn.Module) -> bool:
        return keeps_forward_of(host, VisionTransformer) or keeps_forward_of(host, VisionTransformerDistilled)

    def prefix(self) -> list[Tensor]:
        names = ("cls_token", "dist_token", "reg_token")
        return [token for name in names if (token := getattr(self.host, name, None)) is not None]


class TimmEva(PlainBackbone):
    """The adapter of timm's Eva."""

    def _unsupported_reasons(self) -> list[str | None]:
        return [*super()._unsupported_reasons(), unsupported_rotary(self.host.rope)]

    @classmethod
    def serves(cls, host: nn.Module) -> bool:
        return keeps_forward_of(host, Eva)

    def prefix(self) -> list[Tensor]:
        return [token for token in (self.host.cls_token, self.host.reg_token) if token is not None]

    def make_rotary(self, grid: ScaleGrid) -> Tensor:
        fine, coarse = rotary_tables(self.host.rope, grid)
        unrotated = torch.zeros(self.num_prefix, fine.shape[1], dtype=fine.dtype, device=fine.device)
        unrotated[:, fine.shape[1] // 2 :] = 1  # sine 0, cosine 1: prefix tokens are not rotated
        return torch.cat([unrotated, coarse, fine])


def rotary_tables(rope: nn.Module, grid: ScaleGrid) -> tuple[Tensor, Tensor]:
    """Return sine and cosine for fine patches and for the centres of cells, by timm's own formulas."""
    if isinstance(rope, RotaryEmbeddingDinoV3):
        # Coordinates are normalised centres, so the coarse grid's are the centres of the cells.
        return rope.get_embed(list(grid.patches)), rope.get_embed(list(grid.cells))
    assert isinstance(rope, RotaryEmbeddingCat)
    options = {"rotate_half": True} if getattr(rope, "rotate_half", False) else {}
    if rope.bands is not None:
        bands = rope.bands
    else:  # built for one size: what dynamic_img_size=True would have kept
        bands = freq_bands(rope.dim // 4, temperature=rope.temperature, step=1).to(rope.pos_embed)

    def table(shape: tuple[int, int], offset: float, reference: list[int]) -> Tensor:
        sine_cosine = build_rotary_pos_embed(
            list(shape), bands, in_pixels=False, ref_feat_shape=reference, grid_offset=offset,
            grid_indexing=rope.grid_indexing, device=bands.device, dtype=bands.dtype, **options,
        )  # fmt: skip
        return torch.cat(sine_cosine, -1)

    # A place is (index + offset) / size * reference. The centre of cell i lies at fine index k i + (k - 1) / 2.
    reference = list(rope.ref_feat_shape or grid.patches)
    native = rope.pos_embed is not None and tuple(rope.feat_shape) == grid.patches
    fine = rope.get_embed() if native else table(grid.patches, rope.grid_offset, reference)
    return fine, table(grid.cells, (rope.grid_offset + (grid.k - 1) / 2) / grid.k, reference)


def unsupported_rotary(rope: nn.Module | None) -> str | None:
    """Return why rotary positions cannot be computed between patches, or None."""
    if rope is None:
        return None
    if isinstance(rope, RotaryEmbeddingCat) and not rope.in_pixels:
        return None
    if isinstance(rope, RotaryEmbeddingDinoV3) and not rope.aug_active and not getattr(rope, "grid_offset", 0):
        return None
    return f"its rotary positions ({type(rope).__name__} with these options) have no known value between patches"
