"""Segmenter: an MSViT as encoder, a decoder on its dense map, and images of any size.

    model = msvit.convert_segmenter(vit, num_classes=150, gate=msvit.load_gate("gate", frozen=True))
    model(images).logits                     # (b, 150, h, w)
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from msvit.checks import check_choice, check_int, check_kind
from msvit.heads.segment import DECODERS
from msvit.host_settings import HostSettings
from msvit.integrations.hub import HubModel
from msvit.model import MSViT
from msvit.output import MSViTOutput
from msvit.tokens import dense_map
from msvit.types import ScaleGrid, check_channels, unchecked


class Segmenter(HubModel, HostSettings):
    """A model with a class for every pixel. Make one with `msvit.convert_segmenter`.

    Images are padded to whole cells at the right and at the bottom, with zeros (the mean colour of normalised images),
    and logits are cut back to the image. A mask given has the cells of the padded image.
    """

    def __init__(self, encoder: MSViT, decoder: nn.Module) -> None:
        super().__init__()
        check_kind("encoder", encoder, MSViT, "the MSViT that msvit.convert returns")
        check_kind("decoder", decoder, nn.Module, "a module, such as msvit.heads.MaskDecoder(384, 150)")
        self.encoder = encoder
        self.decoder = decoder
        self._mode = encoder.mode

    def forward(
        self, image: Tensor, mask: Tensor | None = None, max_tokens: int | None = None, per_image: int | None = None
    ) -> MSViTOutput:
        """Run gate, encoder and decoder. See `MSViT.encode` for the arguments."""
        padded = self.pad(image)
        gate, tokens = self.encoder.encode(padded, mask, max_tokens, per_image)
        tokens = tokens.with_x(self.norm(tokens.x))
        logits = self.decoder(dense_map(tokens))  # (b, classes, hf, wf): coarse tokens repeated
        logits = F.interpolate(logits, size=padded.shape[2:], mode="bilinear", align_corners=False)
        logits = logits[:, :, : image.shape[2], : image.shape[3]]
        return unchecked(MSViTOutput, logits=logits, gate=gate, tokens=tokens)

    @property
    def norm(self) -> nn.Module:
        """The last norm of hosts that norm after pooling; identity for the others, which norm before it."""
        host: Any = self.host
        return host.fc_norm if isinstance(host.norm, nn.Identity) else nn.Identity()

    def unused(self) -> list[nn.Module]:
        """Return the parts of the host's own head: they do not run, and get no gradient."""
        parts = [getattr(self.host, name, None) for name in ("head", "head_dist", "fc_norm", "attn_pool")]
        return [part for part in parts if part is not None and part is not self.norm]

    def pad(self, image: Tensor) -> Tensor:
        """Pad with zeros to the right and below, up to whole cells."""
        check_channels(image, self.backbone.in_chans)
        height, width = (-side % self.coarse for side in image.shape[2:])
        return F.pad(image, (0, width, 0, height)) if height or width else image

    def macs(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the (b,) multiply-adds of each image's forward: gate, encoder and decoder."""
        padded = self.pad(image)
        return self.encoder.macs(padded, mask, head=False) + self.decoder_macs(self.encoder.grid(padded))

    def decoder_macs(self, grid: ScaleGrid) -> int:
        decoder: Any = self.decoder
        return decoder.num_macs(grid.num_patches)

    def describe_decoder(self) -> dict[str, Any]:
        """Return the arguments of `convert_segmenter` that make such a decoder."""
        name = next((name for name, kind in DECODERS.items() if kind is type(self.decoder)), None)
        if name is None:
            raise ValueError(f"{type(self.decoder).__name__} is not among the known decoders ({', '.join(DECODERS)})")
        return {"decoder": name, "num_classes": self.num_classes}

    def predict(self, *images: Any, **options: Any) -> None:
        """Raise ValueError: files are segmented in windows, by `msvit predict`."""
        raise ValueError(
            "predict is for classifiers; to segment image files use msvit predict RUN IMAGES --overlay DIR, which cuts "
            "them into windows as in training, or call model(images) with normalised images"
        )

    def refresh(self) -> None:
        """Drop everything that was computed from the encoder's weights in advance; see `MSViT.refresh`."""
        self.encoder.refresh()

    def with_options(self, **options: Any) -> "Segmenter":
        """Return a model of the same weights with another gate, mode or reducer."""
        return self._around(self.encoder.with_options(**options))

    def uncompiled(self) -> "Segmenter":
        """Return a model of the same weights and options whose encoder is not compiled."""
        return self._around(self.encoder.uncompiled())

    def _around(self, encoder: MSViT) -> "Segmenter":
        model = Segmenter(encoder, self.decoder)
        model.take_metadata(self)
        return model

    # Attributes that all models have.
    gate = property(lambda self: self.encoder.gate)
    backbone = property(lambda self: self.encoder.backbone)
    reducer = property(lambda self: self.encoder.reducer)
    host = property(lambda self: self.encoder.host)
    fine = property(lambda self: self.encoder.fine)
    coarse = property(lambda self: self.encoder.coarse)
    num_classes = property(lambda self: self.decoder.num_classes)


def attach_decoder(encoder: MSViT, num_classes: int, decoder: str) -> Segmenter:
    """Return a Segmenter with a new decoder, on the device and in the precision of its encoder."""
    if encoder.backbone.merge_at is not None:
        raise ValueError(
            f"the decoders of Segmenter need tokens of one scale, but the last ones of a {type(encoder.host).__name__} "
            f"cover {encoder.fine * 2 ** (len(encoder.backbone.host.layers) - 1)}px each; convert a ViT, or classify"
        )
    check_choice("decoder", decoder, DECODERS)
    check_int("num_classes", num_classes, at_least=2)
    weight = encoder.backbone.host.patch_embed.proj.weight
    head = DECODERS[decoder](encoder.backbone.host.embed_dim, num_classes).to(weight.device, weight.dtype)
    return Segmenter(encoder, head).train(encoder.training)
