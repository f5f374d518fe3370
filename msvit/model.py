"""MSViT: a Vision Transformer that spends tokens where the image needs them."""

from typing import Any

import torch
from torch import Tensor

from msvit.backbones import Backbone
from msvit.checks import check_flag, check_int, check_kind
from msvit.gates import Gate
from msvit.host_settings import HostSettings
from msvit.reduction import Reducer
from msvit.types import GateOutput, MSViTOutput, ScaleGrid, check_channels, check_mask


class MSViT(HostSettings):
    """A host model, wrapped: a gate decides each cell's scale, the host's own weights do the rest.

    Make one with `msvit.convert`. `mode` says how tokens are run and may be changed at any time.
    """

    def __init__(
        self, backbone: Backbone, gate: Gate, coarse: int, mode: str = "packed", reducer: Reducer | None = None
    ) -> None:
        super().__init__()
        check_kind("backbone", backbone, Backbone, "what msvit.backbones.adapt returns")
        backbone.check_coarse(coarse)
        check_kind("gate", gate, Gate, f"a msvit gate such as msvit.DiscGate(coarse={coarse})")
        if gate.coarse != coarse:
            raise ValueError(
                f"the gate decides for cells of {gate.coarse}px, but coarse is {coarse}px; "
                f"make it with coarse={coarse} (a saved one: msvit.load_gate(folder, coarse={coarse}))"
            )
        self.gate = gate
        self.backbone = backbone
        self.coarse = coarse
        self.mode = mode
        self.reducer = reducer

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "reducer" and value is not None:  # (a property would not be asked: torch registers modules itself)
            check_kind("reducer", value, Reducer, "a msvit reducer such as msvit.EViT(rate=0.7)")
            self.backbone.check_reducer(value)
        super().__setattr__(name, value)

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, name: str) -> None:
        if name not in self.backbone.modes:
            kind = type(self.host).__name__
            raise ValueError(f"unknown mode {name!r} for a {kind}; known: {', '.join(self.backbone.modes)}")
        self._mode = name

    @property
    def host(self) -> Any:
        return self.backbone.host

    @property
    def fine(self) -> int:
        return self.backbone.fine

    def forward(self, image: Tensor, mask: Tensor | None = None, max_tokens: int | None = None) -> MSViTOutput:
        """`max_tokens` is a budget for the batch: the cells the gate is least sure of stay coarse if it asks for more.

        With it shapes are known beforehand, so that nothing waits for the device (packed mode only).
        """
        grid = self.grid(image)
        gate = self.gate(image) if mask is None else self.from_mask(mask, image)  # (b, hc, wc), 1 = fine
        gate = gate if max_tokens is None else self.limit_tokens(gate, grid, max_tokens)
        layout = self.backbone.make_layout(gate, grid, self.mode, max_tokens)  # which tokens run
        tokens = self.backbone.tokenize(image, layout, gate.mask)  # what the transformer sees, and where each lives
        tokens = self.backbone(tokens, reducer=self.reducer)
        return MSViTOutput(logits=self.backbone.head(tokens), gate=gate, tokens=tokens)

    def refresh(self) -> None:
        """Forget what was made from the weights beforehand.

        A plain model never needs it. An accelerated one does after writes that PyTorch does not count: through `.data`,
        in inference mode, by a fused optimizer. docs/performance.md lists what is noticed by itself.
        """
        self.backbone.refresh()

    def limit_tokens(self, gate: GateOutput, grid: ScaleGrid, max_tokens: int) -> GateOutput:
        """The decisions, with no more fine cells than the budget has room for."""
        check_int("max_tokens", max_tokens, at_least=1, at_most=2**31 - 1)  # where images begin is told in 32 bits
        if self.mode != "packed":
            raise ValueError(f"max_tokens needs mode 'packed', but the model's is {self.mode!r}; set model.mode")
        return self.backbone.limit_tokens(gate, grid, max_tokens)

    def grid(self, image: Tensor) -> ScaleGrid:
        check_channels(image, self.backbone.in_chans)
        weights = self.backbone.host.patch_embed.proj.weight.dtype
        if image.dtype is not weights and not torch.is_autocast_enabled(image.device.type):
            raise ValueError(
                f"images are {image.dtype}, but the model's weights are {weights}; "
                f"convert one of them, or run under torch.autocast"
            )
        return ScaleGrid(image.shape[2], image.shape[3], fine=self.fine, coarse=self.coarse)

    def from_mask(self, mask: Tensor, image: Tensor) -> GateOutput:
        """The user's own decision for these images."""
        check_mask(mask, image.shape[0], self.grid(image).cells)
        mask = mask.to(image.device)
        return GateOutput.from_mask(mask if mask.is_floating_point() else mask.to(image.dtype))

    @torch.no_grad()
    def macs(self, image: Tensor, mask: Tensor | None = None, head: bool = True) -> Tensor:
        """(b,) multiply-adds of each image's forward and gate, without running it; `head=False`: up to the head."""
        grid = self.grid(image)
        check_flag("head", head)
        gate = self.gate(image) if mask is None else self.from_mask(mask, image)
        return self._macs(gate, grid, head) + (self.gate.num_macs(grid.num_cells) if mask is None else 0)

    def macs_of(self, output: MSViTOutput, head: bool = True) -> Tensor:
        """(b,) multiply-adds of a forward that was run, gate included. `head=False`: up to the head."""
        check_kind("output", output, MSViTOutput, "what the model has returned")
        check_flag("head", head)
        grid = output.tokens.layout.grid
        return self._macs(output.gate, grid, head) + self.gate.num_macs(grid.num_cells)

    def _macs(self, gate: GateOutput, grid: ScaleGrid, head: bool) -> Tensor:
        return self.backbone.num_macs(gate.mask > 0.5, grid, self.reducer, head)


def macs(model: Any, images: Tensor, mask: Tensor | None = None) -> Tensor:
    """(b,) multiply-adds of each image's forward through a converted model, gate included unless a mask is given."""
    if not hasattr(model, "macs"):
        raise ValueError(f"macs takes a converted model, got {type(model).__name__}; wrap it with msvit.convert first")
    return model.macs(images, mask)
