"""convert: a Vision Transformer of timm or transformers, or a Swin in, an MSViT out."""

from torch import nn

from msvit.backbones import adapt
from msvit.checks import check_kind
from msvit.gates import Gate, LearnedGate
from msvit.host_settings import gate_for_host, host_normalization
from msvit.model import MSViT
from msvit.reduction import Reducer


def convert(
    host: nn.Module,
    coarse: int | None = None,
    gate: Gate | None = None,
    mode: str = "packed",
    reducer: Reducer | None = None,
    merge_at: int | None = None,
) -> MSViT:
    """Give a ViT of timm or transformers mixed-scale tokens. Weights are shared; the host stays as it was.

        model = msvit.convert(vit)                                     # a LearnedGate, all cells fine at the start
        model = msvit.convert(vit, gate=msvit.DiscGate(coarse=32))     # a fixed one
        model = msvit.convert(vit, reducer=msvit.EViT(rate=0.7))       # and fewer tokens from block to block
        model = msvit.convert(Dinov2Model.from_pretrained(name))       # of transformers: `logits` is the pooled output
        model = msvit.convert(swin, merge_at=3, gate=gate)             # coarse cells skip the Swin's stages 1 and 2

    `coarse` is the side of a cell in px, by default twice the host's patch size; with AllFine, the gate of a dense
    model, it may be the patch size itself, so that any whole number of patches will do. For a Swin it must be a
    multiple of the px that a token of stage `merge_at` covers (stages count from 1; 3 by default); the default is the
    gate's cell or, without a gate, that number of px.

    A gate with a record of the normalisation it was trained with gets its images in it: they are mapped from the mean
    and std of the host's `pretrained_cfg`, where that has them. A gate made here is recorded with those.
    """
    if isinstance(host, MSViT):
        raise ValueError("the model is converted already; use model.with_options(gate=...), or convert model.host anew")
    backbone = adapt(host, merge_at)
    if gate is not None:
        check_kind("gate", gate, Gate, "a msvit gate such as msvit.DiscGate(coarse=32)")
    weight = backbone.host.patch_embed.proj.weight
    coarse = backbone.usual_coarse(gate) if coarse is None else coarse
    if gate is None:
        backbone.check_coarse(coarse)
        rows, columns = backbone.native_patches
        k = coarse // backbone.fine
        gate = LearnedGate(coarse, grid=(max(1, rows // k), max(1, columns // k)), in_chans=backbone.in_chans)
        gate = gate.to(weight.dtype).set_normalization(host_normalization(backbone.host))
    model = MSViT(backbone, gate_for_host(gate, backbone.host), coarse, mode, reducer)
    for each in (gate, model.gate):  # they share weights, but perhaps not all buffers
        each.to(weight.device)
    return model.train(host.training)
