"""A gate of your own in twenty lines: fine where an image differs from its blurred self.

    python examples/own_gate.py
"""

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import msvit


class DetailGate(msvit.Gate):
    """Fine in every cell whose detail exceeds `threshold`, in units of the image's own contrast."""

    def __init__(self, coarse: int, threshold: float = 0.3) -> None:
        super().__init__(coarse, threshold=threshold)

    def forward(self, image: Tensor) -> msvit.GateOutput:
        self.cells(image)  # refuses images that are not made of whole cells
        blurred = F.avg_pool2d(image, 5, stride=1, padding=2, count_include_pad=False)
        detail = F.avg_pool2d((image - blurred).abs().mean(1, keepdim=True), self.coarse)[:, 0]  # (b, hc, wc)
        wanted = self.config["threshold"] * image.std((1, 2, 3))[:, None, None]
        return msvit.GateOutput.from_mask((detail > wanted).float())


def main() -> None:
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    model = msvit.convert(vit, coarse=32, gate=DetailGate(coarse=32))
    images = torch.linspace(-1, 1, 224).expand(2, 3, 224, 224).clone()  # smooth ...
    images[0, :, 96:160, 32:128] += torch.randn(3, 64, 96)  # ... but for one patch of noise in the first
    with torch.inference_mode():
        out = model(images)
    for count, macs in zip(out.tokens.count.tolist(), msvit.macs(model, images).tolist(), strict=True):
        print(f"{count} tokens of 196, {macs / 1e9:.2f} GMACs")


if __name__ == "__main__":
    main()
