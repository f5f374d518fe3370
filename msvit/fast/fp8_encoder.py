"""The fused encoder with qkv, fc1 and fc2 in FP8 (e4m3), for inference in bfloat16: eight kernels per block.

    residual + norm, product, attention, product + residual, norm, product, GELU, product

Products multiply rows of tokens and rows of weights (output channels), each with a scale of its own, which the kernel
before writes. They cannot add to the residual: the next block's first norm adds fc2's output. proj, which is small, and
all else are as in `fused_encoder.py`. Weights in FP8 are copies, made for the first batch and when weights change.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from msvit.backbones.blocks import Residual
from msvit.execution.attention import choose_backend
from msvit.fast.find_kernels import kernels
from msvit.fast.fused_encoder import FusedEncoder, FusedTables, Workspace
from msvit.fast.fused_ops import FusedBlock, Linear, Norm, attend
from msvit.types import Heads, ScaleGrid

FP8 = torch.float8_e4m3fn
MIN_CAPABILITY = (8, 9)  # of devices with FP8 products


class Fp8Rows(NamedTuple):
    """Rows in FP8, each with a scale: they represent value * scale."""

    value: Tensor  # (rows, d)
    scale: Tensor  # (rows, 1), float32


def quantize_rows(rows: Tensor) -> Fp8Rows:
    """Quantize a weight (rows, d) as kernels/fp8.py does tokens. A row with NaN or Inf becomes NaN."""
    scale = rows.abs().amax(1, keepdim=True).div(448.0).clamp(min=1e-12)
    return Fp8Rows((rows / scale).to(FP8), scale)


def multiply_fp8(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, out: Tensor) -> Tensor:
    """Compute out = x @ weight.T + bias, for x (rows, in), weight (out, in) and out (rows, out) in bfloat16."""
    sides = (x.value, weight.value.T, x.scale, weight.scale.T)
    return torch._scaled_mm(*sides, bias=bias, out_dtype=out.dtype, use_fast_accum=True, out=out)


class Fp8Workspace(Workspace):
    """Operations and memory of a block in FP8, with one buffer for all inputs; the next norm adds the MLP's branch."""

    def __init__(self, encoder: FusedEncoder, like: Tensor, rows: int) -> None:
        super().__init__(encoder, like, rows)
        self.fp8 = torch.zeros(rows * max(encoder.width, encoder.mlp_width), dtype=FP8, device=like.device)
        self.scale = torch.zeros(rows, 1, device=like.device)

    def take_fp8(self, rows: int, width: int) -> Fp8Rows:
        return Fp8Rows(self.fp8[: rows * width].view(rows, width), self.scale[:rows])

    def add_norm(self, residual: Residual, norm: Norm) -> tuple[Residual, Fp8Rows]:
        y = self.take_fp8(*residual.tokens.x.shape)
        kernels.normalize_fp8_into(residual.tokens.x, residual.branch, norm.shift, *norm.weights, *y)
        return Residual(residual.tokens), y

    def attention(self, block: FusedBlock, residual: Residual, y: Fp8Rows) -> tuple[Residual, Heads]:
        qkv = multiply_fp8(y, *block.qkv, self.take(len(y.value), len(block.qkv.weight.value)))
        return residual, attend(block, residual, qkv, self.take_y(qkv))

    def mlp(self, block: FusedBlock, residual: Residual, y: Fp8Rows) -> Residual:
        hidden = multiply_fp8(y, *block.fc1, self.take(len(y.value), len(block.fc1.weight.value)))
        active = self.take_fp8(*hidden.shape)
        kernels.gelu_fp8_into(hidden, *active)
        return Residual(residual.tokens, multiply_fp8(active, block.fc2, None, self.take_y(hidden)))


class Fp8Encoder(FusedEncoder):
    """`FusedEncoder` with most linear layers in FP8."""

    leaves_branch, workspace_type = True, Fp8Workspace

    def __init__(self, plain: Any) -> None:
        super().__init__(plain)
        self.weights: list[Fp8Rows] = []  # of qkv, fc1 and fc2 of each block, read by the graphs of all batch sizes

    def tables(self, grid: ScaleGrid) -> FusedTables:
        """Compute all tables but fc2's weights; the weights in FP8 are computed anew, in the same memory."""
        scales = [each for _, scale in self.residual_layers()[1::2] for each in (None, None, scale)]  # of fc2 only
        for index, (layer, scale) in enumerate(zip(fp8_layers(self.backbone), scales, strict=True)):
            new = quantize_rows(layer.weight.float() * (1.0 if scale is None else scale.float()[:, None]))
            if index == len(self.weights):
                self.weights.append(new)
            for memory, values in zip(self.weights[index], new, strict=True):
                memory.copy_(values)
        return super().tables(grid)._replace(fc2=[None] * len(self.backbone.host.blocks))

    def table_sources(self) -> list[Tensor]:
        return [*super().table_sources(), *(layer.weight for layer in fp8_layers(self.backbone))]

    def block(self, index: int, tables: FusedTables) -> FusedBlock:
        block, (qkv, fc1, fc2) = super().block(index, tables), self.weights[3 * index :][:3]
        return block._replace(qkv=Linear(qkv, block.qkv.bias), fc1=Linear(fc1, block.fc1.bias), fc2=fc2)


def fp8_layers(backbone: Any) -> list[Any]:
    """Return qkv, fc1 and fc2 of each block."""
    return [layer for block in backbone.host.blocks for layer in (block.attn.qkv, block.mlp.fc1, block.mlp.fc2)]


def check_model(model: Any) -> None:
    """Raise ValueError unless a compiled model can run in FP8."""
    backbone, weight = model.backbone, model.backbone.host.patch_embed.proj.weight
    capability = torch.cuda.get_device_capability(weight.device) if weight.is_cuda else (0, 0)
    fits = FusedEncoder.can_fuse(backbone) and not any(n % 16 for x in fp8_layers(backbone) for n in x.weight.shape)
    fits = fits and all(choose_backend(torch.bfloat16, dim, cuda=True) == "triton" for dim in backbone.head_dims)
    usual = "timm's usual ViT blocks, widths that 16 divides, and Triton with heads of 16, 32, 64 or 128 channels"
    for is_met, need, has in (
        (capability >= MIN_CAPABILITY, "a CUDA device of capability (8, 9)", f"{weight.device} of {capability}"),
        (model.graphs and model.mode == "packed", "graphs, mode packed", f"graphs={model.graphs}, mode {model.mode}"),
        (model.reducer is None, "reducer=None", type(model.reducer).__name__),
        (fits, usual, f"a {type(backbone.host).__name__} with heads of {backbone.head_dims}"),
        (weight.dtype is torch.bfloat16, "weights in bfloat16 (model.bfloat16())", weight.dtype),
    ):
        if not is_met:
            raise ValueError(f'dtype is "fp8", which needs {need}, and here is {has}; change that, or leave out dtype')
