"""Backbones: adapters that run a host's own modules on mixed-scale tokens, one file per kind of host.

    backbone = adapt(vit)                # timm's VisionTransformer or Eva; ValueError for others
    backbone = adapt(hf_vit)             # transformers' ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP
    backbone = adapt(swin, merge_at=3)   # Swin or SwinV2, whose coarse tokens enter at the third stage
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from msvit.backbones.base import Backbone, refusal


def adapters() -> Iterator[Any]:
    """Yield the classes of adapters; each is imported only if those before it cannot run the host."""
    from msvit.backbones.timm_vit import TimmEva, TimmViT
    yield from (TimmViT, TimmEva)
    from msvit.swin.backbone import TimmSwin
    yield TimmSwin
    from msvit.backbones.transformers_vit import TransformersViT
    yield TransformersViT


def adapt(host: nn.Module, merge_at: int | None = None) -> Backbone:
    """Wrap a host model. Its class, its forward and its parameters stay what they were."""
    adapter = next((adapter for adapter in adapters() if adapter.serves(host)), None)
    if adapter is None:
        raise refusal(host)
    if adapter.is_hierarchical:
        return adapter(host, merge_at)
    if merge_at is not None:
        raise ValueError(
            f"merge_at is {merge_at}, but a {type(host).__name__} has one scale and nothing is merged; "
            f"leave merge_at out, or convert a Swin"
        )
    return adapter(host)


__all__ = ["Backbone", "adapt"]
