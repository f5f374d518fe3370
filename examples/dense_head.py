"""A depth head on the maps of four blocks, trained for a few steps on scenes that are drawn as needed.

    python examples/dense_head.py

The head is written as for any timm ViT: it gets maps (b, d, hf, wf), and need not know that flat parts of the images
were coarse tokens. The same lines fit a detection neck: `forward_intermediates` is what timm's `features_only=True`
calls inside.
"""

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import msvit

SIZE, STEPS, BATCH = 128, 41, 8
SMALL = {"embed_dim": 64, "depth": 4, "num_heads": 2}  # in seconds on a CPU; leave it out for a whole ViT


class DepthHead(nn.Module):
    """Maps of several blocks -> depth of every pixel."""

    def __init__(self, width: int, num_maps: int) -> None:
        super().__init__()
        self.reduce = nn.ModuleList(nn.Conv2d(width, 32, 1) for _ in range(num_maps))
        self.mix = nn.Sequential(nn.Conv2d(32 * num_maps, 64, 3, padding=1), nn.GELU(), nn.Conv2d(64, 64, 1))

    def forward(self, maps: list[Tensor]) -> Tensor:
        x = torch.cat([conv(m) for conv, m in zip(self.reduce, maps, strict=True)], dim=1)  # (b, 32 maps, hf, wf)
        return F.pixel_shuffle(self.mix(x), 8)[:, 0]  # (b, 8 hf, 8 wf): half the resolution of patches of 16 px


def scenes(num: int) -> tuple[Tensor, Tensor]:
    """Images (num, 3, SIZE, SIZE) of a ball before a slope, darker with distance, and their depth at half the size."""
    rows, columns = torch.meshgrid(*[torch.linspace(-1, 1, SIZE)] * 2, indexing="ij")
    depth = (0.75 - 0.25 * rows).expand(num, SIZE, SIZE)
    centre, radius = torch.rand(2, num, 1, 1) - 0.5, 0.2 + 0.3 * torch.rand(num, 1, 1)
    inside = radius**2 - (rows - centre[0]) ** 2 - (columns - centre[1]) ** 2
    depth = torch.where(inside > 0, 0.4 - inside.clamp(min=0).sqrt() * 0.5, depth)
    return (1 - 2 * depth)[:, None].expand(-1, 3, -1, -1), F.avg_pool2d(depth, 2)


def main() -> None:
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=SIZE, num_classes=0, **SMALL)
    model = msvit.convert(vit, coarse=32, gate=msvit.GradientGate(coarse=32, share=0.4))
    head = DepthHead(model.embed_dim, num_maps=4)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=2e-3)
    for step in range(STEPS):
        images, depth = scenes(BATCH)
        maps = model.forward_intermediates(images, indices=4, norm=True, intermediates_only=True)
        loss = F.mse_loss(head(maps), depth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:2d}: error {loss.item() ** 0.5:.3f}, depth itself varies by {depth.std():.3f}")
    with torch.inference_mode():
        _, tokens = model.encode(scenes(BATCH)[0])
    print(f"{tokens.count.float().mean():.0f} tokens of {(SIZE // 16) ** 2}")


if __name__ == "__main__":
    main()
