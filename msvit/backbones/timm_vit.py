"""timm's VisionTransformer: ViT, DeiT (distilled too), DeiT III, CLIP, SigLIP, DINOv2 with and without registers."""

from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from msvit.backbones.base import keeps_forward_of
from msvit.backbones.plain import PlainBackbone


class TimmViT(PlainBackbone):
    """The adapter of timm's VisionTransformer."""

    @classmethod
    def serves(cls, host: nn.Module) -> bool:
        return keeps_forward_of(host, VisionTransformer) or keeps_forward_of(host, VisionTransformerDistilled)

    def prefix(self) -> list[Tensor]:
        names = ("cls_token", "dist_token", "reg_token")
        return [token for name in names if (token := getattr(self.host, name, None)) is not None]
