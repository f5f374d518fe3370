"""Swin with tokens of mixed scale, written naively: one image at a time, all pairs of tokens.

Eq. 10 as it stands, inside windows. Which fine tokens exist is an argument: all (masked), or those of fine cells.
"""

from typing import Any

import torch
import torch.nn.functional as F
from reference import bounded
from torch import Tensor


def naive_logits(host: Any, embed_coarse: Any, image: Tensor, mask: Tensor, merge_at: int, everything: bool) -> Tensor:
    """image (b, c, h, w), mask (b, hc, wc) -> (b, classes)."""
    maps = []
    enter = 4 * 2 ** (merge_at - 1)
    for pixels, cells in zip(image, mask, strict=True):
        x = host.patch_embed.norm(host.patch_embed.proj(pixels[None])[0].permute(1, 2, 0))  # (rows, columns, d)
        for index, stage in enumerate(host.layers):
            if index:
                x = stage.downsample(x[None])[0]
            w = enlarged(cells, x.shape[:2])
            exists = torch.ones_like(w) > 0 if everything else w.detach() > 0.5
            if index + 1 == merge_at:
                coarse = F.unfold(pixels[None], enter, stride=enter)[0].T  # (tokens, c s s)
                coarse = embed_coarse(coarse).view(x.shape)
                both = w[..., None] * x + (1 - w)[..., None] * coarse
                x = torch.where(exists[..., None], both, coarse)
            if index + 1 >= merge_at:
                w, exists = torch.ones_like(w), torch.ones_like(w) > 0
            for block in stage.blocks:
                x = run_block(block, x, w, exists)
        maps.append(x)
    return host.forward_head(host.norm(torch.stack(maps)))


def enlarged(cells: Tensor, size: tuple[int, int]) -> Tensor:
    rows, columns = (-(-have // num) for have, num in zip(size, cells.shape, strict=True))
    return cells.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: size[0], : size[1]]


def run_block(block: Any, x: Tensor, w: Tensor, exists: Tensor) -> Tensor:
    if "V2" in type(block).__name__:
        x = x + block.norm1(attention(block, x, w, exists))
        return x + block.norm2(block.mlp(x))
    x = x + attention(block, block.norm1(x), w, exists)
    return x + block.mlp(block.norm2(x))


def attention(block: Any, x: Tensor, w: Tensor, exists: Tensor) -> Tensor:
    (rows, columns, d), attn = x.shape, block.attn
    (high, wide), (down, right) = block.window_size, block.shift_size
    full = (-(-rows // high) * high, -(-columns // wide) * wide)
    grid = torch.zeros(*full, d, dtype=x.dtype)  # after the shift, with padding
    grid[:rows, :columns] = x.roll((-down, -right), (0, 1))
    weight, there = torch.ones(full, dtype=w.dtype), torch.ones(full, dtype=torch.bool)
    weight[:rows, :columns] = w.roll((-down, -right), (0, 1))
    there[:rows, :columns] = exists.roll((-down, -right), (0, 1))
    y, x_place = torch.meshgrid(torch.arange(full[0]), torch.arange(full[1]), indexing="ij")
    y, x_place, weight, there = (t.flatten() for t in (y, x_place, weight, there))
    tokens = grid.flatten(0, 1)
    qkv = attn.qkv(tokens)
    if getattr(attn, "q_bias", None) is not None:
        qkv = qkv + torch.cat([attn.q_bias, torch.zeros_like(attn.q_bias), attn.v_bias])
    q, k, v = qkv.view(len(tokens), 3, attn.num_heads, -1).permute(1, 2, 0, 3)  # (heads, n, head_dim)
    if "V2" in type(block).__name__:
        stretch = attn.logit_scale.clamp(max=4.605170185988091).exp()
        score = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * stretch
        table = 16 * torch.sigmoid(attn.cpb_mlp(attn.relative_coords_table)[0])  # (2 high - 1, 2 wide - 1, heads)
    else:
        score = q @ k.mT * attn.scale
        table = attn.relative_position_bias_table.view(2 * high - 1, 2 * wide - 1, -1)
    together = ((y // high)[:, None] == y // high) & ((x_place // wide)[:, None] == x_place // wide)
    dy, dx = y[:, None] - y, x_place[:, None] - x_place
    bias = table[dy.clamp(1 - high, high - 1) + high - 1, dx.clamp(1 - wide, wide - 1) + wide - 1]
    score = score + bias.permute(2, 0, 1)
    far = (part(y, full[0], high, down)[:, None] != part(y, full[0], high, down)) | (
        part(x_place, full[1], wide, right)[:, None] != part(x_place, full[1], wide, right)
    )
    score = score - 100.0 * far
    seen = together & there
    e = weight * bounded(torch.where(seen, score, -torch.inf), weight).exp()
    total = e.sum(-1, keepdim=True)
    mixed = (e / torch.where(total == 0, 1, total)) @ v  # (heads, n, head_dim)
    out = attn.proj(mixed.transpose(0, 1).flatten(1)).view(*full, d)
    return out[:rows, :columns].roll((down, right), (0, 1))


def part(place: Tensor, length: int, side: int, shift: int) -> Tensor:
    """Last window, and what of it has come from the other side; only inside a window does it matter."""
    return (place >= length - side).long() + (place >= length - shift).long() if shift else torch.zeros_like(place)
