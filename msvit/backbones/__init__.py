"""Backbones: adapters that run a host's own modules on mixed-scale tokens, one file a host.

    backbone = adapt(vit)              # timm's VisionTransformer or Eva; refused with a sentence otherwise
    tokens = backbone(tokens)          # TokenBatch -> TokenBatch
"""

from torch import nn

from msvit.backbones.base import Backbone
from msvit.backbones.refuse import refusal
from msvit.backbones.timm_eva import TimmEva
from msvit.backbones.timm_vit import TimmViT

ADAPTERS: tuple[type[Backbone], ...] = (TimmViT, TimmEva)


def adapt(host: nn.Module) -> Backbone:
    """Wrap a host model. Its class, its forward and its parameters stay what they were."""
    for adapter in ADAPTERS:
        if adapter.serves(host):
            return adapter(host)
    raise refusal(host)


__all__ = ["ADAPTERS", "Backbone", "adapt"]
