"""Segmentation: the two decoders of Segmenter, from a map of features to a map of classes.

    decoder = MaskDecoder(width=384, num_classes=150)
    decoder(dense_map(tokens))                    # (b, 384, hf, wf) -> (b, 150, hf, wf)

Their input is a map over the fine patches, in which a coarse token is repeated over its patches.
"""

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from msvit.checks import check_int, check_number, check_tensor, check_weights
from msvit.shapes import Float

HEAD_DIM = 64  # of the mask transformer's attention


class LinearDecoder(nn.Module):
    """A decoder of one linear layer per patch."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        width, num_classes = check_decoder(width, num_classes)
        self.num_classes = num_classes
        self.classify = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.classify.weight, std=0.02)
        nn.init.zeros_(self.classify.bias)

    def forward(self, features: Float[Tensor, "b d hf wf"]) -> Float[Tensor, "b classes hf wf"]:
        check_tensor("features", features, (None, self.classify.in_features, None, None), "b, d, hf, wf", kind="real")
        return self.classify(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def num_macs(self, num_patches: int) -> int:
        """Return the multiply-adds for an image of so many patches."""
        return num_patches * self.classify.weight.numel()


class MaskDecoder(nn.Module):
    """The mask transformer: class embeddings go through two blocks beside the patches; a mask is their product.

    Both are projected and brought to length 1 before the product, and the scores of a patch are normalised over
    its classes (Strudel et al., 2021).
    """

    def __init__(self, width: int, num_classes: int, depth: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        width, num_classes = check_decoder(width, num_classes)
        depth = check_int("depth", depth, at_least=0, at_most=1000)
        dropout = check_number("dropout", dropout, at_least=0, below=1)
        self.num_classes = num_classes
        self.enter = nn.Linear(width, width)
        self.classes = nn.Parameter(torch.zeros(1, num_classes, width))
        heads = next(n for n in range(max(1, width // HEAD_DIM), 0, -1) if width % n == 0)
        self.blocks = nn.ModuleList(Block(width, heads, qkv_bias=True, proj_drop=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.project_patches = nn.Linear(width, width, bias=False)
        self.project_classes = nn.Linear(width, width, bias=False)
        self.norm_scores = nn.LayerNorm(num_classes)
        self.apply(_start)
        nn.init.trunc_normal_(self.classes, std=0.02)
        for layer in (self.project_patches, self.project_classes):
            nn.init.normal_(layer.weight, std=width**-0.5)

    def forward(self, features: Float[Tensor, "b d hf wf"]) -> Float[Tensor, "b classes hf wf"]:
        check_tensor("features", features, (None, self.enter.in_features, None, None), "b, d, hf, wf", kind="real")
        x = self.enter(features.flatten(2).transpose(1, 2))  # (b, patches, d)
        num_patches = x.shape[1]
        x = torch.cat([x, self.classes.expand(x.shape[0], -1, -1)], dim=1)  # (b, patches + classes, d)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        patches = F.normalize(self.project_patches(x[:, :num_patches]), dim=-1)
        classes = F.normalize(self.project_classes(x[:, num_patches:]), dim=-1)
        scores = self.norm_scores(patches @ classes.transpose(1, 2))  # (b, patches, classes)
        return scores.transpose(1, 2).unflatten(2, features.shape[2:])

    def num_macs(self, num_patches: int) -> int:
        """Return the multiply-adds for an image of so many patches."""
        num_classes, width = self.classes.shape[1:]
        total = num_patches + num_classes
        linear = sum(m.weight.numel() for m in self.blocks.modules() if isinstance(m, nn.Linear))
        blocks = total * linear + len(self.blocks) * 2 * width * total**2
        return (num_patches + total) * width**2 + blocks + num_patches * num_classes * width


def check_decoder(width: int, num_classes: int) -> tuple[int, int]:
    """Return width and number of classes, or raise ValueError."""
    width = check_int("width", width, at_least=1, at_most=2**15)
    num_classes = check_int("num_classes", num_classes, at_least=1)
    check_weights(width * num_classes, "width and num_classes")
    return width, num_classes


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


DECODERS: dict[str, type[LinearDecoder] | type[MaskDecoder]] = {"mask": MaskDecoder, "linear": LinearDecoder}
