"""The fused encoder with qkv, fc1 and fc2 in FP8 (e4m3), for inference in bfloat16: eight kernels per block.

    residual + norm, product, attention, product + residual, norm, product, GELU, product

A product multiplies rows of tokens by rows of weights (output channels), each with a scale of its own, so the kernel
before it writes the tokens in FP8 with their scales. Such a product cannot add to the residual: fc2 writes to `y`, and
the next block's first norm adds that to the residual. proj stays in 16 bits, as it is small, and adds to the residual.
All else, biases and layer scales too, is as in `fused_encoder.py`.

Weights in FP8 are copies, made when a batch size is run for the first time and again when weights have changed.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msvit.backbones.blocks import Residual
from msvit.execution.attention import choose_backend
from msvit.fast.encoders import PlainEncoder
from msvit.fast.find_kernels import kernels
from msvit.fast.fused_encoder import FusedEncoder, FusedTables, Workspace
from msvit.fast.fused_ops import FusedBlock, Linear, Norm, attend
from msvit.fast.plan import autocast_dtype
from msvit.types import Heads, ScaleGrid

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0  # the largest number of FP8
MIN_SCALE = 1e-12  # of a row of zeros
MIN_CAPABILITY = (8, 9)  # of devices with FP8 products
ALIGN = 16  # widths that a product in FP8 takes are multiples of it


class Fp8Rows(NamedTuple):
    """Rows in FP8, each with a scale: they represent value * scale."""

    value: Tensor  # (rows, d)
    scale: Tensor  # (rows, 1), float32


def quantize_rows(rows: Tensor) -> Fp8Rows:
    """Quantize a weight (rows, d) to FP8, each row with its own scale. A row with NaN or Inf becomes NaN."""
    scale = rows.abs().amax(1, keepdim=True).div(MAX_FP8).clamp(min=MIN_SCALE)
    return Fp8Rows((rows / scale).to(FP8), scale)


def multiply_fp8(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, out: Tensor) -> Tensor:
    """Compute out = x @ weight.T + bias, for x (rows, in), weight (out, in) and out (rows, out) in bfloat16."""
    scales = (x.scale, weight.scale.T)
    return torch._scaled_mm(
        x.value, weight.value.T, *scales, bias=bias, out_dtype=out.dtype, use_fast_accum=True, out=out
    )


class Fp8Workspace(Workspace):
    """Operations and memory of a block in FP8, with one buffer for all inputs; the next norm adds the MLP's branch."""

    def __init__(self, encoder: FusedEncoder, like: Tensor, rows: int) -> None:
        super().__init__(encoder, like, rows)
        self.fp8 = torch.zeros(rows * max(encoder.width, encoder.mlp_width), dtype=FP8, device=like.device)
        self.scale = torch.zeros(rows, 1, device=like.device)

    def take_fp8(self, rows: int, width: int) -> Fp8Rows:
        """Return memory for rows in FP8, which earlier ones share."""
        return Fp8Rows(self.fp8[: rows * width].view(rows, width), self.scale[:rows])

    def add_norm(self, residual: Residual, norm: Norm) -> tuple[Residual, Fp8Rows]:
        """Add the branch to the residual, and return the norm of it in FP8."""
        tokens, branch = residual
        y = self.take_fp8(*tokens.x.shape)
        kernels.normalize_fp8_into(tokens.x, branch, norm.shift, *norm.weights, *y)
        return Residual(tokens), y

    def attention(self, block: FusedBlock, residual: Residual, y: Fp8Rows) -> tuple[Residual, Heads]:
        """Add attention, with qkv in FP8, to the residual."""
        return residual, attend(block, residual, self.project(block.qkv, y), self.take_y(y.value))

    def mlp(self, block: FusedBlock, residual: Residual, y: Fp8Rows) -> Residual:
        """Return the residual with the MLP, in FP8, as its branch."""
        hidden = self.project(block.fc1, y)
        active = self.take_fp8(*hidden.shape)
        kernels.gelu_fp8_into(hidden, *active)
        return Residual(residual.tokens, multiply_fp8(active, block.fc2, None, self.take_y(hidden)))

    def project(self, layer: Linear, y: Fp8Rows) -> Tensor:
        """Return the output of a layer in FP8, in shared memory."""
        return multiply_fp8(y, layer.weight, layer.bias, self.take(len(y.value), len(layer.weight.value)))


class Fp8Encoder(FusedEncoder):
    """`FusedEncoder` with most linear layers in FP8."""

    leaves_branch = True

    def __init__(self, plain: PlainEncoder) -> None:
        super().__init__(plain)
        self.weights: list[Fp8Rows] = []  # of qkv, fc1 and fc2 of each block, read by the graphs of all batch sizes

    @staticmethod
    def can_fuse(backbone: Any) -> bool:
        return FusedEncoder.can_fuse(backbone) and not unaligned_widths(backbone)

    def workspace(self, like: Tensor, rows: int) -> Fp8Workspace:
        return Fp8Workspace(self, like, rows)

    def fp8_layers(self) -> list[tuple[Any, Tensor | None]]:
        """Return the layers in FP8, and the layer scales that are multiplied into their weights."""
        scales = [scale for _, scale in self.residual_layers()[1::2]]  # of fc2
        return [
            pair
            for block, scale in zip(self.backbone.host.blocks, scales, strict=True)
            for pair in ((block.attn.qkv, None), (block.mlp.fc1, None), (block.mlp.fc2, scale))
        ]

    def tables(self, grid: ScaleGrid) -> FusedTables:
        """Compute all tables but fc2's weights; the weights in FP8 are computed anew, in the same memory."""
        tables, layers = super().tables(grid), self.fp8_layers()
        before: list[Any] = self.weights or [None] * len(layers)
        self.weights = [requantize(old, *pair) for old, pair in zip(before, layers, strict=True)]
        return tables._replace(fc2=[None] * len(tables.fc2))

    def table_sources(self) -> list[Tensor]:
        return [*super().table_sources(), *(layer.weight for layer, _ in self.fp8_layers())]

    def block(self, index: int, tables: FusedTables) -> FusedBlock:
        """Return the layers of a block, of which qkv, fc1 and fc2 are in FP8."""
        block, (qkv, fc1, fc2) = super().block(index, tables), self.weights[3 * index :][:3]
        return block._replace(qkv=Linear(qkv, block.qkv.bias), fc1=Linear(fc1, block.fc1.bias), fc2=fc2)


def requantize(old: Fp8Rows | None, layer: Any, scale: Tensor | None) -> Fp8Rows:
    """Return a layer's weight in FP8, in the memory of the old one if it fits."""
    weight = layer.weight.float() if scale is None else layer.weight.float() * scale.float()[:, None]
    new = quantize_rows(weight)
    if old is None or old.value.shape != new.value.shape:
        return new
    for before, after in zip(old, new, strict=True):
        before.copy_(after)
    return old


# Where it runs


def unsupported_model(model: Any) -> str | None:
    """Return why a compiled model cannot run in FP8, and what to do about it; None if it can."""
    weight, mode, reducer = model.backbone.host.patch_embed.proj.weight, model.mode, model.reducer
    if (reason := unsupported_device(weight.device)) is not None:
        return reason
    if kernels is None:
        return "its kernels need Triton and a PyTorch with CUDA; install both, or leave out dtype"
    if not model.graphs:
        return "it runs by CUDA graphs only; leave out graphs=False, or leave out dtype"
    if mode != "packed":
        return f'it needs mode packed, and this is {mode}; use model.with_options(mode="packed"), or leave out dtype'
    if reducer is not None:
        name = type(reducer).__name__
        return f"the reducer {name} runs in 16 bits; use model.with_options(reducer=None), or leave out dtype"
    if not FusedEncoder.can_fuse(model.backbone):
        name = type(model.backbone.host).__name__
        return f"it is for timm's usual ViT blocks, and those of this {name} differ; leave out dtype"
    if weight.dtype is not torch.bfloat16:
        return f"weights must be bfloat16, and these are {weight.dtype}; use model.bfloat16() first, or leave out dtype"
    if widths := unaligned_widths(model.backbone):
        numbers = ", ".join(map(str, widths))
        return f"widths of layers must be multiples of {ALIGN}, and here are {numbers}; leave out dtype"
    for dim in model.backbone.head_dims:
        if (backend := choose_backend(weight.dtype, dim, cuda=True)) != "triton":
            return f"attention must run by triton, and heads of {dim} channels run by {backend}; leave out dtype"
    return None


def unsupported_device(device: torch.device) -> str | None:
    """Return why a device cannot multiply in FP8, and what to do about it; None if it can."""
    need = "it needs a CUDA device of compute capability 8.9 or newer"
    if device.type != "cuda":
        return f"{need}, and the model is on {device}; move it there first, or leave out dtype"
    if (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        return f"{need}, and {device} has {capability[0]}.{capability[1]}; leave out dtype"
    if (error := product_error(device)) is not None:
        version = torch.__version__
        return f"PyTorch {version} has no such product for {device} ({error}); install another, or leave out dtype"
    return None


@cache
def product_error(device: torch.device) -> str | None:
    """Return the error of a product in FP8 (as of PyTorch 2.10 on compute capability 12.0), or None."""
    rows = Fp8Rows(torch.zeros(64, 64, dtype=FP8, device=device), torch.ones(64, 1, device=device))
    bias, out = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in (64, (64, 64)))
    try:
        multiply_fp8(rows, rows, bias, out)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def unaligned_widths(backbone: Any) -> list[int]:
    """Return the widths of layers that a product in FP8 does not take, in order."""
    layers = [layer for block in backbone.host.blocks for layer in (block.attn.qkv, block.mlp.fc1, block.mlp.fc2)]
    widths = {width for layer in layers for width in (layer.in_features, layer.out_features)}
    return sorted(width for width in widths if width % ALIGN)


def unsupported_call(dtype: torch.dtype | None, needs_grad: bool) -> str | None:
    """Return why such calls of a model in FP8 raise, and what to do about it. `dtype`: that of the images."""
    if needs_grad:
        return "it is for inference; use torch.inference_mode(), and train a model compiled without dtype"
    if autocast_dtype() is not None:
        return "autocast is on; leave it out, as weights and images are bfloat16"
    if dtype not in (None, torch.bfloat16):
        return f"images must be bfloat16 as the weights are, and these are {dtype}; use images.bfloat16()"
    return None


def check_call(image: Tensor, reason: str | None) -> None:
    """Raise ValueError if there is a reason why no graph can run a call, as nothing else runs in FP8."""
    if reason is None and image.requires_grad:
        reason = "it returns no gradients of images; use images.detach(), or a model compiled without dtype"
    if reason is not None:
        raise ValueError(f'this model was compiled with dtype="fp8", but {reason}')
