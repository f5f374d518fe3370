"""Tiny models of the same timm classes as the real ones, with weights that make every part matter."""

from collections.abc import Iterable
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import msvit
from msvit.fast.find_kernels import kernels

# What each stands for: class token, two prefix tokens, LayerScale, pre-norm without bias, attention pooling,
# average pooling, registers, rotary positions (two kinds).
HOSTS = (
    "vit_small_patch16_224", "vit_small_patch32_224", "vit_base_patch16_clip_224", "vit_base_patch16_siglip_224",
    "vit_base_patch16_gap_224", "deit_small_patch16_224", "deit_small_distilled_patch16_224",
    "deit3_small_patch16_224", "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224",
    "vit_small_patch16_dinov3",
)  # fmt: skip

# One of each kind that execution has to tell apart: class token, registers, rotary positions, pooling.
KINDS = (
    "vit_small_patch16_224", "vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3",
    "vit_base_patch16_siglip_224", "vit_base_patch16_gap_224",
)  # fmt: skip


def tiny_host(name: str = "vit_small_patch16_224", dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    """Two blocks of width 32, patches of 4 px, 16 px images."""
    settings = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 4, "img_size": 16, "num_classes": 5}
    return copied_host(name, dtype, {**settings, **options})


SWINS = ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256")


def tiny_swin(name: str = SWINS[0], dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    """Four stages, two blocks each so that windows shift, width 16, windows of 4, 64 px images of any size."""
    settings = {
        "embed_dim": 16, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 2, 4), "window_size": 4, "img_size": 64,
        "num_classes": 5, "strict_img_size": False, "drop_path_rate": 0.0,
    }  # fmt: skip
    return copied_host(name, dtype, {**settings, **options})


def copied_host(name: str, dtype: torch.dtype, options: dict[str, object]) -> nn.Module:
    """Copying takes a third of the time of making one."""
    if any(isinstance(value, dict | list) for value in options.values()):
        return seeded_host(name, dtype, options)
    return deepcopy(_host_made_once(name, dtype, **options))


@cache
def _host_made_once(name: str, dtype: torch.dtype, **options: object) -> nn.Module:
    return seeded_host(name, dtype, options)


def seeded_host(name: str, dtype: torch.dtype, options: dict[str, object]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        host = timm.create_model(name, pretrained=False, **options).to(dtype).eval()
        for parameter in host.parameters():  # biases, LayerScale and class token start at 0: give them weight
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64).to(dtype)
    return host


def drawn_by_numpy(module: nn.Module) -> nn.Module:
    """The module with other weights, the same on every machine: PyTorch's random numbers depend on the processor."""
    draw = np.random.default_rng(0)
    for parameter in module.parameters():
        centre = parameter.data.mean().round()  # 1 for the weights of norms
        parameter.data.copy_(centre + 0.1 * torch.from_numpy(draw.standard_normal(parameter.shape)))
    return module


def interpretable() -> bool:
    """Can Triton kernels run here? Without a GPU in the interpreter: that of 3.6 does not work with today's numpy."""
    if kernels is None or torch.cuda.is_available():
        return kernels is not None
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


needs_kernels = pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter has no bfloat16


def interprets() -> bool:
    """Do Triton kernels take tensors on the CPU? With a GPU they do not, and tests marked gpu take their place."""
    return interpretable() and not torch.cuda.is_available()


def tiny_model(
    name: str = HOSTS[0], dtype: torch.dtype = torch.float64, gate: msvit.Gate | None = None, mode: str = "packed",
    reducer: msvit.Reducer | None = None, **options: object,
) -> msvit.MSViT:  # fmt: skip
    """A ViT with cells of 8 px, two by two in its images, or a Swin with cells of 16 px, four by four."""
    host = tiny_swin(name, dtype, **options) if name in SWINS else tiny_host(name, dtype, **options)
    return msvit.convert(host, 16 if name in SWINS else 8, gate or "learned", mode, reducer)


def batch_of(model: nn.Module, num: int = 4) -> tuple[Tensor, Tensor]:
    """Images of the size the host was built for, and their masks, of the model's precision and on its device."""
    weight, (height, width) = model.host.patch_embed.proj.weight, model.host.patch_embed.img_size
    mask = mixed_mask(max(num, 2), height // model.coarse, width // model.coarse, weight.dtype)[:num]
    return images(num, height, width, weight.dtype).to(weight.device), mask.to(weight.device)


def images(batch: int = 3, height: int = 16, width: int = 16, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, 3, height, width, dtype=dtype, generator=torch.Generator().manual_seed(2))


def mixed_mask(batch: int, rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """First image all fine, second all coarse, the others at random."""
    mask = torch.rand(batch, rows, columns, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0], mask[1] = True, False
    return mask.to(dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm() / want.norm()).detach())


class Logits(nn.Module):
    """What can be traced: tensors in, tensors out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        return self.model(image).logits


def gradients(logits: Tensor, *of: nn.Module | Tensor) -> list[Tensor | None]:
    """Of the sum of squares, by these tensors and all parameters of these modules; None where they have no part."""
    sources = [t for each in of for t in ([each] if isinstance(each, Tensor) else each.parameters())]
    return list(torch.autograd.grad(logits.square().sum(), sources, retain_graph=True, allow_unused=True))


def assert_same(got: Iterable[Tensor | None], want: Iterable[Tensor | None], bound: float = 1e-9) -> None:
    """Tensor by tensor, up to a relative error; None where the other is None."""
    for place, (mine, other) in enumerate(zip(got, want, strict=True)):
        assert (mine is None) == (other is None), place
        if mine is not None and other is not None:
            assert (mine - other).norm() <= bound * other.norm(), f"tensor {place}: {relative_error(mine, other)}"


def assert_same_output(got: msvit.MSViTOutput, want: msvit.MSViTOutput, bound: float = 1e-9) -> None:
    """Logits, the map of features, decisions, and how many tokens there are."""
    assert_same(*([out.logits, msvit.dense_map(out.tokens)] for out in (got, want)), bound)
    assert torch.equal(got.gate.mask, want.gate.mask)
    assert torch.equal(got.tokens.count, want.tokens.count)
