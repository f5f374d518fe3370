"""Features of a converted model in timm's formats: maps over fine patches, whatever scale the tokens have.

    model.forward_features(images)                                  # (b, prefix + patches, d), as the host's
    model.forward_intermediates(images, 4, intermediates_only=True) # of the last four blocks: (b, d, hf, wf) each
    model.forward_intermediates(images, [5, 11], mask=mask)         # of two blocks, with decisions of your own

Every patch has the feature of the token that covers it, by the rule of `msvit.dense_map`: a coarse token is repeated
over its cell, a merged or fused one over all it covers, and patches that a reducer has dropped are 0. Stages of a Swin
before `merge_at` have no tokens in coarse cells: their maps are 0 there.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from msvit.backbones.base import Recorder
from msvit.checks import check_choice, check_flag, check_int
from msvit.gates import AllFine
from msvit.host_settings import HostSettings
from msvit.types import TokenBatch


class Features(HostSettings):
    """Base class with timm's feature methods, for a model with a `backbone`, `embed` and `encode`."""

    backbone: Any
    embed: Any
    encode: Any
    refresh: Any

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
