"""Hosts that cannot be converted, and the part that is in the way."""

from torch import nn


def unsupported(host: nn.Module, part: str) -> ValueError:
    """Return the error for a host that cannot be converted because of this part."""
    return ValueError(
        f"{type(host).__name__} of {type(host).__module__} cannot be converted: {part}. Hosts that can are timm's "
        f"VisionTransformer (ViT, DeiT, DeiT III, CLIP, SigLIP, DINOv2), Eva (EVA-02, DINOv3), Swin and SwinV2, with "
        f"square patches, and ViT, DeiT, Dinov2, Dinov2WithRegisters, DINOv3ViT, CLIP and Siglip of transformers"
    )


def refusal(host: nn.Module) -> ValueError:
    """Return the error that names what makes an unknown host unfit for tokens of mixed scale."""
    if not isinstance(host, nn.Module):
        return ValueError(
            f"the host is a {type(host).__name__}, not a model; pass what timm.create_model returns, "
            f"or a model of transformers"
        )
    for name in ("_orig_mod", "module"):  # of torch.compile, DataParallel and the like
        if isinstance(getattr(host, name, None), nn.Module):
            return ValueError(f"the host is wrapped in a {type(host).__name__}; pass the model inside: host.{name}")
    for name, _ in [*host.named_parameters(), *host.named_buffers()]:
        if "relative_position" in name or "rel_pos" in name:
            return unsupported(host, f"relative position bias ({name}) ties attention to a regular grid")
    for name, module in host.named_modules():
        if getattr(module, "rel_pos", None) is not None:
            return unsupported(host, f"relative position bias ({name}.rel_pos) ties attention to a regular grid")
        if getattr(module, "window_size", None):
            where = name or type(host).__name__
            return unsupported(host, f"its attention in windows ({where}) is of an unsupported kind")
    for name, module in host.named_modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size != module.stride:
            return unsupported(host, f"its convolutional stem ({name}) mixes neighbouring patches")
    return unsupported(host, "its forward is not one that is supported")
