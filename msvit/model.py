"""MSViT: a Vision Transformer that spends tokens where the image needs them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from msvit.backbones.base import Backbone, Recorder
from msvit.checks import check_choice, check_flag, check_int, check_kind, is_traced
from msvit.gates import AllFine, Gate
from msvit.host_settings import HostSettings, gate_for_host
from msvit.integrations.hub import HubModel
from msvit.output import MSViTOutput
from msvit.reduction import Reducer
from msvit.types import GateOutput, ScaleGrid, TokenBatch, check_image, check_mask, unchecked

if TYPE_CHECKING:
    from msvit.image_files import ImageInput
    from msvit.prediction import Prediction


class MSViT(HubModel, HostSettings):
    """A Vision Transformer with tokens of mixed scale: a gate decides each cell's scale, the host does the rest.

    Make one with `msvit.convert`. Gate, mode and reducer are set here; `with_options` makes a model of the same weights
    with others.

        model.forward_features(images)                                  # (b, prefix + patches, d), as the host's
        model.forward_intermediates(images, 4, intermediates_only=True) # of the last four blocks: (b, d, hf, wf) each
        model.forward_intermediates(images, [5, 11], mask=mask)         # of two blocks, with decisions of your own
    """

    def __init__(
        self, backbone: Backbone, gate: Gate, coarse: int, mode: str = "packed", reducer: Reducer | None = None
    ) -> None:
        super().__init__()
        check_kind("backbone", backbone, Backbone, "what msvit.backbones.adapt returns")
        check_kind("gate", gate, Gate, "a msvit gate such as msvit.DiscGate(coarse=32)")
        if not (isinstance(gate, AllFine) and coarse == backbone.fine and backbone.merge_at is None):
            backbone.check_coarse(coarse)  # a dense model of one scale needs no cells: they may be its patches
        check_cells_of(gate, coarse)
        self.gate = gate
        self.backbone = backbone
        self.coarse = coarse
        if mode not in backbone.modes:
            kind = type(backbone.host).__name__
            raise ValueError(f"unknown mode {mode!r} for a {kind}; known: {', '.join(backbone.modes)}")
        self._mode = mode
        if reducer is not None:
            check_kind("reducer", reducer, Reducer, "a msvit reducer such as msvit.EViT(rate=0.7)")
            backbone.check_reducer(reducer)
        self.reducer = reducer

    def with_options(
        self, gate: Gate | None = None, mode: str | None = None, reducer: Reducer | Literal["same"] | None = "same"
    ) -> "MSViT":
        """Return a model of the same weights (not copies) with another gate, mode or reducer.

        None leaves an option as it is, but `reducer=None` removes the reducer.
        """
        gate = self.gate if gate is None else gate
        if gate.input_normalization != self.gate.input_normalization:  # else it takes the images that this model takes
            gate = gate_for_host(gate, self.host)
        mode = self.mode if mode is None else mode
        reducer = self.reducer if isinstance(reducer, str) and reducer == "same" else reducer
        if isinstance(reducer, Reducer) and reducer is not self.reducer:
            reducer.train(self.training)  # a new one is in training mode, in which it reduces less and is not compiled
        model = MSViT(self.backbone, gate, self.coarse, mode, reducer)
        model.take_metadata(self)
        return model

    def uncompiled(self) -> "MSViT":
        """Return this model or, of a compiled one, a model of the same weights and options that is not compiled."""
        return self

    host = property(lambda self: self.backbone.host)
    fine = property(lambda self: self.backbone.fine)

    def forward(
        self, image: Tensor, mask: Tensor | None = None, max_tokens: int | None = None, per_image: int | None = None
    ) -> MSViTOutput:
        """Run gate, tokenizer, transformer and head. See `encode` for the arguments."""
        gate, tokens = self.encode(image, mask, max_tokens, per_image)
        return unchecked(MSViTOutput, logits=self.backbone.head(tokens), gate=gate, tokens=tokens)

    def encode(
        self, image: Tensor, mask: Tensor | None = None, max_tokens: int | None = None, per_image: int | None = None
    ) -> tuple[GateOutput, TokenBatch]:
        """Run all but the head: return the gate's decisions and the tokens after the last block.

        `mask` (b, hc, wc), 1 = fine, replaces the gate's decisions. `max_tokens` is a budget for the whole batch: if
        the gate asks for more, the cells with the lowest scores stay coarse. Shapes are then known beforehand, and
        nothing waits for the device (packed mode only).

        `per_image` is a number of tokens, prefix not counted, that every image gets: the cells that the gate ranks
        highest are fine, whatever its threshold. Possible are cells + (k k - 1) j tokens, with j of the cells fine:
        other numbers are rounded down to the next of these. With it, too, shapes are known beforehand in packed mode.
        """
        gate, tokens = self.embed(image, mask, max_tokens, per_image)
        return gate, self.backbone(tokens, reducer=self.reducer)

    def embed(
        self, image: Tensor, mask: Tensor | None = None, max_tokens: int | None = None, per_image: int | None = None
    ) -> tuple[GateOutput, Any]:
        """Return the gate's decisions and the tokens before the first block. See `encode` for the arguments."""
        if is_traced() and (torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting()) and self.mode != "masked":
            raise ValueError(
                f"torch.onnx.export and torch.export cannot trace a model of mode {self.mode!r}, whose layout is "
                f"made anew for each batch; call msvit.export(model, 'model.onnx'), or 'model.pt2'"
            )
        self.backbone.check_sharding()
        grid = self.grid(image)
        if per_image is not None:
            gate, max_tokens = self.fix_tokens(image, mask, max_tokens, per_image)
        else:
            gate = self.gate(image) if mask is None else self.from_mask(mask, image)  # (b, hc, wc), 1 = fine
            gate = gate if max_tokens is None else self.limit_tokens(gate, grid, max_tokens)
            if mask is None:
                self.warn_of_images(image, gate.mask)
        layout = self.backbone.make_layout(gate, grid, self._mode, max_tokens)  # which tokens run
        return gate, self.backbone.tokenize(image, layout, gate.mask)  # embedded pixels and positions

    def predict(
        self, images: "ImageInput | Iterable[ImageInput]", top: int = 5, *, size: int | None = None,
        mean: Sequence[float] | None = None, std: Sequence[float] | None = None, batch_size: int = 32,
    ) -> "list[Prediction]":  # fmt: skip
        """Return the `top` most probable classes of each image: a path, a folder, a PIL image, or a list.

        Images are prepared as `self.preprocessing` has it; `size`, `mean` and `std` take the place of its own.
        """
        from msvit.prediction import predict, resolve

        return predict(self, images, top, resolve(self, size, mean, std), batch_size)

    def refresh(self) -> None:
        """Drop everything that was computed from the weights in advance.

        A plain model never needs it. A compiled one does after writes that PyTorch does not count: through `.data`, in
        inference mode, by a fused optimizer. docs/performance.md lists which writes are noticed.
        """
        self.backbone.refresh()

    def limit_tokens(self, gate: GateOutput, grid: ScaleGrid, max_tokens: int) -> GateOutput:
        """Return the decisions with no more fine cells than fit into `max_tokens`."""
        check_int("max_tokens", max_tokens, at_least=1, at_most=2**31 - 1)  # cu_seqlens are int32
        if self.mode != "packed":
            raise ValueError(
                f"max_tokens needs mode 'packed', but the model's is {self.mode!r}; "
                "use model.with_options(mode='packed')"
            )
        return self.backbone.limit_tokens(gate, grid, max_tokens)

    def fix_tokens(
        self, image: Tensor, mask: Tensor | None, max_tokens: int | None, per_image: int
    ) -> tuple[GateOutput, int | None]:
        """Return decisions with as many tokens in every image, and the slots they need in packed mode."""
        for name, value in (("mask", mask), ("max_tokens", max_tokens)):
            if value is not None:
                raise ValueError(f"per_image is {per_image}, but {name} is given too; leave out one of them")
        grid = self.grid(image)
        num_fine = self.backbone.num_fine(per_image, grid)
        gate = self.gate.decide_num(image, num_fine)
        if self.mode != "packed":
            return gate, None
        tokens = int(self.backbone.num_tokens(torch.tensor(num_fine), grid))
        return gate, image.shape[0] * (self.backbone.num_prefix + tokens)

    def grid(self, image: Tensor) -> ScaleGrid:
        """Return the grid of the images, or raise ValueError unless the model takes them."""
        check_cells_of(self.gate, self.coarse)  # it may have been replaced
        check_image(image, self.coarse, self.backbone.in_chans)
        weights = self.backbone.host.patch_embed.proj.weight.dtype
        if image.dtype is not weights and not torch.is_autocast_enabled(image.device.type):
            raise ValueError(
                f"images are {image.dtype}, but the model's weights are {weights}; "
                f"convert one of them, or run under torch.autocast"
            )
        height, width = image.shape[2:]
        return unchecked(ScaleGrid, height=height, width=width, fine=self.backbone.fine, coarse=self.coarse)

    def from_mask(self, mask: Tensor, image: Tensor) -> GateOutput:
        """Return a mask given by the user as a GateOutput."""
        check_mask(mask, image.shape[0], self.grid(image).cells)
        mask = mask.to(image.device)
        return GateOutput.from_mask(mask if mask.is_floating_point() else mask.to(image.dtype))

    @torch.no_grad()
    def macs(self, image: Tensor, mask: Tensor | None = None, head: bool = True) -> Tensor:
        """Return the (b,) multiply-adds of gate and forward, without running it; `head=False`: of `encode`."""
        grid = self.grid(image)
        check_flag("head", head)
        gate = self.gate(image) if mask is None else self.from_mask(mask, image)
        macs = self.backbone.num_macs(gate.mask > 0.5, grid, self.reducer, head)
        return macs + (self.gate.num_macs(grid.num_cells) if mask is None else 0)

    def macs_of(self, output: MSViTOutput, head: bool = True) -> Tensor:
        """Return the (b,) multiply-adds of a forward that was run, gate included; `head=False`: of `encode`."""
        check_kind("output", output, MSViTOutput, "what the model returned")
        check_flag("head", head)
        grid = output.tokens.layout.grid
        macs = self.backbone.num_macs(output.gate.mask > 0.5, grid, self.reducer, head)
        return macs + self.gate.num_macs(grid.num_cells)

    # timm's feature methods. Every patch has the feature of the token that covers it, by the rule of `msvit.dense_map`:
    # a coarse token is repeated over its cell, a merged or fused one over all it covers, and patches that a reducer has
    # dropped are 0. Stages of a Swin before `merge_at` have no tokens in coarse cells: their maps are 0 there.

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the features after the last norm: (b, prefix + patches, d), of a Swin (b, rows, columns, d)."""
        return self.backbone.features(self.encode(x, mask)[1])

    def forward_head(self, x: Tensor | TokenBatch, pre_logits: bool = False) -> Any:
        """Run the host's head on what `forward_features` returns or on tokens; `pre_logits`: its classifier's input.

        Tokens, `model.encode(images)[1]`, are right for every host. Features do not show which patches share a token:
        hosts that pool by attention need tokens unless the gate is AllFine, those that average if there is a reducer.
        """
        check_flag("pre_logits", pre_logits)
        if isinstance(x, TokenBatch):
            return self.backbone.head(x, pre_logits)
        if not isinstance(x, Tensor):
            raise ValueError(
                f"x is a {type(x).__name__}, but must be the tensor of forward_features or a TokenBatch; "
                "pass model.encode(images)[1]"
            )
        all_fine, reduced = isinstance(self.gate, AllFine), self.reducer is not None
        return self.backbone.head_of_features(x, pre_logits, all_fine, reduced)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        mask: Tensor | None = None,
    ) -> Any:
        """Return features after some blocks (of a Swin: stages), as timm does, and those of `forward_features`.

        `indices`: the last so many blocks, or a list of blocks; None: all. The features are (b, d, hf, wf), in format
        "NLC" (b, patches, d); with `return_prefix_tokens` pairs of these and (b, prefix, d).
        """
        flags = {"return_prefix_tokens": return_prefix_tokens, "norm": norm, "stop_early": stop_early}
        flags |= {"intermediates_only": intermediates_only, "output_dict": output_dict}
        for name, value in flags.items():
            check_flag(name, value)
        check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        if output_fmt == "NLC" and self.backbone.merge_at is not None:
            raise ValueError(
                f"output_fmt is 'NLC', but the stages of a {type(self.host).__name__} have maps; "
                "pass output_fmt='NCHW', to get_intermediate_layers reshape=True"
            )
        record = Recorder(self._indices(indices), stop_early)
        tokens = self.embed(x, mask)[1]
        features, taken = self.backbone.intermediates(tokens, record, norm, not intermediates_only, self.reducer)
        maps = [m if output_fmt == "NCHW" else m.flatten(2).transpose(1, 2) for _, m in taken]
        prefix = [p for p, _ in taken] if return_prefix_tokens and self.num_prefix_tokens else None
        if output_dict:
            outputs = {"image_intermediates": maps, "image_intermediates_prefix": prefix, "image_features": features}
            return {name: value for name, value in outputs.items() if value is not None}
        maps = maps if prefix is None else list(zip(maps, prefix, strict=True))
        return maps if intermediates_only else (features, maps)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        mask: Tensor | None = None,
    ) -> Any:
        """Call `forward_intermediates` with the arguments that timm has for users of DINO and DINOv2."""
        check_flag("reshape", reshape)
        fmt = "NCHW" if reshape else "NLC"
        return self.forward_intermediates(x, n, return_prefix_tokens, norm, False, fmt, True, mask=mask)

    def _indices(self, indices: int | Sequence[int] | None) -> list[int]:
        """Blocks by their numbers from 0 on."""
        depth = len(self.backbone.blocks)
        if isinstance(indices, list | tuple | range) and len(indices):
            return [check_int("indices", i, at_least=-depth, at_most=depth - 1) % depth for i in indices]
        last = depth if indices is None else check_int("indices", indices, at_least=1, at_most=depth)
        return list(range(depth - last, depth))

    def get_classifier(self) -> Any:
        """Return the host's last layer; of a distilled DeiT both."""
        return self.host.get_classifier()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Give the host a new classifier; with 0 classes none, so that logits are pooled features."""
        check_int("num_classes", num_classes, at_least=0)
        if global_pool is not None:
            self.backbone.check_classifier(global_pool)
        self.host.reset_classifier(num_classes, global_pool)
        self.classes = None  # names of the labels that were
        self.refresh()


def check_cells_of(gate: Gate, coarse: int) -> None:
    """Raise ValueError unless the gate decides for cells of this side."""
    if gate.coarse != coarse:
        raise ValueError(
            f"the gate decides for cells of {gate.coarse}px, but coarse is {coarse}px; "
            f"make it with coarse={coarse} (a saved one: msvit.load_gate(folder, coarse={coarse}))"
        )


def inner_msvit(model: Any) -> MSViT | None:
    """Return the MSViT inside a converted transformers model; None for any other object."""
    inner = getattr(model, "msvit", None)
    return inner if isinstance(inner, MSViT) else None


def macs(model: Any, images: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the (b,) multiply-adds of each image's forward, gate included unless a mask is given.

    They are whole numbers: their mean is `msvit.macs(model, images).double().mean()`.
    """
    if not hasattr(model, "macs"):
        raise ValueError(f"macs takes a converted model, got {type(model).__name__}; wrap it with msvit.convert first")
    return model.macs(images, mask)
