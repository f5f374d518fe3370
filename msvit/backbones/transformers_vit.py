"""transformers' ViT, DeiT, DINOv2 (with registers), DINOv3, CLIP and SigLIP.

    model = msvit.convert(ViTForImageClassification.from_pretrained(...))   # model(images).logits
    model = msvit.convert(Dinov2Model.from_pretrained(...))                 # the pooled output in place of logits
    gate, tokens = model.encode(images)
    model.backbone.hidden(tokens)                                           # last_hidden_state, of mixed-scale tokens
"""

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from msvit.backbones.blocks import linear_macs
from msvit.backbones.plain import PlainBackbone
from msvit.backbones.transformers_host import TransformersHost, known_class
from msvit.execution import attend
from msvit.heads.classify import area_mean
from msvit.shapes import Float
from msvit.types import ScaleGrid, TokenBatch


class TransformersViT(PlainBackbone):
    """The adapter of transformers' models. `host` is a `TransformersHost`, `host.model` the model itself."""

    host: TransformersHost
    library = "transformers"

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host if isinstance(host, TransformersHost) else TransformersHost(host))

    @classmethod
    def serves(cls, host: nn.Module) -> bool:
        return isinstance(host, TransformersHost) or known_class(host) is not None

    def _unsupported_reasons(self) -> list[str | None]:
        return []  # those of a TransformersHost are found when it is made

    @property
    def blocks(self) -> nn.Module:
        return self.host.layers

    def prefix(self) -> list[Tensor]:
        return self.host.prefix_tokens

    def positions(self, grid: ScaleGrid) -> Tensor | None:
        return self.host.positions(grid.patches)

    # Rotary positions: DINOv3

    @property
    def draws_positions(self) -> bool:
        rope = self.host.rope
        if rope is None or not rope.training:
            return False
        return any(value is not None for value in augmentation(rope).values())

    def make_rotary(self, grid: ScaleGrid) -> Tensor:
        """Compute sine and cosine; coordinates are centres, from -1 to 1, so the coarse grid's are those of cells."""
        rope, weight = self.host.rope, self.host.patch_embed.proj.weight
        source: Any = sys.modules[type(rope).__module__]
        options = {"dtype": torch.float32, "device": weight.device}
        sizes = (grid.cells, grid.patches)
        centres = torch.cat([source.get_patches_center_coordinates(*size, **options) for size in sizes])  # (ids, 2)
        if rope.training:
            centres = source.augment_patches_center_coordinates(centres, **augmentation(rope))
        angles = (2 * math.pi * centres[:, :, None] * rope.inv_freq).flatten(1).tile(2)  # (ids, head_dim)
        angles = torch.cat([angles.new_zeros(self.num_prefix, angles.shape[1]), angles])  # prefix tokens: not rotated
        return torch.cat([angles.sin(), angles.cos()], -1).to(weight.dtype)

    # From tokens to what the model returns

    hidden = PlainBackbone.features  # last_hidden_state: prefix tokens, then a feature per patch, coarse ones repeated

    def head(self, tokens: TokenBatch, pre_logits: bool = False) -> Any:
        """Return logits of a classifier, else the pooled output (CLIPModel: image features), or None without one."""
        if pre_logits:
            raise ValueError("pre_logits is timm's; for a model of transformers use model.backbone.hidden(tokens)")
        host, model = self.host, self.host.model
        if host.kind == "DeiTForImageClassificationWithTeacher":
            return sum(self.teacher_logits(tokens)) / 2
        if host.is_classifier:
            if host.family in ("clip", "siglip"):
                return model.classifier(area_mean(tokens))
            if host.family in ("vit", "deit"):
                return model.classifier(tokens.prefix[:, 0])
            return model.classifier(torch.cat([tokens.prefix[:, 0], area_mean(tokens)], dim=1))
        if host.family in ("vit", "deit"):
            return None if host.body.pooler is None else host.body.pooler(tokens.prefix)
        if host.family == "siglip":
            return None if host.attention_pooling is None else pool_by_probe(host.attention_pooling, tokens)
        pooled = host.fc_norm(tokens.prefix[:, 0])
        return model.visual_projection(pooled) if hasattr(model, "visual_projection") else pooled

    def teacher_logits(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the logits of class and distillation token of a DeiTForImageClassificationWithTeacher."""
        model, prefix = self.host.model, tokens.prefix
        return model.cls_classifier(prefix[:, 0]), model.distillation_classifier(prefix[:, 1])

    def head_macs(self, total: Tensor) -> Tensor:
        macs = torch.zeros_like(total) + sum(map(linear_macs, self.host.head_layers))
        pool = self.host.attention_pooling
        if pool is None:
            return macs
        width = pool.attention.embed_dim
        return macs + 2 * width**2 + linear_macs(pool.mlp) + total * (2 * width**2 + 2 * width)


def augmentation(rope: Any) -> dict[str, float | None]:
    """Return how DINOv3 changes the coordinates of patches in training, None where it does not."""
    config = rope.config
    return {"shift": config.pos_embed_shift, "jitter": config.pos_embed_jitter, "rescale": config.pos_embed_rescale}


def pool_by_probe(pool: Any, tokens: TokenBatch) -> Float[Tensor, "b d"]:
    """Pool as SigLIP does: attention of one learned query over the tokens of each image."""
    attention, batch = pool.attention, tokens.layout.batch
    width, heads = attention.embed_dim, attention.num_heads
    probe = pool.probe[0].expand(batch, -1)
    weights = attention.in_proj_weight.split([width, 2 * width])
    biases = attention.in_proj_bias.split([width, 2 * width])
    q = nn.functional.linear(probe, weights[0], biases[0])  # (b, d)
    k, v = nn.functional.linear(tokens.x, weights[1], biases[1]).chunk(2, dim=-1)  # (slots, d)
    q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
    y = attention.out_proj(attend(q, k, v, tokens.layout, num_queries=1).flatten(1))
    return y + pool.mlp(pool.layernorm(y))
