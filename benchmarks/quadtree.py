"""Tokens of 16, 32 and 64 px in a quadtree, by hand: which run at a budget, and a timm ViT on them.

    encoder = Encoder(vit, 512, mean, std)
    images = Images(encoder, pixels)                                            # and the scores of their cells
    active = encoder.fitted("16/32/64", images.scores["gate"], rule="2", budget=0.3)
    images.run(encoder, active)                                                 # predictions

A split of a cell adds three tokens at both levels. Cells are ranked by score over all images of a set, and one
threshold on ranks, at which the mean multiply-adds of the set meet the budget, moves both levels.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import msvit
from msvit.tokens.patches import coarse_positions, cut_patches
from msvit.types import ScaleGrid

THREE = "16/32/64"
SCALES = ("16/32", "16/64", THREE)
RULES = ("1", "2", "4", "8", "joint")  # how levels balance with three scales: see `balanced`
NUM_CLASSES = 21  # of a model that segments, VOC's
BATCH = 64


def ranked(*scores: Tensor) -> list[Tensor]:
    """Each score as the share of all of these that are lower."""
    flat = torch.cat([part.flatten() for part in scores])
    rank = torch.empty_like(flat)
    rank[flat.argsort()] = torch.arange(len(flat), device=flat.device) / len(flat)
    parts = rank.split([part.numel() for part in scores])
    return [part.view_as(like) for part, like in zip(parts, scores, strict=True)]


def balanced(scores: tuple[Tensor, ...], rule: str) -> list[Tensor]:
    """Values of cells of 64 and of 32 px, to be compared with one threshold.

    L: ranks by level; where a share p of the cells of 32 px are above, 1 - (1 - p) ** L of those of 64 px are.
    joint: scores of both levels in one ranking.
    """
    if rule == "joint":
        return ranked(*scores)
    large, small = (ranked(part)[0] for part in scores)
    return [large ** (1 / int(rule)), small]


def repeated(cells: Tensor) -> Tensor:
    return cells.repeat_interleave(2, 1).repeat_interleave(2, 2)


def decide(scales: str, values: list[Tensor], threshold: Tensor) -> Tensor:
    """(b, ids) which tokens run: of 64 px, then 32, then 16. A cell of 32 px is split only if its parent is."""
    large, small = values
    split = large > (-1 if scales == "16/32" else threshold)
    inside = repeated(split)
    fine = inside if scales == "16/64" else inside & (small > threshold)
    return torch.cat([part.flatten(1) for part in (~split, inside & ~fine, repeated(fine))], 1)


class Encoder:
    """A timm ViT for images of one size, on tokens of three scales."""

    def __init__(self, vit: Any, side: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.vit, self.side = copy.deepcopy(vit), side
        self.vit.set_input_size(img_size=(side, side))
        self.grids = [ScaleGrid(side, side, fine=16, coarse=coarse) for coarse in (64, 32)]
        self.sizes = [self.grids[0].num_cells, self.grids[1].num_cells, self.grids[0].num_patches]
        self.device = self.vit.pos_embed.device
        self.mean, self.std = (torch.tensor(part, device=self.device).view(3, 1, 1) for part in (mean, std))
        large = torch.arange(self.sizes[0], device=self.device).view(1, *self.grids[0].cells)
        small = torch.arange(self.sizes[1], device=self.device).view(1, *self.grids[1].cells) + self.sizes[0]
        self.covering = [repeated(repeated(large)).flatten(), repeated(small).flatten()]  # ids, by patch
        self.gate = msvit.load_gate("default").for_normalization(mean, std).to(self.device)

    def prepare(self, pixels: Tensor, side: int | None = None) -> Tensor:
        image, size = pixels.float() / 255, (side or self.side,) * 2
        if image.shape[2:] != size:
            image = F.interpolate(image, size, mode="bicubic", antialias=True).clamp(0, 1)
        return (image - self.mean) / self.std

    def share(self, num: Tensor) -> Tensor:
        """Multiply-adds of images with so many tokens besides the class token, as a share of the dense model's."""
        return self.macs(num) / self.macs(torch.tensor(self.sizes[2]))

    def macs(self, num: Tensor) -> Tensor:
        d, total = self.vit.embed_dim, num.double() + 1
        blocks = len(self.vit.blocks) * (12 * d**2 * total + 2 * d * total**2)
        return blocks + num * self.vit.patch_embed.proj.weight.numel() + self.vit.head.weight.numel()

    def uniform(self, batch: int, scale: int) -> Tensor:
        """All tokens of one scale; 0 is that of 64 px."""
        parts = [torch.full((batch, size), index == scale) for index, size in enumerate(self.sizes)]
        return torch.cat(parts, 1).to(self.device)

    def fitted(self, scales: str, scores: tuple[Tensor, ...], rule: str, budget: float) -> Tensor:
        """Tokens with the lowest threshold at which the mean multiply-adds are within the budget."""
        values = balanced(scores, rule)
        low, high = values[0].new_zeros(()), values[0].new_ones(())
        for _ in range(20):
            middle = (low + high) / 2
            fits = self.share(decide(scales, values, middle).sum(1)).mean() <= budget
            low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
        return decide(scales, values, high)

    def __call__(self, image: Tensor, active: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        """(b, 1 + n, d): features after the last norm. `seen` gets the attention of the class token in later blocks."""
        vit, num = self.vit, active.sum(1)
        least, longest = num.aminmax()
        padded = bool(longest > least)
        length = -(-(int(longest) + 1) // 8) * 8 - 1 if padded else int(longest)  # masks of multiples of 8 are faster
        order = (~active).byte().argsort(dim=1, stable=True)[:, :length]
        pixels = torch.cat([cut_patches(F.avg_pool2d(image, k), 16) for k in (4, 2, 1)], 1)
        pixels = pixels.gather(1, order[..., None].expand(-1, -1, pixels.shape[2]))
        fine = vit.pos_embed[0, 1:]
        table = torch.cat([*(coarse_positions(fine, grid) for grid in self.grids), fine])
        x = table[order] + F.linear(pixels, vit.patch_embed.proj.weight.flatten(1), vit.patch_embed.proj.bias)
        x = torch.cat([(vit.cls_token + vit.pos_embed[:, :1]).expand(len(x), -1, -1), x], 1)
        mask = (torch.arange(length + 1, device=x.device) <= num[:, None])[:, None, None] if padded else None
        for index, block in enumerate(vit.blocks):
            attn = block.attn
            q, k, v = attn.qkv(block.norm1(x)).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
            if seen is not None and 2 * index >= len(vit.blocks):
                seen.append((q[:, :, :1] @ k.mT * attn.scale).float().softmax(3)[:, :, 0, 1:].mean(1))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + block.ls1(attn.proj(y.transpose(1, 2).flatten(2)))
            x = x + block.ls2(block.mlp(block.norm2(x)))
        return vit.norm(x)

    def spread(self, x: Tensor, active: Tensor) -> Tensor:
        """(b, d, hf, wf): each patch has the feature of the token that covers it."""
        large, small = self.covering
        fine = torch.arange(self.sizes[2], device=x.device) + sum(self.sizes[:2])
        covering = torch.where(active[:, large], large, torch.where(active[:, small], small, fine))
        slot = active.long().cumsum(1).gather(1, covering)  # counted from the class token
        return x.gather(1, slot[..., None].expand(-1, -1, x.shape[2])).mT.unflatten(2, self.grids[0].patches)

    def features(self, x: Tensor, active: Tensor) -> Tensor:
        """What the head takes: (b, d), or (b, d, hf, wf) of a model that segments."""
        return x[:, 0] if self.vit.num_classes > NUM_CLASSES else self.spread(x, active)

    def predict(self, x: Tensor, active: Tensor) -> Tensor:
        return predict(self.vit, self.features(x, active))

    @torch.no_grad()
    def scores(self, image: Tensor, x: Tensor, seen: list[Tensor]) -> dict[str, tuple[Tensor, ...]]:
        """By name, those of cells of 64 and of 32 px, from the dense features and the image."""
        active, by_scale = self.uniform(len(image), 2), []
        dense = self.spread(x, active).float()
        for scale, k in enumerate((4, 2)):
            coarse = self.uniform(len(image), scale)
            found = self.spread(self(image, coarse), coarse).float()[:, :, ::k, ::k]
            changed = 1 - F.cosine_similarity(F.avg_pool2d(dense, k), found, dim=1)
            if self.vit.num_classes == NUM_CLASSES:  # the share of a cell that is not of its commonest class
                logits = F.interpolate(self.predict(x, active), scale_factor=4, mode="bilinear")
                classes = F.one_hot(logits.argmax(1), NUM_CLASSES).permute(0, 3, 1, 2).float()
                by_scale.append({"edges": 1.01 - F.avg_pool2d(classes, 4 * k).amax(1) + 1e-3 * changed})
            else:
                weight = torch.stack(seen).mean(0).view(len(image), 1, *self.grids[0].patches)
                by_scale.append({"attention": F.avg_pool2d(weight, k)[:, 0] * k**2})
            by_scale[-1] |= {f"{name} x distortion": values * changed for name, values in by_scale[-1].items()}
            with torch.autocast(image.device.type, enabled=False):
                by_scale[-1]["gate"] = self.gate.scores(F.avg_pool2d(image, k // 2)).float()
        return {name: (by_scale[0][name], by_scale[1][name]) for name in by_scale[0]}


def predict(vit: Any, features: Tensor) -> Tensor:
    return vit.head(features.movedim(1, -1)).movedim(-1, 1).float()


class Images:
    """Images, with the scores and the predictions of the dense model."""

    @torch.no_grad()
    def __init__(self, encoder: Encoder, pixels: Tensor) -> None:
        self.pixels = pixels
        parts, found = [], []
        for part in pixels.split(BATCH):
            image, active, seen = encoder.prepare(part), encoder.uniform(len(part), 2), []
            x = encoder(image, active, seen)
            found.append(encoder.features(x, active))
            parts.append(encoder.scores(image, x, seen))
        self.features = torch.cat(found)
        self.dense = predict(encoder.vit, self.features)
        self.scores = {
            name: tuple(torch.cat([part[name][level] for part in parts]) for level in (0, 1)) for name in parts[0]
        }

    def run(self, encoder: Encoder, active: Tensor) -> Tensor:
        """Predictions; images with about as many tokens are run together."""
        order = active.sum(1).argsort()
        found = [
            encoder.predict(encoder(encoder.prepare(self.pixels[index]), active[index]), active[index])
            for index in order.split(BATCH)
        ]
        return torch.cat(found)[order.argsort()]
