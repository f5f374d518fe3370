"""Tiny models of the same timm classes as the real ones, with weights that make every part matter."""

import timm
import torch
from torch import Tensor, nn

from msvit.execution.fused import kernels

# What each stands for: class token, two prefix tokens, LayerScale, pre-norm without bias, attention pooling,
# average pooling, registers, rotary positions (two kinds).
HOSTS = (
    "vit_small_patch16_224",
    "vit_small_patch32_224",
    "vit_base_patch16_clip_224",
    "vit_base_patch16_siglip_224",
    "vit_base_patch16_gap_224",
    "deit_small_patch16_224",
    "deit_small_distilled_patch16_224",
    "deit3_small_patch16_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "eva02_tiny_patch14_224",
    "vit_small_patch16_dinov3",
)

# One of each kind that execution has to tell apart: class token, registers, rotary positions, pooling.
KINDS = (
    "vit_small_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "eva02_tiny_patch14_224",
    "vit_small_patch16_dinov3",
    "vit_base_patch16_siglip_224",
    "vit_base_patch16_gap_224",
)


def tiny_host(name: str = "vit_small_patch16_224", dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    """Two blocks of width 32, patches of 4 px, 16 px images."""
    settings = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 4, "img_size": 16, "num_classes": 5}
    return seeded_host(name, dtype, {**settings, **options})


SWINS = ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256")


def tiny_swin(name: str = SWINS[0], dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    """Four stages, two blocks each so that windows shift, width 16, windows of 4, 64 px images of any size."""
    settings = {
        "embed_dim": 16, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 2, 4), "window_size": 4, "img_size": 64,
        "num_classes": 5, "strict_img_size": False, "drop_path_rate": 0.0,
    }  # fmt: skip
    return seeded_host(name, dtype, {**settings, **options})


def seeded_host(name: str, dtype: torch.dtype, options: dict[str, object]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        host = timm.create_model(name, pretrained=False, **options).to(dtype).eval()
        for parameter in host.parameters():  # biases, LayerScale and class token start at 0: give them weight
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64).to(dtype)
    return host


def interpretable() -> bool:
    """Can Triton kernels run here? Without a GPU in the interpreter: that of 3.6 does not work with today's numpy."""
    if kernels is None or torch.cuda.is_available():
        return kernels is not None
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


def images(batch: int = 3, height: int = 16, width: int = 16, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, 3, height, width, dtype=dtype, generator=torch.Generator().manual_seed(2))


def mixed_mask(batch: int, rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """First image all fine, second all coarse, the others at random."""
    mask = torch.rand(batch, rows, columns, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0], mask[1] = True, False
    return mask.to(dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm() / want.norm()).detach())
