"""A timm Swin or SwinV2 block, run on the tokens of one stage that are there: norms, MLP and weights are its own.

Three things differ from the block's own forward: tokens are a list with places, not a map; windows without a token are
not computed; stochastic depth is drawn once per image of the list.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models import swin_transformer as v1
from timm.models import swin_transformer_v2 as v2
from torch import Tensor, nn

from msvit.backbones.blocks import drop_path, linear_macs, project_qkv, qkv_bias, unsupported_part
from msvit.execution.layout import take_rows
from msvit.shapes import Bool, Float, Int
from msvit.swin.windows import Finder, Frame, attend_windows, occupied

STAGES = (v1.SwinTransformerStage, v2.SwinTransformerV2Stage)
BLOCKS = (v1.SwinTransformerBlock, v2.SwinTransformerV2Block)
ATTENTIONS = (v1.WindowAttention, v2.WindowAttention)
MERGINGS = (v1.PatchMerging, v2.PatchMerging, nn.Identity)
MAX_LOG_SCALE = math.log(100)  # of SwinV2's cosines


def run_swin_block(block: Any, x: Float[Tensor, "slots d"], finder: Finder, bias: Tensor) -> Float[Tensor, "slots d"]:
    """Run attention and MLP, each with a residual connection. Swin is pre-norm, SwinV2 post-norm."""
    post_norm = isinstance(block, v2.SwinTransformerV2Block)
    y = run_window_attention(block.attn, x if post_norm else block.norm1(x), finder, frame_of(block), bias)
    x = x + drop_path(block.drop_path1, block.norm1(y) if post_norm else y, finder.places)
    y = block.norm2(block.mlp(x)) if post_norm else block.mlp(block.norm2(x))
    return x + drop_path(block.drop_path2, y, finder.places)


def run_window_attention(attn: Any, x: Tensor, finder: Finder, frame: Frame, bias: Tensor) -> Tensor:
    """Run the attention of a block inside its windows."""
    q, k, v = project_qkv(attn, x)  # (slots, heads, head_dim)
    if frame.pads(finder.places.size):  # a token of zeros, of which the projection leaves its bias
        zeros = torch.zeros(3 * q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        row = zeros if (qkv_row := qkv_bias(attn)) is None else qkv_row.to(q.dtype)
        q, k, v = (torch.cat([t, r]) for t, r in zip((q, k, v), row.view(3, 1, *q.shape[1:]), strict=True))
    scale = getattr(attn, "scale", 1.0)
    if isinstance(attn, v2.WindowAttention):
        logit_scale = attn.logit_scale.clamp(max=MAX_LOG_SCALE).exp()[..., 0]  # (heads, 1)
        eps = max(1e-12, torch.finfo(q.dtype).tiny)  # padding has length 0, and in float16 1e-12 is 0 too
        q, k = F.normalize(q, dim=-1, eps=eps) * logit_scale, F.normalize(k, dim=-1, eps=eps)
    y = attend_windows(q, k, v, finder, frame, bias, scale).flatten(1)
    return attn.proj_drop(attn.proj(y))


def position_bias(attn: Any) -> Float[Tensor, "heads area area"]:
    """Return the scores added for pairs of positions: a learned table, in SwinV2 the output of a small network."""
    area = attn.window_size[0] * attn.window_size[1]
    with torch.autocast(attn.proj.weight.device.type, enabled=False):
        if isinstance(attn, v2.WindowAttention):
            table = 16 * torch.sigmoid(attn.cpb_mlp(attn.relative_coords_table).flatten(0, 2))
        else:
            table = attn.relative_position_bias_table
        bias = take_rows(table, attn.relative_position_index.flatten())  # (area area, heads)
        return bias.view(area, area, -1).permute(2, 0, 1).contiguous()


def bias_sources(attn: Any) -> list[Tensor]:
    """Return the weights a position bias is made of."""
    if isinstance(attn, v2.WindowAttention):
        return [*attn.cpb_mlp.parameters(), attn.relative_coords_table]
    return [attn.relative_position_bias_table]


def frame_of(block: Any) -> Frame:
    """Return how a block cuts its tokens into windows."""
    return Frame(size=tuple(block.window_size), shift=tuple(block.shift_size))


def unsupported_stage(stage: Any) -> str | None:
    """Return why a stage cannot be run on tokens of mixed scale, or None."""
    if type(stage) not in STAGES:
        return f"its stages are {type(stage).__name__}, which is not supported"
    if type(stage.downsample) not in MERGINGS:
        return f"it merges patches by {type(stage.downsample).__name__}, which is not supported"
    reasons = (unsupported_part(block, BLOCKS, ATTENTIONS, (Mlp,)) for block in stage.blocks)
    return next((reason for reason in reasons if reason), None)


def swin_block_macs(block: Any, present: Bool[Tensor, "b rows columns"]) -> Int[Tensor, " b"]:
    """Return multiply-adds of images with these tokens: linear layers by tokens, attention by occupied windows."""
    frame, width = frame_of(block), block.attn.proj.in_features
    linear = sum(linear_macs(part) for part in (block.attn.qkv, block.attn.proj, block.mlp))
    return present.flatten(1).sum(1) * linear + 2 * width * frame.area**2 * occupied(present, frame).sum(1)
